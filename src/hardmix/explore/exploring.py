"""`hardmix explore RUN`: all findings about a set of images, as values for the page."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.data.image_files import printable
from hardmix.data.image_set import UNKNOWN, ImageSet
from hardmix.errors import InputError
from hardmix.evaluation.feature_files import features_of
from hardmix.evaluation.features import Features, TrainedEncoder, load_encoder
from hardmix.explore.cluster_names import cluster_names
from hardmix.explore.clustering import Clusters, clusters
from hardmix.explore.label_checks import NEIGHBOURS, Mislabelled, disagreeing, mislabelled
from hardmix.explore.near_duplicates import Duplicates, duplicates
from hardmix.explore.nearest import Neighbours, neighbours
from hardmix.explore.outlying import NEIGHBOURS as AROUND
from hardmix.explore.outlying import Outliers, outlying
from hardmix.explore.pictures import Pictures, make_pictures, picture_of
from hardmix.runtime.console import say, warn
from hardmix.settings.config import DataConfig

SMALL = 16
"""Side in pixels of the thumbnails that confirm near-duplicates."""
MOST_IMAGES = 1_000_000
"""Most images, since each is compared with every other."""


@dataclass(frozen=True, kw_only=True)
class ExploreOptions:
    """Options of an exploration."""

    num_clusters: int | None = None
    """Number of clusters. Unset: the square root of half the images, from 2 to 64."""
    similarity: float = 0.8
    """Smallest cosine similarity of near-duplicates' features, after subtracting the mean."""
    edges: float = 0.9
    """Smallest cosine similarity of near-duplicates' edges at 16 x 16 pixels."""
    queries: tuple[Path, ...] = ()
    """Other images to find neighbours of."""
    seed: int = 0
    """Seed of the clustering."""

    def __post_init__(self) -> None:
        if self.num_clusters is not None and self.num_clusters < 1:
            raise InputError(f"num_clusters={self.num_clusters} must be at least 1 (--clusters).")
        for name in ("similarity", "edges"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise InputError(f"{name}={value} must be above 0 and at most 1: it is a cosine.")


@dataclass(frozen=True, eq=False)
class OutsideImage:
    """A query image and its neighbours in the set."""

    name: str
    picture: UInt8[np.ndarray, "tile tile 3"]
    indices: Int64[np.ndarray, " k"]
    similarities: Float32[np.ndarray, " k"]


@dataclass(frozen=True, eq=False)
class Exploration:
    """Findings about a set of images. Rows are those of `vectors`."""

    run: Path
    images: ImageSet
    ids: list[int]
    """Index of each row in `images`; unreadable images have no row."""
    vectors: Float32[Tensor, "n dim"]
    """Features minus their mean, at unit length."""
    labels: Int64[np.ndarray, " n"]
    """Label of each row, -1 if it has none."""
    pictures: Pictures
    neighbours: Neighbours
    duplicates: Duplicates
    clusters: Clusters | None
    """None without scikit-learn."""
    names_of_clusters: list[str]
    """Names of the clusters; empty if no word fits."""
    outliers: Outliers
    mislabelled: Mislabelled | None
    """None without labels."""
    queries: list[OutsideImage]

    def __len__(self) -> int:
        return len(self.ids)

    def name(self, row: int) -> str:
        """Return the file's name, or "cifar10[123]"."""
        return self.images.name_of(self.ids[row])

    def class_of(self, label: int) -> str:
        """Return a class's name; empty if it is unknown."""
        classes = self.images.classes or ()
        return classes[label] if 0 <= label < len(classes) else ""


def explore_run(run: Path, data: DataConfig, options: ExploreOptions) -> Exploration:
    """Compute features (cached in the run's folder) and explore them."""
    encoder = load_encoder(run, or_checkpoint=True)
    asked = [_features_of_file(encoder, file) for file in options.queries]
    features, images = features_of(run, data, encoder)
    if len(features.ids) > MOST_IMAGES:
        raise InputError(
            f"{len(features.ids)} images are too many: explore compares at most {MOST_IMAGES} with"
            " each other; set data.num_images."
        )
    return explore_features(run, images, features, options, data.workers, asked, encoder.channels)


def explore_features(
    run: Path,
    images: ImageSet,
    features: Features,
    options: ExploreOptions,
    workers: int | None = 0,
    asked: list[Float32[Tensor, " dim"]] | None = None,
    channels: int = 3,
) -> Exploration:
    """Explore given features; `asked` are those of the queries."""
    ids = features.ids.tolist()
    mean = features.features.double().mean(dim=0).float()
    vectors = normalize(features.features - mean, dim=1)
    pictures = make_pictures(images, ids, workers)
    say(f"Comparing {len(ids)} images with each other ...")
    near = neighbours(vectors, max(NEIGHBOURS, AROUND))
    found = duplicates(
        vectors,
        options.similarity,
        # The most pixels, then the largest file, then the first name: the set is sorted by name.
        preference=list(zip(pictures.pixels.tolist(), pictures.bytes.tolist(), strict=True)),
        confirm=edges_of(pictures),
        confirm_threshold=options.edges,
    )
    grouped = _clusters(vectors, options)
    labels = features.labels.numpy()
    return Exploration(
        run=run,
        images=images,
        ids=ids,
        vectors=vectors,
        labels=labels,
        pictures=pictures,
        neighbours=near,
        duplicates=found,
        clusters=grouped,
        names_of_clusters=_names_of_clusters(grouped, images, ids, labels),
        outliers=outlying(_nearest(near, AROUND)),
        mislabelled=_mislabelled(vectors, labels, near),
        queries=_queries(options.queries, asked or [], vectors, mean, pictures.tile, channels),
    )


@torch.no_grad()
def _features_of_file(encoder: TrainedEncoder, file: Path) -> Float32[Tensor, " dim"]:
    found: Tensor = encoder(encoder.preprocess(file)[None])[0]
    return found.float()


def edges_of(pictures: Pictures) -> Float32[np.ndarray, "n values"]:
    """Return the differences between neighbouring pixels of each picture at 16 x 16.

    Copies keep their edges when compression, size or brightness change; two fields below a sky, or
    two plates, have the same colours in the same places but different edges. The mean colour counts
    a little, since images of a single colour have nothing else.
    """
    made = np.empty((len(pictures.tiles), 2 * 3 * SMALL * (SMALL - 1) + 4), np.float32)
    for row, tile in enumerate(pictures.tiles):
        small = Image.fromarray(tile).resize((SMALL, SMALL), Image.Resampling.BOX)
        pixels = np.asarray(small, np.float32)
        colour = np.append(pixels.mean(axis=(0, 1)) - 128, 32) * 0.05
        across, down = np.diff(pixels, axis=1), np.diff(pixels, axis=0)
        made[row] = np.concatenate([across.ravel(), down.ravel(), colour])
    return made


def _nearest(near: Neighbours, k: int) -> Neighbours:
    return Neighbours(near.indices[:, :k], near.similarities[:, :k])


def _clusters(vectors: Float32[Tensor, "n dim"], options: ExploreOptions) -> Clusters | None:
    if options.num_clusters is not None and options.num_clusters > len(vectors):
        raise InputError(
            f"num_clusters={options.num_clusters} exceeds the {len(vectors)} images: choose fewer"
            " (--clusters)."
        )
    try:
        return clusters(vectors, options.num_clusters, seed=options.seed)
    except InputError as error:
        if options.num_clusters is not None:
            raise
        warn(f"no clusters: {error}")
        return None


def _names_of_clusters(
    found: Clusters | None, images: ImageSet, ids: list[int], labels: Int64[np.ndarray, " n"]
) -> list[str]:
    """Name clusters by words of the files or, if no word fits, by the most common class."""
    if found is None:
        return []
    names = cluster_names(found.labels, [images.name_of(index) for index in ids])
    for cluster, name in enumerate(names):
        here = labels[found.labels == cluster]
        known = np.bincount(here[here != UNKNOWN]) if (here != UNKNOWN).any() else np.zeros(1)
        if not name and images.classes and 2 * known.max() >= len(here):
            names[cluster] = images.classes[int(known.argmax())]
    return names


def _mislabelled(
    vectors: Float32[Tensor, "n dim"], labels: Int64[np.ndarray, " n"], near: Neighbours
) -> Mislabelled | None:
    known = labels != UNKNOWN
    if len(np.unique(labels[known])) < 2:
        return None
    return disagreeing(near, labels) if known.all() else mislabelled(vectors, labels)


def _queries(
    files: tuple[Path, ...],
    asked: list[Float32[Tensor, " dim"]],
    vectors: Float32[Tensor, "n dim"],
    mean: Float32[Tensor, " dim"],
    tile: int,
    channels: int,
) -> list[OutsideImage]:
    if not asked:
        return []
    near = neighbours(vectors, NEIGHBOURS, queries=torch.stack(asked) - mean)
    pairs = zip(files, near.indices, near.similarities, strict=True)
    return [
        OutsideImage(printable(file), picture_of(file, channels, tile), indices, similarities)
        for file, indices, similarities in pairs
    ]
