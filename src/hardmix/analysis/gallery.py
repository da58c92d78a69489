"""The gallery: sample images, their hardest negatives in a run's queue, their synthetic points.

Encoders and queue are those of the newest intact checkpoint; the queue's ids identify the images.
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hardmix.analysis.figures.image_sheet import Neighbour, Parents, Query, gallery
from hardmix.analysis.figures.picture import Found, load
from hardmix.data.augment import channel_statistics, evaluation_crop
from hardmix.data.changed_data import fingerprint
from hardmix.data.datasets import open_images
from hardmix.data.image_ops import normalise
from hardmix.data.image_set import ImageSet
from hardmix.data.sample_images import class_of, sample_ids
from hardmix.data.thumbnails import thumbnail_of
from hardmix.errors import InputError
from hardmix.methods.all_methods import build_method
from hardmix.methods.base import Materials, Method
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
"""Sides of the thumbnails: twice as many pixels as on a page, for sharp screens."""


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
    """Draw the run's gallery; raises InputError with the reason if that is impossible."""
    config = run.config()
    if not config.uses("train.queue_size"):
        raise InputError(f"a run of the method {config.method} has no queue.")
    found = load_newest(run.checkpoints, set_aside=False)  # it may still be training
    if found is None:
        raise InputError("it has no checkpoint, which contains the queue.")
    tensors, manifest, _ = found
    mark = f"{manifest['sha256'][:16]} hardmix {versions()['hardmix']}"
    kept = load(run.figures, "gallery", mark)
    if kept is not None:
        return [kept], []
    images = open_images(config.data, "train", config.train.seed)
    if manifest["data"] != fingerprint(images):
        raise InputError("its images have changed since: the queue's ids refer to other images.")
    method = restore(config, tensors, len(images))
    assert method.memory is not None, "it uses train.queue_size"
    scene = look(method, method.memory, images, sample_ids(images, config.train.seed))
    queries = [_query(scene, row) for row in range(len(scene.ids))]
    own = int(scene.own.sum())
    note = " Images are embedded by the query encoder from their evaluation crop."
    note += f" Keys of a query's own image are omitted ({own} in total)." if own else ""
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
        made = scene.synthetic[row].masked_fill(scene.plan.base[row] == NO_POINT, -torch.inf)
        best = made.topk(min(POINTS, int(made.isfinite().sum()))).indices
        points = [_parents(scene, row, int(column)) for column in best]
    return Query(
        index,
        scene.images.name_of(index),
        thumbnail_of(scene.images, index, QUERY_PIXELS),
        class_of(scene.images, index),
        [_neighbour(scene, row, slot) for slot in ranked.indices.tolist()],
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
        [_neighbour(scene, row, slot) for slot in slots],
    )


def _neighbour(scene: Scene, row: int, slot: int) -> Neighbour:
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
