"""`hardmix explore RUN --out explore.html`: findings about images, on one page.

Thumbnails are stored in sprites (WebP, about a million pixels each), in the order of the clusters,
so that what is shown together is decoded together. Vectors are reduced to their first principal
components at 8 bits; the similarities and neighbours that the page shows first are exact.
"""

import base64
import io
import os
import shlex
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int8, Int64, Shaped
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from hardmix.data.image_files import printable
from hardmix.errors import InputError
from hardmix.explore.exploring import (
    Exploration,
    check_tables,
    tables_folder,
    write_tables,
)
from hardmix.report import sentences
from hardmix.report.page import check_out, content_policy, environment, part, visible
from hardmix.report.sentences import counted
from hardmix.runs.folder import versions
from hardmix.runs.summary import folder_name
from hardmix.runtime.console import say
from hardmix.runtime.files import write_atomically

MARK = "<!-- Made by hardmix explore. -->"
"""The page's second line; only a file that has it is overwritten."""
SPRITE = 1024
"""Pixels of a sprite's side."""
QUALITY = 70
NEAR = 20
"""Neighbours per image stored in the page."""
WIDTH = 64
"""Components per vector stored in the page."""
LEAST_UNUSUAL = 24
"""Unusual images shown, even if fewer stand out."""
MOST_UNUSUAL = 500
MOST_LEAKS = 2000
"""Leaks shown."""
LAYOUT, LOOKED_AT, MOST_ASKED = 8, 10, 300
"""Fields along a side by which the page compares a dropped picture; of how many of its first
results it says how good they are; and images for which that is measured."""
FLAWS = {
    "blurred": "Blurred",
    "dark": "Dark",
    "bright": "Bright",
    "empty": "Empty",
    "tiny": "Tiny",
    "long": "Very long or very tall",
}
"""Titles of the sections of the view of quality."""
MOVER = '''"""Move the files below to another folder; nothing is deleted. Made by hardmix explore.

    python move-duplicates.py [FOLDER]

FOLDER is where they go, with their paths: by default next to ROOT, with -duplicates in its name.
"""

import os
import shutil
import sys

ROOT = __ROOT__
FILES = __FILES__

target = sys.argv[1] if len(sys.argv) > 1 else ROOT + "-duplicates"
moved = 0
for name in FILES:
    old, new = os.path.join(ROOT, name), os.path.join(target, name)
    if not os.path.isfile(old):
        print("missing:", old)
    elif os.path.lexists(new):
        print("already there:", new)
    else:
        os.makedirs(os.path.dirname(new), exist_ok=True)
        shutil.move(old, new)
        moved += 1
print(moved, "of", len(FILES), "files moved to", target)
'''
"""The script that the page saves, with the names of the files that are ticked."""
DOUBTFUL = 0.5
"""Below this fraction of labels that agree with their neighbours, the encoder is to blame."""
MANY = 0.3
"""Above this fraction of near-duplicates, the encoder is to blame rather than the images."""


def write_explore_page(explore: Callable[[], Exploration], out: Path) -> Path:
    """Explore images and write the page and its tables."""
    check_out(out, MARK)
    check_tables(tables_folder(out))  # fail before the work, not after
    return draw_page(explore(), out)


def draw_page(found: Exploration, out: Path) -> Path:
    """Write the page of an exploration, and its tables in a folder of the same name."""
    tables = write_tables(found, tables_folder(out))
    page = render(found, out, [f"{file.parent.name}/{file.name}" for file in tables])
    try:
        write_atomically(out, page.encode("utf-8"))
    except OSError as error:
        raise InputError(f"out={out} cannot be written: {error.strerror}.") from error
    say(paragraph_of(found))
    for sentence in cautions_of(found):
        say(sentence)
    say(f"Wrote {out} ({len(page) / 1e6:.1f} MB) and {len(tables)} tables in {tables[0].parent}")
    return out


def render(found: Exploration, out: Path, tables: list[str]) -> str:
    """Return the page's HTML."""
    order = page_order(found)
    script = part("explore.js")
    return (
        environment()
        .get_template("explore.html")
        .render(
            mark=Markup(MARK),
            policy=content_policy(script, images="data: blob:"),
            script=Markup(script),
            style=Markup(part("page.css") + part("explore.css")),
            title=title_of(found),
            paragraph=paragraph_of(found),
            cautions=cautions_of(found),
            tables=tables,
            origin=found.about,
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            page_versions=versions(),
            facts=_facts(found, order, out),
            arrays=[*_arrays(found, order), *_sprites(found, order)],
        )
    )


