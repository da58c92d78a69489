"""The gallery: sample images, their hardest negatives in a run's queue, their synthetic points.

Encoders and queue are those of the newest intact checkpoint; the queue's ids identify the images.
Pictures are data URIs: the drawing, its JSON and a page show the same bytes.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from hardmix.analysis.picture import INK, Drawing, Found, Picture, canvas, load, shown
from hardmix.data.changed_data import fingerprint
from hardmix.data.colours import channel_statistics, normalise
from hardmix.data.crops import evaluation_crop
from hardmix.data.image_set import ImageSet
from hardmix.data.sources import open_images
from hardmix.data.thumbnails import class_of, sample_ids, thumbnail_of
from hardmix.errors import InputError
from hardmix.methods.base import Materials, Method, build_method
from hardmix.mixing.plans import KEY, NO_POINT, MixPlan
from hardmix.mixing.queue import MemoryQueue
from hardmix.runs.checkpoints import load_newest
from hardmix.runs.folder import Run, versions
from hardmix.runtime.device import choose_compute
from hardmix.runtime.random_numbers import seed_of
from hardmix.settings.config import PretrainConfig

HARDEST = 8
POINTS = 4
QUERY_PIXELS, THUMBNAIL = 192, 128
"""Sides of the thumbnails: twice the pixels of a page, for sharp screens."""
TILE = 0.8
"""Inches of a picture in the sheet, with the gap to the next."""
TEXT = 0.42
"""Height of the two lines of text under a picture, in tiles."""
SPACE = 0.35
"""Gap between query, negatives and points, in tiles."""
FRAME = "#777777"
"""Frame of an image of the query's class: grey, because this is no fault."""
SHOWN = 12
"""Most characters of a class name."""
EMBEDDED = " Images are embedded by the query encoder from their evaluation crop."
OWN_KEYS = " Keys of a query's own image are omitted ({own} in total)."


class Neighbour(NamedTuple):
    """An image whose key is in the queue."""

    id: int
    """Its number in the data set."""
    image: str
    """A data URI; empty if it can no longer be read."""
    label: str | None
    """Its class, if that is known."""
    similarity: float
    """Similarity of its key to the query."""
    false: bool | None
    """Whether it has the query's class; None if either is unknown."""


class Parents(NamedTuple):
    """A synthetic point and its parents."""

    kind: Literal["pair", "query", "key"]
    """Two negatives (Eq. 3), or one and the query (Sec. 4.2) or its key (App. B.2)."""
    similarity: float
    """Similarity of the point to the query."""
    share: float
    """Share of the second parent."""
    parents: list[Neighbour]
    """Two negatives for a pair, otherwise one."""


class Query(NamedTuple):
    """A sample image with its hardest negatives and synthetic points."""

    id: int
    """Its number in the data set."""
    name: str
    """Its file, or the data set and its number."""
    image: str
    """A data URI."""
    label: str | None
    """Its class, if that is known."""
    hardest: list[Neighbour]
    """Its hardest negatives, the most similar first."""
    synthetic: list[Parents]
    """Its hardest points, the most similar first."""


class Scene(NamedTuple):
    """Sample queries compared with the queue."""

    images: ImageSet
    ids: list[int]
    """Ids of the queries."""
    memory: MemoryQueue
    similarity: Float[Tensor, "batch K"]
    own: Bool[Tensor, "batch K"]
    """Keys of the query's own image, which are not shown as negatives."""
    plan: MixPlan | None
    synthetic: Float[Tensor, "batch S"]
    """Similarities of the plan's points."""


def look_at_queue(run: Run) -> Found:
    """Draw the run's gallery; raise InputError with the reason if that is impossible."""
    config = run.config()
    if not config.uses("train.queue_size"):
        raise InputError(f"a run of the method {config.method} has no queue.")
    checkpoint = load_newest(run.checkpoints, set_aside=False)  # the run may still be training
    if checkpoint is None:
        raise InputError("it has no checkpoint, which contains the queue.")
    tensors, manifest, _ = checkpoint
    mark = f"{manifest['sha256'][:16]} hardmix {versions()['hardmix']}"
    kept = load(run.figures, "gallery", mark)
    if kept is not None:
        return [kept], []
    images = open_images(config.data, "train", config.train.seed)
    if manifest["data"] != fingerprint(images):
        raise InputError("its images have changed since: the queue's ids refer to other images.")
    method = restore(config, tensors, len(images))
    assert method.memory is not None, "the method uses train.queue_size"
    scene = look(method, method.memory, images, sample_ids(images, config.train.seed))
    queries = [_query(scene, row) for row in range(len(scene.ids))]
    own = int(scene.own.sum())
    note = EMBEDDED + OWN_KEYS.format(own=own) if own else EMBEDDED
    return [replace(gallery(queries, note), mark=mark)], []


