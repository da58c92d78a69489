"""A run's features of its evaluation images: map, spectrum, alignment and uniformity (App. A)."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.analysis.picture import (
    COLOURS,
    MARKERS,
    Found,
    Picture,
    canvas,
    colour,
    legend_below,
    load,
    log_scale,
    shown,
)
from hardmix.data.image_set import ImageSet
from hardmix.data.sources import has_test, open_images
from hardmix.data.thumbnails import file_of, thumbnail_of
from hardmix.errors import InputError
from hardmix.evaluation.features import Features, extract, features_of
from hardmix.evaluation.trained_encoder import load_encoder
from hardmix.mixing.embedding_space import CHUNK, alignment, uniformity
from hardmix.runs.folder import Run, versions
from hardmix.runtime.console import say
from hardmix.runtime.device import choose_compute
from hardmix.runtime.files import most_weights, read_file
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import DataConfig

MOST_IMAGES = 50_000
"""Most images whose features are measured: all of ImageNet's validation set."""
MOST_THUMBNAILS, THUMBNAIL = 240, 96
"""Thumbnails of a map, and pixels of their sides: twice those of a page, for sharp screens."""
THUMBNAIL_BYTES = 700_000
"""Most bytes of a map's thumbnails, so that its JSON stays below 900 kB."""
NARROW = 0.02
"""Fraction of the directions below which the effective rank is reported as a collapse."""
MOST, FEWEST = 5000, 5
"""Most and fewest points of a map; more take minutes and hide each other."""
PERPLEXITY = 30.0
"""Perplexity of t-SNE, unless there are few points."""
LOOKS = len(COLOURS) * len(MARKERS)
"""Number of classes that look different, since the two numbers have no common divisor."""
MOST_NAMED = 21
"""Classes with an entry in the map's legend."""


class MeasuredRun(NamedTuple):
    """The result of `measure_run`, and the images it was measured on."""

    images: ImageSet
    split: str
    features: Features
    measured: dict[str, Any]
    missing: list[str]
    """Sentences about what is missing."""


def look_at_features(run: Run) -> Found:
    """Draw map and spectrum and write results/embedding.json, unless they are up to date."""
    load_encoder(run.path)  # it may raise InputError, before any work
    mark = f"{_digest(run)} hardmix {versions()['hardmix']}"
    kept = [load(run.figures, name, mark) for name in ("embedding-map", "feature-spectrum")]
    current = [picture for picture in kept if picture is not None]
    if len(current) == len(kept) and (run.results / "embedding.json").exists():
        return current, []
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
        features, images = features_of(run.path, data, encoder)  # they also serve neighbours
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
    for part in features.split(CHUNK):  # all at once in float64 could fill the memory
        unit = normalize(part.double(), dim=1)
        products.addmm_(unit.T, unit)
        total += unit.sum(dim=0)
    products -= torch.outer(total, total) / number
    squared: Tensor = torch.linalg.eigvalsh(products).flip(0).clamp(min=0)
    return squared.sqrt()[: min(number, dim)]


def effective_rank(values: Float[Tensor, " rank"]) -> float:
    """Return Roy and Vetterli's rank (2007): exp of the entropy of the values over their sum."""
    total = float(values.sum())
    if total == 0:
        return 1.0  # one point
    shares = values[values > 0] / total
    return math.exp(float(-(shares * shares.log()).sum()))


class MapPoints(NamedTuple):
    """A t-SNE map of images."""

    x: list[float]
    """Horizontal place of each image in the plane."""
    y: list[float]
    """Vertical place of each image."""
    label: list[int]
    """Class of each image, -1 if unknown."""
    classes: list[str]
    """Names of the classes."""
    thumbnails: list[dict[str, Any]]
    """`point` (an index), `image` (a data URI), `name` and `file` of some of the images."""


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