def title_of(found: Exploration) -> str:
    """Return the number of images and the data set's name."""
    files, name = found.images.files, found.images.name
    if files is not None:
        folder = Path(os.path.commonpath([os.path.dirname(file) for file in files])).absolute()
        name = printable(folder_name(str(folder)))
    return sentences.IMAGES_OF.format(images=counted(len(found), "image"), name=name)


def paragraph_of(found: Exploration) -> str:
    """Return the findings in one paragraph."""
    copies, outliers, labels = found.duplicates, found.outliers.number, found.mislabelled
    paragraph = [sentences.NO_DUPLICATES]
    if copies.groups:
        groups, images = counted(len(copies.groups), "group"), counted(copies.num_others, "image")
        paragraph = [sentences.DUPLICATES.format(groups=groups, images=images)]
    if found.clusters is not None:
        paragraph.append(f"{counted(len(found.clusters.centres), 'cluster')}.")
    flawed = sum(len(flaw.rows) for flaw in found.flaws)
    if flawed:
        paragraph.append(sentences.FLAWED.format(flaws=counted(flawed, "flaw")))
    if found.leaks is not None:
        paragraph.append(sentences.LEAKS.format(leaks=counted(len(found.leaks), "leak")))
    template = sentences.OUTLIERS if outliers else sentences.NO_OUTLIERS
    paragraph.append(template.format(images=counted(outliers, "image")))
    if labels is not None:
        paragraph.append(sentences.CONFLICTS.format(labels=counted(len(labels.indices), "label")))
    return " ".join(paragraph)


def cautions_of(found: Exploration) -> list[str]:
    """Return warnings about findings that may be due to the encoder, not the images."""
    labels = found.mislabelled
    cautions = []
    if found.duplicates.num_others > MANY * len(found):
        cautions.append(sentences.MANY_DUPLICATES)
    if labels is not None and labels.agreement < DOUBTFUL:
        cautions.append(sentences.DOUBTFUL_LABELS.format(agreement=labels.agreement))
    if found.unreadable:
        files = counted(len(found.unreadable), "file")
        cautions.append(sentences.UNREADABLE.format(files=files))
    if found.clusters is None:
        cautions.append(sentences.NO_CLUSTERS)
    return cautions


def notes_of(found: Exploration, folder: str) -> dict[str, str]:
    """Return an explanation of each view; `folder` is that of the tables."""
    labels, unusual = found.mislabelled, found.outliers.number
    farthest = sentences.FARTHEST if unusual else sentences.NONE_FARTHEST
    agreement = 0.0 if labels is None else labels.agreement
    return {
        "duplicates": sentences.ABOUT_DUPLICATES.format(folder=folder),
        "clusters": sentences.ABOUT_CLUSTERS.format(folder=folder),
        "unusual": f"{farthest} {sentences.ABOUT_SCORES}".format(
            images=counted(unusual, "image"), folder=folder
        ),
        "leaks": sentences.ABOUT_LEAKS.format(folder=folder),
        "quality": sentences.ABOUT_QUALITY.format(folder=folder),
        "labels": sentences.ABOUT_LABELS.format(agreement=agreement, folder=folder),
    }


def page_order(found: Exploration) -> Int64[np.ndarray, " n"]:
    """Return rows by cluster, the most typical of each first."""
    if found.clusters is None:
        return np.arange(len(found))
    return np.lexsort((np.arange(len(found)), -found.clusters.similarities, found.clusters.labels))