def restore(
    config: PretrainConfig, tensors: dict[str, Tensor], num_images: int | None = None
) -> Method:
    """Restore encoders and queue from a checkpoint, in evaluation mode."""
    materials = Materials(choose_compute("cpu", "fp32"), num_images=num_images)
    method = build_method(config, materials)
    prefix = "objective."
    state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    try:
        method.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(
            "its checkpoint does not fit its config: it was trained with your own network, or by"
            " another version."
        ) from error
    return method.eval()


@torch.no_grad()
def look(method: Method, memory: MemoryQueue, images: ImageSet, ids: list[int]) -> Scene:
    """Embed the sample images, compare them with the queue, and plan points as in training."""
    config = method.config
    size = config.data.image_size
    crops = torch.stack([evaluation_crop(images.image(index), size) for index in ids])
    pictures = normalise(crops.float().div_(255), *channel_statistics(images.channels))
    own = memory.same_image(torch.tensor(ids))
    exclude = own
    if config.oracle and images.labels is not None:
        exclude = own | memory.same_class(images.labels[ids])
    generator = torch.Generator().manual_seed(seed_of("gallery points", config.train.seed))
    outcome, plan = method.contrast_images(pictures, exclude, generator)
    return Scene(images, ids, memory, outcome.real, own, plan, outcome.synthetic)


def _query(scene: Scene, row: int) -> Query:
    """Return the hardest negatives of one query, and the parents of its hardest points."""
    index = scene.ids[row]
    hidden = scene.own[row] | (scene.memory.ids < 0)
    allowed = scene.similarity[row].masked_fill(hidden, -torch.inf)
    ranked = allowed.topk(min(HARDEST, int((~hidden).sum())))
    points: list[Parents] = []
    if scene.plan is not None:
        similarity = scene.synthetic[row].masked_fill(scene.plan.base[row] == NO_POINT, -torch.inf)
        best = similarity.topk(min(POINTS, int(similarity.isfinite().sum()))).indices
        points = [_parents(scene, row, int(column)) for column in best]
    return Query(
        index,
        scene.images.name_of(index),
        thumbnail_of(scene.images, index, QUERY_PIXELS),
        class_of(scene.images, index),
        [_neighbour_of(scene, row, slot) for slot in ranked.indices.tolist()],
        points,
    )


def _parents(scene: Scene, row: int, column: int) -> Parents:
    assert scene.plan is not None
    base, partner = int(scene.plan.base[row, column]), int(scene.plan.partner[row, column])
    kind: Literal["pair", "query", "key"] = "key" if partner == KEY else "query"
    slots = [base]
    if partner >= 0:
        kind, slots = "pair", [base, partner]
    return Parents(
        kind,
        round(float(scene.synthetic[row, column]), 4),
        round(float(scene.plan.share[row, column]), 4),
        [_neighbour_of(scene, row, slot) for slot in slots],
    )


def _neighbour_of(scene: Scene, row: int, slot: int) -> Neighbour:
    index, label = int(scene.memory.ids[slot]), int(scene.memory.labels[slot])
    labels: Any = scene.images.labels
    asked = -1 if labels is None else int(labels[scene.ids[row]])
    return Neighbour(
        index,
        thumbnail_of(scene.images, index, THUMBNAIL),
        class_of(scene.images, index),
        round(float(scene.similarity[row, slot]), 4),
        None if label < 0 or asked < 0 else label == asked,
    )


