"""`hardmix explore RUN`: all findings about a set of images, as values for a page and as tables.

Thumbnails and sizes of all images are made in one pass over the files. The tables are CSV files in
a folder next to the page.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.data.image_files import UnreadableImage, convert_image, printable, read_image
from hardmix.data.image_set import UNKNOWN, ImageSet
from hardmix.data.workers import WorkerPool
from hardmix.errors import InputError
from hardmix.evaluation.features import Features, csv_bytes, features_of
from hardmix.evaluation.trained_encoder import TrainedEncoder, load_encoder
from hardmix.explore.clustering import Clusters, cluster_names, clusters
from hardmix.explore.near_duplicates import Duplicates, duplicates
from hardmix.explore.neighbour_sheets import sheet_html, tile_of
from hardmix.explore.neighbourhoods import (
    AROUND,
    VOTERS,
    Mislabelled,
    Neighbours,
    Outliers,
    disagreeing,
    mislabelled,
    neighbours,
    outlying,
)
from hardmix.runs.folder import Run
from hardmix.runtime.console import progress, say, warn
from hardmix.runtime.files import write_atomically
from hardmix.settings.config import DataConfig
from hardmix.settings.small_html import facts_html

SMALL = 16
"""Side in pixels of the thumbnails that confirm near-duplicates."""
MOST_IMAGES = 1_000_000
"""Most images, since each is compared with every other."""
TILES = (128, 96, 64, 48, 32)
"""Pixels of a thumbnail's side. Multiples of 16, so that a codec's blocks hold one picture."""
ALL_PIXELS = 52_000_000
"""Most pixels of all thumbnails together: 50,000 of 32 pixels, 3,000 of 128."""
BATCH = 64
SAMPLES, BESIDE = 4, 5
"""Sample images in a notebook, and neighbours next to each."""
LISTED = 10
"""Neighbours of an image in neighbours.csv and queries.csv."""
Rows = list[list[Any]]

COLUMNS: dict[str, list[str]] = {
    "duplicates.csv": ["group", "keep", "name", "similarity", "pixels", "bytes"],
    "clusters.csv": ["cluster", "cluster_name", "name", "similarity"],
    "outliers.csv": ["name", "score"],
    "neighbours.csv": ["name", "rank", "neighbour", "similarity"],
    "suspect-labels.csv": ["name", "label", "suggested", "own_share", "suggested_share"],
    "queries.csv": ["query", "rank", "neighbour", "similarity"],
}
"""Columns of every table."""


# Pictures


@dataclass(frozen=True, eq=False)
class Pictures:
    """Thumbnails and sizes of images, in the order of the features."""

    tiles: UInt8[np.ndarray, "n tile tile 3"]
    """Central square of each image; grey if it can no longer be read."""
    pixels: Int64[np.ndarray, " n"]
    """Width times height of the image itself."""
    bytes: Int64[np.ndarray, " n"]
    """Bytes of its file; 0 if it has none."""

    @property
    def tile(self) -> int:
        """Side of a thumbnail in pixels."""
        return int(self.tiles.shape[1])


def tile_for(number: int) -> int:
    """Return the largest side at which this many pictures stay within ALL_PIXELS."""
    return next((tile for tile in TILES if number * tile * tile <= ALL_PIXELS), TILES[-1])


def make_pictures(
    images: ImageSet, ids: Sequence[int], workers: int | None, tile: int | None = None
) -> Pictures:
    """Make the thumbnails of these images."""
    side = tile or tile_for(len(ids))
    if images.tensor is not None:
        side = min(side, max(TILES[-1], *images.tensor.shape[2:]))
    pool = WorkerPool(
        partial(_read_pictures, images, side),
        0 if images.tensor is not None else workers,
        torch.device("cpu"),
    )
    jobs = [list(ids[start : start + BATCH]) for start in range(0, len(ids), BATCH)]
    tiles = np.empty((len(ids), side, side, 3), np.uint8)
    sizes = np.zeros((len(ids), 2), np.int64)
    done = 0
    try:
        with progress("pictures", len(ids)) as meter:
            for pixels, facts in pool.run(jobs):
                part = slice(done, done + len(pixels))
                tiles[part], sizes[part] = pixels.numpy(), facts.numpy()
                done += len(pixels)
                meter.advance(done)
    finally:
        pool.close()
    return Pictures(tiles, sizes[:, 0].copy(), sizes[:, 1].copy())


def picture_of(file: Path, channels: int, tile: int) -> UInt8[np.ndarray, "tile tile 3"]:
    """Return the thumbnail of a file outside the set."""
    return _square(read_image(file, channels), tile)


def _read_pictures(images: ImageSet, tile: int, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return the thumbnails of a worker's part, and each image's pixels and file size."""
    tiles, sizes = [], []
    for index in ids:
        try:
            pixels, area = _read_image(images, index, tile)
            tiles.append(_square(pixels, tile))
        except UnreadableImage:
            area = 0
            tiles.append(np.full((tile, tile, 3), 128, np.uint8))
        file = images.files[index] if images.files is not None else ""
        sizes.append([area, os.path.getsize(file) if os.path.isfile(file) else 0])
    return torch.from_numpy(np.stack(tiles)), torch.tensor(sizes)