def _facts(found: Exploration, order: Int64[np.ndarray, " n"], out: Path) -> dict[str, Any]:
    """Return the data for explore.js; images are numbered by their place on the page."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    names, link = _names(found)
    unusual = found.outliers.order[: min(MOST_UNUSUAL, max(LEAST_UNUSUAL, found.outliers.number))]
    facts: dict[str, Any] = {
        "command": f"hardmix explore {shlex.quote(str(found.source))} --query",
        "names": [names[row] for row in order],
        "link": link,
        "unlinked": [int(place[row]) for row in range(len(order)) if not _linked(found, row)],
        "classes": list(found.images.classes or ()),
        "tile": found.pictures.tile,
        "across": SPRITE // found.pictures.tile,
        "near": min(NEAR, found.neighbours.indices.shape[1]),
        "clusters": _cluster_facts(found),
        "duplicates": [
            {
                "keep": int(place[group.keep]),
                "others": place[group.others].tolist(),
                "similar": _rounded(group.similarities),
            }
            for group in found.duplicates.groups
        ],
        "least": found.duplicates.threshold,
        "root": os.path.abspath(found.shared_folder) if link else "",
        "mover": MOVER if link else "",
        "leaks": [
            [int(place[leak.row]), leak.group, int(place[leak.other]), leak.other_group, value]
            for leak in (found.leaks or [])[:MOST_LEAKS]
            for value in _rounded(np.array([leak.agreement]))
        ],
        "flaws": _flaw_facts(found, place),
        "exactness": exactness_of(found),
        "unusual": {
            "rows": place[unusual].tolist(),
            "scores": _rounded(found.outliers.scores[unusual]),
        },
        "suspects": _suspect_facts(found, place),
        "queries": [
            {
                "name": query.name,
                "near": place[query.indices].tolist(),
                "similar": _rounded(query.similarities),
            }
            for query in found.queries
        ],
        "notes": notes_of(found, tables_folder(out).name),
    }
    _, scale = shortened(found.vectors)
    facts |= {"width": min(WIDTH, found.vectors.shape[1]), "scale": scale * scale}
    facts["tabs"] = _tabs(found, facts)
    return facts


def _tabs(found: Exploration, facts: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Return the views in order with their counts, without empty ones."""
    tabs = [
        ("queries", "Your pictures", len(found.queries)),
        ("clusters", "Clusters", len(facts["clusters"])),
        ("images", "All", len(found)),
        ("duplicates", "Duplicates", len(facts["duplicates"])),
        ("leaks", "Leaks", len(found.leaks or [])),
        ("quality", "Quality", sum(len(flaw["rows"]) for flaw in facts["flaws"])),
        ("unusual", "Unusual", found.outliers.number),
        ("labels", "Labels", len(facts["suspects"])),
    ]
    return [tab for tab in tabs if tab[2] or tab[0] == "unusual"]


def _cluster_facts(found: Exploration) -> list[dict[str, Any]]:
    if found.clusters is None:
        return []
    sizes = np.bincount(found.clusters.labels, minlength=len(found.names_of_clusters))
    firsts = np.cumsum(sizes) - sizes
    return [
        {"name": name, "size": int(size), "first": int(first)}
        for name, size, first in zip(found.names_of_clusters, sizes, firsts, strict=True)
    ]


def _flaw_facts(found: Exploration, place: Int64[np.ndarray, " n"]) -> list[dict[str, Any]]:
    """Return the sections of the view of quality."""
    sections = [
        {
            "title": FLAWS[flaw.name],
            "note": flaw.measure,
            "rows": place[flaw.rows].tolist(),
            "values": [f"{value:,.4g}" for value in flaw.values.tolist()],
        }
        for flaw in found.flaws
    ]
    if found.exact:
        rows = np.concatenate(found.exact)
        numbers = [f"file {n}" for n, group in enumerate(found.exact, 1) for _ in group]
        note = "files with the same bytes"
        sections.append(
            {"title": "Exact copies", "note": note, "rows": place[rows].tolist(), "values": numbers}
        )
    return sections


def exactness_of(found: Exploration) -> str:
    """Say how well colours and layout, by which the page looks for a picture, find neighbours."""
    number, side = len(found), found.pictures.tile // LAYOUT
    fields = found.pictures.tiles.reshape(number, LAYOUT, side, LAYOUT, side, 3)
    rows = fields.mean(axis=(2, 4), dtype=np.float32).reshape(number, -1)
    near = found.neighbours.first(NEAR).indices
    asked = np.linspace(0, number - 1, min(number, MOST_ASKED)).astype(np.int64)
    hits = []
    for row in asked:
        far = np.abs(rows - rows[row]).sum(axis=1)
        far[row] = np.inf
        hits.append(np.isin(far.argsort()[:LOOKED_AT], near[row]).sum())
    return sentences.EXACTNESS.format(
        first=min(LOOKED_AT, number - 1), hits=float(np.mean(hits)), near=near.shape[1]
    )