def tsne(vectors: Float[Tensor, "n dim"], seed: int) -> Float[Tensor, "n 2"]:
    """Return places of at most `MOST` vectors in the plane, the same for every call with a seed."""
    number = len(vectors)
    if not FEWEST <= number <= MOST:
        raise InputError(f"t-SNE of {number} points: it needs {FEWEST} to {MOST}.")
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    say(f"t-SNE of {number} points: about {max(1, round(number / 100))} s ...")
    model = TSNE(
        perplexity=min(PERPLEXITY, (number - 1) / 3),
        init="pca" if vectors.shape[1] > 1 else "random",
        random_state=seed % 2**32,
    )
    # With several threads, sums are rounded in varying order, and the map differs each time.
    with threadpool_limits(limits=1):
        places = model.fit_transform(vectors.detach().float().cpu().numpy())
    return torch.from_numpy(places)


def embedding_map(points: MapPoints, of: str) -> Picture:
    """Draw the run's features in the plane; a page shows the thumbnails on hover."""
    title = "Map of the features"
    labels = sorted({label for label in points.label if label >= 0})
    with canvas(title, 4.8) as figure:
        axes = figure.subplots()
        handles = []
        for label in [*([-1] if -1 in points.label else []), *labels]:
            members = [i for i, each in enumerate(points.label) if each == label]
            handles.append(
                axes.scatter(
                    [points.x[i] for i in members],
                    [points.y[i] for i in members],
                    s=7 if len(points.x) > 1500 else 14,
                    color="#999999" if label < 0 else colour(labels.index(label)),
                    marker=MARKERS[labels.index(label) % len(MARKERS) if label >= 0 else 0],
                    label=shown(points.classes[label]) if label >= 0 else "class unknown",
                    linewidths=0,
                    rasterized=True,  # thousands of SVG elements would make a page slow
                )
            )
        axes.set(xlabel="first t-SNE dimension", ylabel="second t-SNE dimension")
        axes.set(xticks=[], yticks=[])
        if len(handles) <= MOST_NAMED and labels:
            legend_below(figure, handles, columns=4, enlarge=2)
    caption = (
        f"t-SNE of the trunk's features (no head, unit length) of {len(points.x)} {of}: neighbours"
        " are images that the encoder considers similar, distances between clusters have no unit."
    )
    if labels:
        caption += " A colour and marker is a class, which the encoder was not told."
    if len(labels) > LOOKS:
        caption += f" Beyond {LOOKS} classes, they repeat."
    return Picture("embedding-map", title, caption, points._asdict(), figure)


def feature_spectrum(
    singular_values: Sequence[float], effective_rank: float, warning: str | None
) -> Picture:
    """Draw the singular values and effective rank: how many directions the features use."""
    title = "Spectrum of the features"
    largest = max(singular_values, default=0.0)
    shares = [float(f"{value / (largest or 1.0):.5g}") for value in singular_values]
    floor = 1e-6  # values below it are rounding errors
    with canvas(title, 3.4) as figure:
        axes = figure.subplots()
        ranks = range(1, len(shares) + 1)
        axes.plot(ranks, [max(floor, share) for share in shares], color=COLOURS[0])
        low = effective_rank < 0.6 * len(shares)
        axes.axvline(effective_rank, color=COLOURS[1], linestyle="--")
        axes.annotate(
            f"effective rank {effective_rank:.1f} of {len(shares)}",
            (effective_rank, 0.9),
            xycoords=("data", "axes fraction"),
            xytext=(6 if low else -6, 0),
            textcoords="offset points",
            ha="left" if low else "right",
        )
        axes.set(xlabel="direction, strongest first", ylabel="singular value (largest: 1)")
        log_scale(axes, "y")
        axes.grid()
    numbers = {
        "singular_values": shares,
        "effective_rank": effective_rank,
        "directions": len(shares),
        "warning": warning,
    }
    caption = (
        "Singular values of the features (unit length, then centred). The effective rank is"
        " exp(entropy of the singular values over their sum) (Roy and Vetterli): that many equally"
        " strong directions would have the same entropy. A curve that drops at once means collapse."
    )
    return Picture("feature-spectrum", title, f"{caption} {warning or ''}".strip(), numbers, figure)
