"""`hardmix explore`: all findings about a set of images, as values for a page and as tables.

The images are those of a run, or of any folder: no training is needed. The tables are CSV files in
a folder next to the page.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from hardmix.data.folders import open_every
from hardmix.data.image_files import printable, read_image
from hardmix.data.image_set import UNKNOWN, ImageSet
from hardmix.data.sources import data_name, open_images
from hardmix.errors import InputError
from hardmix.evaluation.features import Features, csv_bytes, extract, features_of
from hardmix.evaluation.trained_encoder import TrainedEncoder, load_encoder
from hardmix.explore.clustering import Clusters, clusters, distinct_names
from hardmix.explore.copies import find_copies
from hardmix.explore.near_duplicates import Duplicates
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
    sparse,
)
from hardmix.explore.pictures import Pictures, make_pictures, picture_of
from hardmix.explore.quality import Flaw, Leak, exact_copies, flaws_of, groups_of, leaks_of
from hardmix.explore.weights_at_hand import encoder_of
from hardmix.runs.folder import Run
from hardmix.runtime.console import say, warn
from hardmix.runtime.device import choose_compute
from hardmix.runtime.files import write_atomically
from hardmix.settings.config import DataConfig
from hardmix.settings.small_html import facts_html

MOST_IMAGES = 1_000_000
"""Most images, since each is compared with every other."""
SAMPLES, BESIDE = 4, 5
"""Sample images in a notebook, and neighbours next to each."""
LISTED = 10
"""Neighbours of an image in neighbours.csv and queries.csv."""
Rows = list[list[Any]]

COLUMNS: dict[str, list[str]] = {
    "duplicates.csv": ["group", "keep", "name", "agreement", "width", "height", "bytes"],
    "exact-copies.csv": ["group", "name", "bytes"],
    "leaks.csv": ["name", "group", "copy", "copy_group", "agreement"],
    "quality.csv": ["flaw", "name", "value", "measure", "width", "height", "bytes"],
    "clusters.csv": ["cluster", "cluster_name", "name", "similarity"],
    "outliers.csv": ["rank", "name", "score", "stands_out"],
    "neighbours.csv": ["name", "rank", "neighbour", "similarity"],
    "suspect-labels.csv": ["name", "label", "suggested", "own_share", "suggested_share"],
    "queries.csv": ["query", "rank", "neighbour", "similarity"],
}
"""Columns of every table."""


# Findings


@dataclass(frozen=True, kw_only=True)
class ExploreOptions:
    """Options of an exploration."""

    num_clusters: int | None = None
    """Number of clusters. Unset: the square root of half the images, from 2 to 64."""
    agreement: float = 0.85
    """Smallest agreement of near-duplicates' edges where one lies over the other."""
    groups: str | None = None
    """Groups of images between which copies are leaks: a level of folders, or a regular expression.
    """
    queries: tuple[Path | str, ...] = ()
    """Other images to find neighbours of."""
    seed: int = 0
    """Seed of the clustering."""

    def __post_init__(self) -> None:
        if self.num_clusters is not None and self.num_clusters < 1:
            raise InputError(f"num_clusters={self.num_clusters} must be at least 1 (--clusters).")
        if not 0 < self.agreement <= 1:
            raise InputError(f"agreement={self.agreement} must be above 0 and at most 1.")


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

    source: Path
    """The run or the folder that was explored."""
    about: str
    """A sentence that says by what the images are compared."""
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
    """Names of the clusters, all different."""
    outliers: Outliers
    mislabelled: Mislabelled | None
    """None without labels."""
    queries: list[OutsideImage]
    flaws: list[Flaw]
    """Blurred, dark, bright, empty, tiny and long images, by kind."""
    exact: list[Int64[np.ndarray, " m"]]
    """Groups of files with the same bytes."""
    leaks: list[Leak] | None
    """Copies in different groups; None if there are no groups."""
    unreadable: list[str]
    """Names of the files that could not be read."""

    def __len__(self) -> int:
        return len(self.ids)

    def name(self, row: int) -> str:
        """Return the file's name, or "cifar10[123]"."""
        return self.images.name_of(self.ids[row])

    @cached_property
    def shared_folder(self) -> str:
        """The folder that contains all images; empty if they are not in files."""
        files = self.images.files
        if files is None:
            return ""
        return os.path.commonpath([os.path.dirname(files[index]) for index in self.ids])

    @cached_property
    def short_names(self) -> list[str]:
        """The path of each image below the shared folder, or its name."""
        start = len(os.path.join(self.shared_folder, "")) if self.images.files is not None else 0
        return [self.name(row)[start:] for row in range(len(self))]

    def table(self, name: str) -> list[dict[str, Any]]:
        """Return a table, such as "duplicates", as rows with names; empty if there is none."""
        if f"{name}.csv" not in TABLES:
            known = ", ".join(file.removesuffix(".csv") for file in TABLES)
            raise InputError(f"there is no table {name!r}: choose one of {known}.")
        columns = COLUMNS[f"{name}.csv"]
        rows = TABLES[f"{name}.csv"](self) or []
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def class_of(self, label: int) -> str:
        """Return a class's name; empty if it is unknown."""
        classes = self.images.classes or ()
        return classes[label] if 0 <= label < len(classes) else ""

    def __repr__(self) -> str:
        counts = [f"{len(self)} images", f"{self.duplicates.num_others} near-duplicates"]
        counts.append(f"{self.outliers.number} outliers")
        counts.append(f"{sum(len(flaw.rows) for flaw in self.flaws)} flaws")
        if self.leaks is not None:
            counts.append(f"{len(self.leaks)} leaks")
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
    asked = [_features_of_file(encoder, Path(file), data) for file in options.queries]
    features, images = features_of(run, data, encoder)
    about = f"Images are compared by the encoder of {printable(run)}."
    return explore_features(run, images, features, options, data, asked, about)


