"""The sentences on the page of an exploration."""

import os
from pathlib import Path

from hardmix.data.image_files import printable
from hardmix.explore.exploring import Exploration
from hardmix.report.overview import folder_name

DOUBTFUL = 0.5
"""Below this fraction of labels that agree with their neighbours, the encoder is to blame."""
MANY = 0.3
"""Above this fraction of near-duplicates, the encoder is to blame rather than the images."""


def title_of(found: Exploration) -> str:
    """Return the number of images and the data set's name."""
    files = found.images.files
    if files is None:
        return f"{len(found):,} images of {found.images.name}"
    folder = Path(os.path.commonpath([os.path.dirname(file) for file in files])).absolute()
    return f"{len(found):,} images of {printable(folder_name(str(folder)))}"


def paragraph_of(found: Exploration) -> str:
    """Return the findings in one paragraph."""
    copies = found.duplicates
    sentences = [
        f"{_count(len(copies.groups), 'group')} of near-duplicates:"
        f" {_count(copies.num_others, 'image')} could be removed."
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
            f"{_count(len(found.mislabelled.indices), 'label')} in conflict with the neighbours."
        )
    return " ".join(sentences)


def cautions_of(found: Exploration) -> list[str]:
    """Return warnings about findings that may be due to the encoder, not the images."""
    sentences = []
    if found.duplicates.num_others > MANY * len(found):
        sentences.append(
            "So many near-duplicates may be images that only this encoder cannot distinguish:"
            " inspect some before you delete any, or raise --similarity and --edges."
        )
    labels = found.mislabelled
    if labels is not None and labels.agreement < DOUBTFUL:
        sentences.append(
            f"Only {labels.agreement:.0%} of the labels agree with most of their neighbours: this"
            " encoder does not separate the classes well enough to judge labels."
        )
    if found.clusters is None:
        sentences.append("No clusters: clustering needs pip install 'hardmix[analysis]'.")
    return sentences


def notes_of(found: Exploration, folder: str) -> dict[str, str]:
    """Return an explanation of each view."""
    labels = found.mislabelled
    agreement = "" if labels is None else f"{labels.agreement:.0%}"
    unusual = found.outliers.number
    return {
        "duplicates": "The first image of each group is the one to keep: it has the most pixels, or"
        " the largest file. The others are nearly the same in features and edges."
        f" {folder}/duplicates.csv lists them.",
        "clusters": "k-means on the features; each cluster starts with its most typical images. Its"
        " name is a word from the file names, or the most common class."
        f" {folder}/clusters.csv lists all.",
        "unusual": (
            f"{_count(unusual, 'image')} far from all others, the farthest first."
            if unusual
            else "No image stands out; these are the farthest from their neighbours."
        )
        + " The number is 1 minus the mean similarity to the 10 nearest images.",
        "labels": "Each image's label, and below it the most common label of the 20 nearest"
        f" images. {agreement} of all labels agree with most of their neighbours."
        f" {folder}/suspect-labels.csv lists them.",
    }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