def _read_image(
    images: ImageSet, index: int, tile: int
) -> tuple[UInt8[Tensor, "channels y x"], int]:
    """Return an image and its number of pixels. A JPEG is decoded at a fraction of its size."""
    if images.files is not None and images.read is read_image and images.channels == 3:
        try:
            with Image.open(images.files[index], formats=("JPEG",)) as image:
                area = math.prod(image.size)
                image.draft("RGB", (2 * tile, 2 * tile))
                return convert_image(image), area
        except Exception:  # another format, or damaged: the general reader reports it
            pass
    pixels = images.image(index)
    return pixels, math.prod(pixels.shape[1:])


def _square(image: UInt8[Tensor, "channels y x"], tile: int) -> UInt8[np.ndarray, "tile tile 3"]:
    """Return the central square; in grey unless there are three channels."""
    three = image if len(image) == 3 else image[:1].expand(3, -1, -1)
    side = min(three.shape[1:])
    top, left = (three.shape[1] - side) // 2, (three.shape[2] - side) // 2
    square = three[:, top : top + side, left : left + side].permute(1, 2, 0).contiguous().numpy()
    if side != tile:
        way = Image.Resampling.LANCZOS if side > tile else Image.Resampling.BICUBIC
        square = np.asarray(Image.fromarray(square).resize((tile, tile), way))
    return square


# Findings


