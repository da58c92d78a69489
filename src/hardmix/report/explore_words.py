"""What the page of an exploration says in sentences."""

import os
from pathlib import Path

from hardmix.data.image_files import printable
from hardmix.explore.exploring import Exploration

DOUBTFUL = 0.5
"""Labels of which less than this share agrees with the neighbours tell more of the encoder."""
MANY = 0.3
"""Share of images that are copies from which on the encoder is doubted, not the images."""


def title_of(found: Exploration) -> str:
    """How many images, of what."""
    files = found.images.files
    if files is None:
        return f"{len(found):,} images of {found.images.name}"
    folder = Path(os.path.commonpath([os.path.dirname(file) for file in files])).absolute()
    words = folder.parts[-2:] if folder.name in ("train", "images", "photos") else folder.parts[-1:]
    return f"{len(found):,} images of {printable('/'.join(words))}"


def paragraph_of(found: Exploration) -> str:
    """What was found, in one paragraph."""
    copies = found.duplicates
    sentences = [
        f"{_count(len(copies.groups), 'group')} of near-duplicates: {copies.num_others:,} images"
        " could go."
        if copies.groups
        else "No near-duplicates."
    ]
    if found.clusters is not None:
        sentences.append(f"{_count(len(found.clusters.centres), 'cluster')}.")
    standing = found.outliers.number
    sentences.append(
        f"{_count(standing, 'image')} unlike all others." if standing else "No image stands out."
    )
    if found.mislabelled is not None:
        sentences.append(
            f"{_count(len(found.mislabelled.indices), 'label')} that the neighbours disagree with."
        )
    return " ".join(sentences)


def cautions_of(found: Exploration) -> list[str]:
    """Where what was found tells more of the encoder than of the images."""
    sentences = []
    if found.duplicates.num_others > MANY * len(found):
        sentences.append(
            "So many near-duplicates may be images that only this encoder takes for the same: look"
            " at some before you delete any, or raise --similarity and --edges."
        )
    labels = found.mislabelled
    if labels is not None and labels.agreement < DOUBTFUL:
        sentences.append(
            f"Only {labels.agreement:.0%} of the labels agree with most of their neighbours: this"
            " encoder does not tell these classes apart well enough to judge labels by it."
        )
    if found.clusters is None:
        sentences.append("No clusters: they need pip install 'hardmix[analysis]'.")
    return sentences


def notes_of(found: Exploration, folder: str) -> dict[str, str]:
    """What the views are, each in a sentence or two."""
    labels = found.mislabelled
    agreement = "" if labels is None else f"{labels.agreement:.0%}"
    unusual = found.outliers.number
    return {
        "duplicates": "The first of each group has the most pixels, then the largest file: keep it."
        " The others are nearly the same in features and edges."
        f" {folder}/duplicates.csv lists them.",
        "clusters": "k-means on the features; each begins with its most typical images. Names are"
        f" words of the file names, or the commonest class. {folder}/clusters.csv lists all.",
        "unusual": (
            f"{_count(unusual, 'image')} far from all others, the farthest first."
            if unusual
            else "None stands out; these are the farthest from their neighbours."
        )
        + " The number is 1 less the mean similarity with the 10 nearest.",
        "labels": f"The label, and below it what most of the 20 nearest images are. {agreement} of"
        f" all labels agree with most of their neighbours. {folder}/suspect-labels.csv lists them.",
    }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