def gallery(queries: Sequence[Query], note: str = "") -> Picture:
    """Draw a row for each query: its image, hardest negatives, and parents of its points."""
    title = "Sample images and their hardest negatives"
    negatives = max(len(query.hardest) for query in queries)
    points = max(len(query.synthetic) for query in queries)
    width = 1 + SPACE + negatives + (SPACE + 2.25 * points if points else 0)
    height = len(queries) * (1 + TEXT) + 0.3
    with canvas(title, TILE * height + 0.35, TILE * width + 0.2) as figure:
        axes = figure.subplots()
        axes.set_axis_off()
        axes.text(0, -0.1, "query", size=8, weight="bold")
        axes.text(1 + SPACE, -0.1, "hardest negatives in the queue", size=8, weight="bold")
        if points:
            left = 1 + SPACE + negatives + SPACE
            heading = "parents of its hardest synthetic points, and the point's similarity"
            axes.text(left, -0.1, heading, size=8, weight="bold")
        for row, query in enumerate(queries):
            _draw_row(axes, query, row * (1 + TEXT), negatives)
        axes.set(xlim=(0, width), ylim=(height - 0.3, -0.3), aspect="equal")
    caption = (
        "Each image with its similarity to the query; framed images have the query's own class,"
        " which the method is not told (the paper's false negatives). For a synthetic point, the"
        f" similarity is that of the point, and the share that of its second parent.{note}"
    )
    numbers = {"queries": [_plain(query) for query in queries]}
    return Picture("gallery", title, caption, numbers, figure, formats=("png",))


def _draw_row(axes: Drawing, query: Query, top: float, negatives: int) -> None:
    _tile(axes, query.image, 0, top, f"image {query.id}", query.label)
    for column, neighbour in enumerate(query.hardest):
        _neighbour(axes, neighbour, 1 + SPACE + column, top, f"{neighbour.similarity:.2f}")
    left = 1 + SPACE + negatives + SPACE
    for number, point in enumerate(query.synthetic):
        x = left + 2.25 * number
        _neighbour(axes, point.parents[0], x, top, f"{point.similarity:.2f}")
        axes.text(x + 0.98, top + 0.5, "+", ha="center", va="center", size=8)
        if point.kind == "pair":
            _neighbour(axes, point.parents[1], x + 1.02, top, f"share {point.share:.0%}")
        else:
            name = "query" if point.kind == "query" else "its key"
            _tile(axes, query.image, x + 1.02, top, f"share {point.share:.0%}", name)


def _neighbour(axes: Drawing, neighbour: Neighbour, left: float, top: float, text: str) -> None:
    text = f"{text} same class" if neighbour.false else text
    _tile(axes, neighbour.image, left, top, text, neighbour.label, framed=bool(neighbour.false))


def _tile(
    axes: Drawing,
    image: str,
    left: float,
    top: float,
    text: str,
    label: str | None,
    *,
    framed: bool = False,
) -> None:
    from matplotlib.patches import Rectangle

    extent = (left + 0.02, left + 0.94, top + 0.94, top + 0.02)
    if image:
        axes.imshow(_pixels(image), extent=extent, interpolation="nearest")
    else:
        axes.text(left + 0.48, top + 0.5, "cannot\nbe read", ha="center", va="center", size=6)
    frame = {"edgecolor": FRAME, "linewidth": 2.2} if framed else {"edgecolor": INK}
    if framed or not image:
        axes.add_patch(Rectangle((left + 0.02, top + 0.02), 0.92, 0.92, fill=False, **frame))
    look: dict[str, Any] = {"size": 6, "ha": "left", "va": "top"}
    axes.text(left + 0.02, top + 0.98, text, **look, weight="bold" if framed else "normal")
    name = shown(label or "")
    name = name if len(name) <= SHOWN else name[: SHOWN - 1] + "…"
    axes.text(left + 0.02, top + 1.14, name, **look)


def _pixels(uri: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data = base64.b64decode(uri.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(data), formats=("WEBP",)).convert("RGB"))


def _plain(query: Query) -> dict[str, Any]:
    points = [
        {**point._asdict(), "parents": [each._asdict() for each in point.parents]}
        for point in query.synthetic
    ]
    return {
        **query._asdict(),
        "hardest": [each._asdict() for each in query.hardest],
        "synthetic": points,
    }