def folder(
    path: Path | str,
    weights: Path | str | None = None,
    options: ExploreOptions | None = None,
    *,
    data: DataConfig | None = None,
) -> Exploration:
    """Explore the images of a folder, without training; nothing is written.

    Args:
        path: the folder, with all images below it, or a list of images.
        weights: a run, a file of weights, "hf:owner/name", "timm", "timm:NAME" or "torchvision".
            None means `PlainFeatures`: colours, their layout and directions of edges.
        options: thresholds, the number of clusters, groups and queries; None means the defaults.
        data: how images are read; its root and size are replaced.

    Returns:
        All findings, with a thumbnail of every image.
    """
    options, data = options or ExploreOptions(), data or DataConfig()
    data = replace(data, root=str(path), name=None, test=None, cache="off", max_unreadable=1.0)
    data = replace(data, name=data_name(data), reduce=True)
    encoder, about = encoder_of(weights, data.channels)
    if encoder.channels != data.channels:
        data = replace(data, channels=encoder.channels)
    data = replace(data, image_size=encoder.image_size)
    say(about)
    asked = [_features_of_file(encoder, Path(file), data) for file in options.queries]
    if data.name in ("folder", "imagenet", "imagenet100"):
        images = open_every(data)
    else:
        images = open_images(replace(data, reduce=False))
    compute = choose_compute(precision="fp32")
    features = extract(encoder.to(compute.device), images, data, compute=compute)
    return explore_features(Path(path), images, features, options, data, asked, about)


def explore_features(
    source: Path,
    images: ImageSet,
    features: Features,
    options: ExploreOptions,
    data: DataConfig,
    asked: list[Float32[Tensor, " dim"]],
    about: str = "",
) -> Exploration:
    """Explore features of images; `asked` are the features of the queries."""
    ids = features.ids.tolist()
    if not 2 <= len(ids) <= MOST_IMAGES:
        raise InputError(
            f"{printable(source)} has {len(ids)} readable images: explore compares 2 to"
            f" {MOST_IMAGES:,} with each other."
        )
    mean = features.features.double().mean(dim=0).float()
    vectors = normalize(features.features - mean, dim=1)
    pictures = make_pictures(images, ids, data.workers)
    say(f"Comparing {len(ids)} images with each other ...")
    near = neighbours(vectors, max(VOTERS, AROUND))
    exact = exact_copies(images, ids, pictures)
    copies, pairs, agreement = find_copies(pictures, near, options.agreement, exact)
    grouped = _clusters(vectors, options)
    labels = features.labels.numpy()
    readable = set(ids)
    exploration = Exploration(
        source=source,
        about=about,
        images=images,
        ids=ids,
        vectors=vectors,
        labels=labels,
        pictures=pictures,
        neighbours=near,
        duplicates=copies,
        clusters=grouped,
        names_of_clusters=distinct_names(
            grouped, [images.name_of(n) for n in ids], labels, images.classes or ()
        ),
        outliers=sparse(features.features),
        mislabelled=_mislabelled(vectors, labels, near),
        queries=_queries(options.queries, asked, vectors, mean, pictures.tile, data.channels),
        flaws=flaws_of(pictures),
        exact=exact,
        leaks=None,
        unreadable=[images.name_of(n) for n in range(len(images)) if n not in readable],
    )
    groups = groups_of(exploration.short_names, options.groups)
    leaks = None if groups is None else leaks_of(pairs, agreement, groups)
    return _with_names(replace(exploration, leaks=leaks))