@dataclass(frozen=True, kw_only=True)
class ExploreOptions:
    """Options of an exploration."""

    num_clusters: int | None = None
    """Number of clusters. Unset: the square root of half the images, from 2 to 64."""
    similarity: float = 0.8
    """Smallest cosine similarity of near-duplicates' features, after subtracting the mean."""
    edges: float = 0.9
    """Smallest cosine similarity of near-duplicates' edges at 16 x 16 pixels."""
    queries: tuple[Path | str, ...] = ()
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
    """Findings about a set of images; rows are those of `vectors`."""

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

    def __repr__(self) -> str:
        counts = [f"{len(self)} images", f"{self.duplicates.num_others} near-duplicates"]
        counts.append(f"{self.outliers.number} outliers")
        if self.clusters is not None:
            counts.append(f"{len(self.clusters.centres)} clusters")
        if self.mislabelled is not None:
            counts.append(f"{len(self.mislabelled.indices)} suspect labels")
        return f"Exploration({', '.join(counts)})"

    def _repr_html_(self) -> str:
        step = max(1, len(self) // SAMPLES)
        near = [
            self._tile(each, f"{similarity:.2f}" if each != row else Path(self.name(row)).name)
            for row in range(0, len(self), step)[:SAMPLES]
            for each, similarity in [
                (row, 1.0),
                *_pairs(self.neighbours.indices[row], self.neighbours.similarities[row])[:BESIDE],
            ]
        ]
        copies = [
            self._tile(row, "keep" if row == group.keep else "near-duplicate")
            for group in self.duplicates.groups[:SAMPLES]
            for row in (group.keep, int(group.others[0]))
        ]
        pictures = sheet_html("Images, each with its nearest neighbours", near, BESIDE + 1)
        pictures += sheet_html("Near-duplicates, in pairs", copies, BESIDE + 1)
        return facts_html(repr(self), {}, pictures)

    def _tile(self, row: int, label: str) -> Image.Image:
        return tile_of(torch.from_numpy(self.pictures.tiles[row]).permute(2, 0, 1), label)


def explore_run(
    run: Path | str, data: DataConfig | None = None, options: ExploreOptions | None = None
) -> Exploration:
    """Find duplicates, clusters, outliers, neighbours and suspect labels of a set of images.

    Args:
        run: the folder of the run whose encoder is used; features are cached in it.
        data: the images; None means those of the run.
        options: thresholds, the number of clusters, and query images; None means the defaults.

    Returns:
        All findings, with a thumbnail of every image.
    """
    run, options = Path(run), options or ExploreOptions()
    data = data or Run.open(run).config().data
    encoder = load_encoder(run, or_checkpoint=True)
    asked = [_features_of_file(encoder, Path(file)) for file in options.queries]
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
    """Explore features of images; `asked` are the features of the queries."""
    ids = features.ids.tolist()
    mean = features.features.double().mean(dim=0).float()
    vectors = normalize(features.features - mean, dim=1)
    pictures = make_pictures(images, ids, workers)
    say(f"Comparing {len(ids)} images with each other ...")
    near = neighbours(vectors, max(VOTERS, AROUND))
    copies = duplicates(
        vectors,
        options.similarity,
        # Most pixels, then the largest file, then the first name, since the set is sorted by name.
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
        duplicates=copies,
        clusters=grouped,
        names_of_clusters=_names_of_clusters(grouped, images, ids, labels),
        outliers=outlying(near.first(AROUND)),
        mislabelled=_mislabelled(vectors, labels, near),
        queries=_queries(options.queries, asked or [], vectors, mean, pictures.tile, channels),
    )


@torch.no_grad()
def _features_of_file(encoder: TrainedEncoder, file: Path) -> Float32[Tensor, " dim"]:
    features: Tensor = encoder(encoder.preprocess(file)[None])[0]
    return features.float()


def edges_of(pictures: Pictures) -> Float32[np.ndarray, "n values"]:
    """Return the differences between neighbouring pixels of each picture at 16 x 16.

    Copies keep their edges when compression, size or brightness change; two fields below a sky, or
    two plates, have the same colours in the same places but different edges. The mean colour counts
    a little, since images of a single colour have nothing else.
    """
    edges = np.empty((len(pictures.tiles), 2 * 3 * SMALL * (SMALL - 1) + 4), np.float32)
    for row, tile in enumerate(pictures.tiles):
        small = Image.fromarray(tile).resize((SMALL, SMALL), Image.Resampling.BOX)
        pixels = np.asarray(small, np.float32)
        colour = np.append(pixels.mean(axis=(0, 1)) - 128, 32) * 0.05
        across, down = np.diff(pixels, axis=1), np.diff(pixels, axis=0)
        edges[row] = np.concatenate([across.ravel(), down.ravel(), colour])
    return edges


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
    grouped: Clusters | None, images: ImageSet, ids: list[int], labels: Int64[np.ndarray, " n"]
) -> list[str]:
    """Name clusters by words of the files or, if no word fits, by the most common class."""
    if grouped is None:
        return []
    names = cluster_names(grouped.labels, [images.name_of(index) for index in ids])
    for cluster, name in enumerate(names):
        here = labels[grouped.labels == cluster]
        counts = np.bincount(here[here != UNKNOWN]) if (here != UNKNOWN).any() else np.zeros(1)
        if not name and images.classes and 2 * counts.max() >= len(here):
            names[cluster] = images.classes[int(counts.argmax())]
    return names


def _mislabelled(
    vectors: Float32[Tensor, "n dim"], labels: Int64[np.ndarray, " n"], near: Neighbours
) -> Mislabelled | None:
    labelled = labels != UNKNOWN
    if len(np.unique(labels[labelled])) < 2:
        return None
    return disagreeing(near, labels) if labelled.all() else mislabelled(vectors, labels)


def _queries(
    files: tuple[Path | str, ...],
    asked: list[Float32[Tensor, " dim"]],
    vectors: Float32[Tensor, "n dim"],
    mean: Float32[Tensor, " dim"],
    tile: int,
    channels: int,
) -> list[OutsideImage]:
    if not asked:
        return []
    near = neighbours(vectors, VOTERS, queries=torch.stack(asked) - mean)
    pairs = zip(files, near.indices, near.similarities, strict=True)
    return [
        OutsideImage(printable(file), picture_of(Path(file), channels, tile), indices, similarities)
        for file, indices, similarities in pairs
    ]


