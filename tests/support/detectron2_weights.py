"""detectron2's own detector by its names, to compare ours with."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hardmix.errors import InputError
from hardmix.evaluation.detection.c4 import C4Detector
from hardmix.weights.detectron2_files import detectron2_name

_HEADS = {
    "rpn.conv": "proposal_generator.rpn_head.conv",
    "rpn.objectness": "proposal_generator.rpn_head.objectness_logits",
    "rpn.deltas": "proposal_generator.rpn_head.anchor_deltas",
    "roi_heads.norm": "roi_heads.res5.norm",
    "roi_heads.classes": "roi_heads.box_predictor.cls_score",
    "roi_heads.boxes": "roi_heads.box_predictor.bbox_pred",
    "roi_heads.mask.deconv": "roi_heads.mask_head.deconv",
    "roi_heads.mask.predictor": "roi_heads.mask_head.predictor",
}


def detectron2_detector_name(name: str) -> str:
    """Return detectron2's name of a tensor of `C4Detector`, in its detector with MoCo's norm."""
    module, _, kind = name.rpartition(".")
    if module in _HEADS:
        return f"{_HEADS[module]}.{kind}"
    if name.startswith("trunk."):
        return "backbone." + detectron2_name(name.removeprefix("trunk."))
    return "roi_heads." + detectron2_name(name.removeprefix("roi_heads."))


def load_detectron2_weights(
    detector: C4Detector, arrays: Mapping[str, np.ndarray | Tensor]
) -> None:
    """Give the detector the weights that detectron2's has, by its names, all of them or none.

    detectron2's batch norms do not count their batches: ours keep the count they have.
    """
    own = detector.state_dict()
    names = {
        detectron2_detector_name(name): name
        for name in own
        if not name.endswith("num_batches_tracked")
    }
    wrong = names.keys() ^ arrays.keys()
    if wrong:
        raise InputError(
            f"the weights do not fit the detector: {len(wrong)} names are on one side alone, as"
            f" {min(wrong)}. Build it with the classes, masks and depth that they were made with."
        )
    loaded = {ours: torch.as_tensor(arrays[theirs]) for theirs, ours in names.items()}
    for name, tensor in loaded.items():
        if tensor.shape != own[name].shape:
            raise InputError(
                f"{name} has shape {tuple(tensor.shape)} in the weights and"
                f" {tuple(own[name].shape)} in the detector: build it with their width."
            )
    detector.load_state_dict(loaded, strict=False)
