"""A run's features of its evaluation images: map, spectrum, alignment and uniformity (App. A)."""

import hashlib
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.analysis.figures.maps import MapPoints, embedding_map, feature_spectrum
from hardmix.analysis.figures.picture import Found, load
from hardmix.analysis.tsne import FEWEST, MOST, tsne
from hardmix.data.datasets import has_test, open_images
from hardmix.data.image_set import ImageSet
from hardmix.data.sample_images import file_of
from hardmix.data.thumbnails import thumbnail_of
from hardmix.errors import InputError
from hardmix.evaluation.feature_files import features_of
from hardmix.evaluation.features import Features, extract, load_encoder
from hardmix.mixing.embedding_space import CHUNK, alignment, uniformity
from hardmix.runs.folder import Run, versions
from hardmix.runtime.device import choose_compute
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.bounded_files import most_weights, read_file
from hardmix.settings.config import DataConfig

MOST_IMAGES = 50_000
"""Most images whose features are measured: all of ImageNet's validation set."""
MOST_THUMBNAILS = 240
THUMBNAIL = 96
"""Pixels of a thumbnail's side: twice as many as on a page, for sharp screens."""
THUMBNAIL_BYTES = 700_000
"""Most bytes of a map's thumbnails, so that its JSON stays below 900 kB."""
NARROW = 0.02
"""Fraction of the directions below which the effective rank is reported as a collapse."""


class MeasuredRun(NamedTuple):
    """What `measure_run` measured, and on which images."""

    images: ImageSet
    split: str
    features: Features
    measured: dict[str, Any]
    missing: list[str]
    """Sentences about what is missing."""


def look_at_features(run: Run) -> Found:
    """Draw map and spectrum and write results/embedding.json, unless they are up to date."""
    load_encoder(run.path)  # raises InputError if it cannot be loaded
    mark = f"{_digest(run)} hardmix {versions()['hardmix']}"
    kept = [load(run.figures, name, mark) for name in ("embedding-map", "feature-spectrum")]
    there = [picture for picture in kept if picture is not None]
    if len(there) == len(kept) and (run.results / "embedding.json").exists():
        return there, []
    config = run.config()
    images, split, features, measured, missing = measure_run(run)
    warning = measured.pop("warning")
    values = measured.pop("singular_values")
    pictures = [feature_spectrum(values, measured["effective_rank"], warning)]
    if warning is not None:
        missing.append(f"{run.path}: {warning}")
    if len(features.ids) < FEWEST:
        missing.append(f"{run.path}: no map of {len(features.ids)} images.")
    else:
        seed = seed_of("embedding map", config.train.seed)
        points = map_points(features, images, seed)
        pictures.insert(0, embedding_map(points, f"{split} images of {images.name}"))
    return [replace(picture, mark=mark) for picture in pictures], missing


def measure_run(run: Run, data: DataConfig | None = None) -> MeasuredRun:
    """Write results/embedding.json, on the run's own images or others, without figures."""
    config = run.config()
    data = data or config.data
    encoder = load_encoder(run.path)
    split, images = _evaluation_images(data, config.train.seed)
    if split == "training" and len(images) < MOST_IMAGES and data.num_images is None:
        features, images = features_of(run.path, data, encoder)  # once, for neighbours as well
    else:
        compute = choose_compute(config.train.device, "fp32")
        encoder.to(compute.device).to(memory_format=torch.channels_last)
        features = extract(encoder, images, data, compute=compute, title="evaluation features")
    measured, unmeasured = measure(features)
    missing = [f"{run.path}: {sentence}" for sentence in unmeasured]
    kept = {k: v for k, v in measured.items() if k not in ("warning", "singular_values")}
    run.write_result("embedding", {**kept, "split": split, "data": images.name})
    return MeasuredRun(images, split, features, measured, missing)


def measure(features: Features) -> tuple[dict[str, Any], list[str]]:
    """Return App. A's losses, singular values and effective rank, and what is missing."""
    missing = []
    aligned = None
    try:
        aligned = alignment(features.features, features.labels)
    except InputError as error:
        missing.append(f"No alignment: {error}")
    values = singular_values(features.features)
    rank = effective_rank(values)
    directions = len(values)
    narrow = rank < max(2.0, NARROW * directions)
    warning = (
        f"The features may have collapsed: their effective rank is {rank:.1f} of {directions}."
        if narrow
        else None
    )
    return {
        "alignment": aligned,
        "uniformity": uniformity(features.features),
        "effective_rank": rank,
        "directions": directions,
        "images": len(features.ids),
        "singular_values": values.tolist(),
        "warning": warning,
    }, missing


def singular_values(features: Float[Tensor, "n dim"]) -> Float[Tensor, " rank"]:
    """Return the singular values of features at unit length, then centred, largest first."""
    number, dim = features.shape
    products, total = torch.zeros(dim, dim).double(), torch.zeros(dim).double()
    for some in features.split(CHUNK):  # all at once in float64 may fill the memory
        unit = normalize(some.double(), dim=1)
        products.addmm_(unit.T, unit)
        total += unit.sum(dim=0)
    products -= torch.outer(total, total) / number
    squared: Tensor = torch.linalg.eigvalsh(products).flip(0).clamp(min=0)
    return squared.sqrt()[: min(number, dim)]


def effective_rank(values: Float[Tensor, " rank"]) -> float:
    """Roy and Vetterli (2007): exp of the entropy of the singular values over their sum."""
    total = float(values.sum())
    if total == 0:
        return 1.0  # one point
    shares = values[values > 0] / total
    return math.exp(float(-(shares * shares.log()).sum()))


def map_points(features: Features, images: ImageSet, seed: int) -> MapPoints:
    """Return at most `MOST` images in the plane, with thumbnails for some of them."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(features.ids), generator=generator)[:MOST].sort().values
    places = tsne(normalize(features.features[chosen].float(), dim=1), seed)
    x, y = ([round(value, 2) for value in column] for column in places.T.tolist())
    labels = features.labels[chosen].tolist()
    shown, size = [], 0
    for point in torch.randperm(len(chosen), generator=generator)[:MOST_THUMBNAILS].tolist():
        index = int(features.ids[chosen[point]])
        image = thumbnail_of(images, index, THUMBNAIL)
        name, file = images.name_of(index), file_of(images, index)
        entry = {"point": point, "image": image, "name": name, "file": file}
        size += len(image) + len(name) + len(file) + 50
        if size > THUMBNAIL_BYTES:
            break
        shown.append(entry)
    return MapPoints(x, y, labels, list(images.classes or ()), shown)


def _evaluation_images(data: DataConfig, seed: int) -> tuple[str, ImageSet]:
    """Return the test images if there are any, otherwise the training images."""
    split = "test" if has_test(data) else "training"
    images = open_images(data, "test" if split == "test" else "train", seed)
    return split, images.subset(MOST_IMAGES, seed)


def _digest(run: Run) -> str:
    return hashlib.sha256(read_file(run.encoder_file, most_weights())).hexdigest()[:16]