# Tables


def tables_folder(page: Path) -> Path:
    """Return the folder next to the page with its name: explore/ for explore.html."""
    if page.suffix not in (".html", ".htm"):
        raise InputError(f"out={page} must end in .html.")
    return page.with_suffix("")


def check_tables(folder: Path) -> None:
    """Raise InputError unless existing files are earlier tables of hardmix."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}, the folder for tables, is a file: choose another page name.")
    for name, columns in COLUMNS.items():
        try:
            with (folder / name).open(encoding="utf-8", errors="replace") as old:
                first = old.readline().strip()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InputError(f"{folder / name} cannot be replaced: {error.strerror}.") from error
        if first != ",".join(columns):
            raise InputError(
                f"{folder / name} exists and is not a hardmix table: choose another page name, or"
                " move the file."
            )


def write_tables(exploration: Exploration, folder: Path) -> list[Path]:
    """Write the tables that have content, and remove earlier ones that are not replaced."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, columns in COLUMNS.items():
            rows = TABLES[name](exploration)
            if rows is None:
                (folder / name).unlink(missing_ok=True)
                continue
            write_atomically(folder / name, csv_bytes([columns, *rows]))
            written.append(folder / name)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}.") from error
    return written


def _duplicate_rows(exploration: Exploration) -> Rows:
    rows = []
    for number, group in enumerate(exploration.duplicates.groups, start=1):
        members = [(group.keep, 1.0), *_pairs(group.others, group.similarities)]
        for row, similarity in members:
            sizes = int(exploration.pictures.pixels[row]), int(exploration.pictures.bytes[row])
            keep = "yes" if row == group.keep else "no"
            rows.append([number, keep, exploration.name(row), f"{similarity:.4f}", *sizes])
    return rows


def _cluster_rows(exploration: Exploration) -> Rows | None:
    if exploration.clusters is None:
        return None
    return [
        [cluster, name, exploration.name(row), f"{exploration.clusters.similarities[row]:.4f}"]
        for cluster, name in enumerate(exploration.names_of_clusters)
        for row in exploration.clusters.members(cluster).tolist()
    ]


def _outlier_rows(exploration: Exploration) -> Rows:
    scores = exploration.outliers.scores
    return [
        [exploration.name(row), f"{scores[row]:.4f}"]
        for row in exploration.outliers.indices.tolist()
    ]


def _neighbour_rows(exploration: Exploration) -> Rows:
    near = exploration.neighbours
    names = [exploration.name(row) for row in range(len(exploration))]
    return [
        [names[row], rank, names[other], f"{similarity:.4f}"]
        for row in range(len(exploration))
        for rank, (other, similarity) in enumerate(
            _pairs(near.indices[row], near.similarities[row])[:LISTED], start=1
        )
    ]


def _suspect_label_rows(exploration: Exploration) -> Rows | None:
    if exploration.mislabelled is None:
        return None
    suspects = exploration.mislabelled
    columns = (
        suspects.indices,
        suspects.labels,
        suspects.suggested,
        suspects.own_share,
        suspects.suggested_share,
    )
    return [
        [
            exploration.name(row),
            *map(exploration.class_of, (label, other)),
            f"{own:.2f}",
            f"{most:.2f}",
        ]
        for row, label, other, own, most in zip(*(each.tolist() for each in columns), strict=True)
    ]


def _query_rows(exploration: Exploration) -> Rows | None:
    rows = [
        [query.name, rank, exploration.name(row), f"{similarity:.4f}"]
        for query in exploration.queries
        for rank, (row, similarity) in enumerate(
            _pairs(query.indices, query.similarities)[:LISTED], start=1
        )
    ]
    return rows or None


def _pairs(
    rows: Int64[np.ndarray, " k"], similarities: Float32[np.ndarray, " k"]
) -> list[tuple[int, float]]:
    return list(zip(rows.tolist(), similarities.tolist(), strict=True))


TABLES: dict[str, Callable[[Exploration], Rows | None]] = {
    "duplicates.csv": _duplicate_rows,
    "clusters.csv": _cluster_rows,
    "outliers.csv": _outlier_rows,
    "neighbours.csv": _neighbour_rows,
    "suspect-labels.csv": _suspect_label_rows,
    "queries.csv": _query_rows,
}
