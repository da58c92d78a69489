"""The findings as CSV files, in a folder next to the page."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from hardmix.errors import InputError
from hardmix.evaluation.feature_files import csv_bytes
from hardmix.explore.exploring import Exploration
from hardmix.runtime.atomic_files import write_atomically

NEIGHBOURS = 10
"""Neighbours of every image in neighbours.csv."""
Rows = list[list[Any]]

COLUMNS: dict[str, list[str]] = {
    "duplicates.csv": ["group", "keep", "name", "similarity", "pixels", "bytes"],
    "clusters.csv": ["cluster", "cluster_name", "name", "similarity"],
    "outliers.csv": ["name", "score"],
    "neighbours.csv": ["name", "rank", "neighbour", "similarity"],
    "suspect-labels.csv": ["name", "label", "suggested", "own_share", "suggested_share"],
    "queries.csv": ["query", "rank", "neighbour", "similarity"],
}
"""Columns of every file that can be written."""


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


def write_tables(found: Exploration, folder: Path) -> list[Path]:
    """Write the tables that are not empty; earlier ones without a successor are removed."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, columns in COLUMNS.items():
            rows = TABLES[name](found)
            if rows is None:
                (folder / name).unlink(missing_ok=True)
                continue
            write_atomically(folder / name, csv_bytes([columns, *rows]))
            written.append(folder / name)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}.") from error
    return written


def _duplicates(found: Exploration) -> Rows:
    rows = []
    for number, group in enumerate(found.duplicates.groups, start=1):
        members = [(group.keep, 1.0), *_pairs(group.others, group.similarities)]
        for row, similarity in members:
            sizes = int(found.pictures.pixels[row]), int(found.pictures.bytes[row])
            keep = "yes" if row == group.keep else "no"
            rows.append([number, keep, found.name(row), f"{similarity:.4f}", *sizes])
    return rows


def _clusters(found: Exploration) -> Rows | None:
    if found.clusters is None:
        return None
    return [
        [cluster, name, found.name(row), f"{found.clusters.similarities[row]:.4f}"]
        for cluster, name in enumerate(found.names_of_clusters)
        for row in found.clusters.members(cluster).tolist()
    ]


def _outliers(found: Exploration) -> Rows:
    scores = found.outliers.scores
    return [[found.name(row), f"{scores[row]:.4f}"] for row in found.outliers.indices.tolist()]


def _neighbours(found: Exploration) -> Rows:
    near = found.neighbours
    names = [found.name(row) for row in range(len(found))]
    return [
        [names[row], rank, names[other], f"{similarity:.4f}"]
        for row in range(len(found))
        for rank, (other, similarity) in enumerate(
            _pairs(near.indices[row], near.similarities[row])[:NEIGHBOURS], start=1
        )
    ]


def _suspect_labels(found: Exploration) -> Rows | None:
    if found.mislabelled is None:
        return None
    suspects = found.mislabelled
    columns = (
        suspects.indices,
        suspects.labels,
        suspects.suggested,
        suspects.own_share,
        suspects.suggested_share,
    )
    return [
        [found.name(row), *map(found.class_of, (label, other)), f"{own:.2f}", f"{most:.2f}"]
        for row, label, other, own, most in zip(*(each.tolist() for each in columns), strict=True)
    ]


def _queries(found: Exploration) -> Rows | None:
    rows = [
        [query.name, rank, found.name(row), f"{similarity:.4f}"]
        for query in found.queries
        for rank, (row, similarity) in enumerate(
            _pairs(query.indices, query.similarities)[:NEIGHBOURS], start=1
        )
    ]
    return rows or None


def _pairs(
    rows: Int64[np.ndarray, " k"], similarities: Float32[np.ndarray, " k"]
) -> list[tuple[int, float]]:
    return list(zip(rows.tolist(), similarities.tolist(), strict=True))


TABLES: dict[str, Callable[[Exploration], Rows | None]] = {
    "duplicates.csv": _duplicates,
    "clusters.csv": _clusters,
    "outliers.csv": _outliers,
    "neighbours.csv": _neighbours,
    "suspect-labels.csv": _suspect_labels,
    "queries.csv": _queries,
}