def _suspect_facts(found: Exploration, place: Int64[np.ndarray, " n"]) -> list[list[Any]]:
    if found.mislabelled is None:
        return []
    suspects = found.mislabelled
    columns = (
        place[suspects.indices].tolist(),
        suspects.labels.tolist(),
        suspects.suggested.tolist(),
        _rounded(suspects.suggested_share),
    )
    return [list(row) for row in zip(*columns, strict=True)]


def _names(found: Exploration) -> tuple[list[str], str]:
    """Return paths below the common folder, and its URL; names if there are no files."""
    if found.images.files is None:
        return found.short_names, ""
    return found.short_names, Path(os.path.abspath(found.shared_folder)).as_uri() + "/"


def _linked(found: Exploration, row: int) -> bool:
    """Return whether a file's name appears unescaped on the page."""
    name = found.name(row)
    return found.images.files is None or visible(name) == name == found.images.files[found.ids[row]]


def _arrays(found: Exploration, order: Int64[np.ndarray, " n"]) -> Iterator[tuple[str, Markup]]:
    """Yield large arrays as base64 of little-endian numbers."""
    place = np.empty(len(order), np.uint32)
    place[order] = np.arange(len(order), dtype=np.uint32)
    near = found.neighbours
    shown = slice(None, NEAR)
    yield "neighbours", _base64(place[near.indices[order, shown]])
    values = np.rint(127 * near.similarities[order, shown].clip(-1, 1))
    yield "similarities", _base64(values.astype(np.int8))
    yield "vectors", _base64(shortened(found.vectors)[0][order])
    pictures = found.pictures
    sizes = np.stack([pictures.width, pictures.height, pictures.bytes], axis=1)[order]
    yield "sizes", _base64(sizes.clip(0, 2**32 - 1).astype("<u4"))
    yield "labels", _base64(found.labels[order].astype("<i2"))
    grouped = np.zeros(len(order)) if found.clusters is None else found.clusters.labels[order]
    yield "clusters", _base64(grouped.astype("<i2"))


def shortened(vectors: Float32[Tensor, "n dim"]) -> tuple[Int8[np.ndarray, "n width"], float]:
    """Return the first principal components as int8, and the size of one unit."""
    width = min(WIDTH, vectors.shape[1])
    products = (vectors.double().T @ vectors.double()).numpy()
    _, directions = np.linalg.eigh(products)
    basis = torch.from_numpy(directions[:, ::-1][:, :width].copy()).float()
    components = vectors @ basis
    scale = max(float(components.abs().max()), 1e-12) / 127
    return torch.round(components / scale).to(torch.int8).numpy(), scale


def _sprites(found: Exploration, order: Int64[np.ndarray, " n"]) -> Iterator[tuple[str, Markup]]:
    """Yield all thumbnails, then those of the queries."""
    tile, across = found.pictures.tile, SPRITE // found.pictures.tile
    tiles = found.pictures.tiles
    extra = [query.picture for query in found.queries]
    for number, first in enumerate(range(0, len(order) + len(extra), across * across)):
        rows = order[first : first + across * across]
        images = list(tiles[rows])
        if len(images) < across * across:
            begin = max(0, first - len(order))
            images += extra[begin : begin + across * across - len(images)]
        sheet = np.zeros((across * across, tile, tile, 3), np.uint8)
        sheet[: len(images)] = images
        high = -(-len(images) // across) * tile
        grid = sheet.reshape(across, across, tile, tile, 3).swapaxes(1, 2)
        pixels = grid.reshape(across * tile, across * tile, 3)[:high]
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "WEBP", quality=QUALITY, method=3)
        yield f"sprite-{number}", Markup(base64.b64encode(buffer.getvalue()).decode())


def _base64(values: Shaped[np.ndarray, "..."]) -> Markup:
    return Markup(base64.b64encode(np.ascontiguousarray(values).tobytes()).decode())


def _rounded(values: Shaped[np.ndarray, "..."]) -> list[float]:
    return [round(float(value), 3) for value in values]
