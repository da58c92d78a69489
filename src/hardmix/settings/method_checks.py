"""Shared settings that a method cannot have, refused before any image is read. Imports no torch."""

from typing import TYPE_CHECKING

from hardmix.errors import InputError
from hardmix.settings.method_options import jigsaw_sizes
from hardmix.settings.methods import METHOD_FACTS

if TYPE_CHECKING:
    from hardmix.settings.config import PretrainConfig


def check_method(config: "PretrainConfig") -> None:
    """Raise InputError for shared settings that the method cannot have."""
    facts = METHOD_FACTS[config.method]
    if facts.no_mixing and config.mix.strategy == "own":
        raise InputError(
            f"a strategy was passed to method={config.method}: {facts.no_mixing}; omit it, or"
            " choose another method."
        )
    if facts.whole_batch and config.train.accumulate > 1:
        raise InputError(
            f"train.accumulate={config.train.accumulate} with method={config.method}: its loss"
            " compares all images of a batch with each other, which parts would not; set"
            " train.accumulate to 1 and use more processes, or lower train.batch_size."
        )
    if config.loss.jigsaw and not config.uses("loss.jigsaw"):
        raise InputError(
            f"loss.jigsaw={config.loss.jigsaw} with method={config.method}: only MoCo and MoCHi"
            " have InfoMin's jigsaw; set loss.jigsaw to 0, or method to moco-v2, mochi or pirl."
        )
    jigsaw, tile = jigsaw_sizes(config.data.image_size)
    if config.loss.jigsaw and jigsaw // 3 < tile:
        raise InputError(
            f"loss.jigsaw={config.loss.jigsaw} with data.image_size={config.data.image_size}: tiles"
            " have at least 8 pixels, which takes images of 20 pixels or more; raise"
            " data.image_size or set loss.jigsaw to 0."
        )
    queued = config.uses("train.exclude_same_image")
    if config.loss.filter == "same-cluster" and config.uses("loss.filter") and not queued:
        raise InputError(
            f"loss.filter=same-cluster with method={config.method}: it looks up the images of a"
            " queue's keys, and this method has no such queue; choose loss.filter"
            " share-of-positive or above-positive, or a method with a queue, such as mochi."
        )
    crossed = config.mix.num_with_query > 0 and config.mix.strategy != "mixed-with-key"
    if config.method == "cmc" and config.mixes and crossed:
        raise InputError(
            f"mix.num_with_query={config.mix.num_with_query} with method=cmc would mix a query"
            " with negatives of the other modality: set mix.num_with_query to 0, or"
            " mix.strategy to mixed-with-key."
        )