def _with_names(exploration: Exploration) -> Exploration:
    """Give the findings the names of their rows."""
    names = exploration.short_names
    fields = ("neighbours", "duplicates", "clusters", "outliers", "mislabelled")
    findings = {field: getattr(exploration, field) for field in fields}
    return replace(
        exploration,
        **{
            field: replace(finding, names=names)
            for field, finding in findings.items()
            if finding is not None
        },
    )


@torch.no_grad()
def _features_of_file(
    encoder: TrainedEncoder, file: Path, data: DataConfig
) -> Float32[Tensor, " dim"]:
    """Return the features of another image, read as those of the set are."""
    reduce = 2 * data.image_size if data.reduce else None
    image = read_image(file, encoder.channels, reduce=reduce)
    features: Tensor = encoder(encoder.preprocess(image)[None])[0]
    return features.float()


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
            keep = "yes" if row == group.keep else "no"
            sizes = _sizes(exploration, row)
            rows.append([number, keep, exploration.name(row), f"{similarity:.4f}", *sizes])
    return rows


def _sizes(exploration: Exploration, row: int) -> tuple[int, int, int]:
    """Return width, height and bytes of an image."""
    pictures = exploration.pictures
    return int(pictures.width[row]), int(pictures.height[row]), int(pictures.bytes[row])


def _exact_copy_rows(exploration: Exploration) -> Rows | None:
    rows = [
        [number, exploration.name(row), int(exploration.pictures.bytes[row])]
        for number, group in enumerate(exploration.exact, start=1)
        for row in group.tolist()
    ]
    return rows or None


def _leak_rows(exploration: Exploration) -> Rows | None:
    if exploration.leaks is None:
        return None
    name = exploration.name
    return [
        [name(leak.row), leak.group, name(leak.other), leak.other_group, f"{leak.agreement:.4f}"]
        for leak in exploration.leaks
    ]


def _quality_rows(exploration: Exploration) -> Rows:
    flawed = [
        [flaw.name, exploration.name(row), f"{value:.4g}", flaw.measure, *_sizes(exploration, row)]
        for flaw in exploration.flaws
        for row, value in zip(flaw.rows.tolist(), flaw.values.tolist(), strict=True)
    ]
    broken = [["unreadable", name, "", "", "", "", ""] for name in exploration.unreadable]
    return flawed + broken


def _cluster_rows(exploration: Exploration) -> Rows | None:
    if exploration.clusters is None:
        return None
    return [
        [cluster, name, exploration.name(row), f"{exploration.clusters.similarities[row]:.4f}"]
        for cluster, name in enumerate(exploration.names_of_clusters)
        for row in exploration.clusters.members(cluster).tolist()
    ]


def _outlier_rows(exploration: Exploration) -> Rows:
    scores, number = exploration.outliers.scores, exploration.outliers.number
    return [
        [rank, exploration.name(row), f"{scores[row]:.4f}", "yes" if rank <= number else "no"]
        for rank, row in enumerate(exploration.outliers.order.tolist(), start=1)
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
    "exact-copies.csv": _exact_copy_rows,
    "leaks.csv": _leak_rows,
    "quality.csv": _quality_rows,
    "clusters.csv": _cluster_rows,
    "outliers.csv": _outlier_rows,
    "neighbours.csv": _neighbour_rows,
    "suspect-labels.csv": _suspect_label_rows,
    "queries.csv": _query_rows,
}
