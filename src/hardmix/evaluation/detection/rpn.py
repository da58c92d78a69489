"""The region proposal network on the map of layer3 (Faster R-CNN; detectron2's rules)."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, l1_loss
from torchvision.ops import nms

from hardmix.errors import InputError
from hardmix.evaluation.detection.anchors import PER_CELL
from hardmix.evaluation.detection.boxes import (
    Scale,
    Size,
    clip,
    decode,
    encode,
    not_empty,
    overlaps,
)
from hardmix.evaluation.detection.matching import Sampling, Shuffle, match, sample

SCALE = Scale(1.0, 1.0)


class TopK(NamedTuple):
    """How many proposals per image are kept, by logit."""

    before_nms: int
    after_nms: int


class RpnSettings(NamedTuple):
    """MoCo's R50-C4 configuration; the defaults are the paper's."""

    sampling: Sampling = Sampling(256, 0.5)
    train: TopK = TopK(12000, 2000)
    test: TopK = TopK(6000, 1000)
    nms: float = 0.7
    low: float = 0.3
    high: float = 0.7


class RpnOutput(NamedTuple):
    """The network's output for every anchor, in the order of `anchors_of`."""

    logits: Float[Tensor, "images n"]
    deltas: Float[Tensor, "images n 4"]


class Rpn(nn.Module):
    """A 3x3 convolution with ReLU, then a logit and four deltas per anchor."""

    def __init__(self, channels: int, settings: RpnSettings) -> None:
        super().__init__()
        self.settings = settings
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.objectness = nn.Conv2d(channels, PER_CELL, 1)
        self.deltas = nn.Conv2d(channels, PER_CELL * 4, 1)
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, std=0.0 if name.endswith("bias") else 0.01)

    def forward(self, features: Float[Tensor, "images channels rows columns"]) -> RpnOutput:
        """Logits and deltas of all anchors."""
        hidden = torch.relu(self.conv(features))
        # In float32 even inside autocast: boxes are computed from them.
        logits = self.objectness(hidden).float().permute(0, 2, 3, 1).flatten(1)
        deltas = self.deltas(hidden).float().permute(0, 2, 3, 1)
        return RpnOutput(logits, deltas.reshape(len(features), -1, 4))

    @torch.no_grad()
    def proposals(
        self, output: RpnOutput, anchors: Float[Tensor, "n 4"], sizes: list[Size], top: TopK
    ) -> list[Float[Tensor, "_ 4"]]:
        """Return each image's best boxes, best first, without gradient."""
        boxes = decode(anchors, output.deltas, SCALE)
        best = output.logits.topk(min(top.before_nms, len(anchors)), dim=1)
        return [
            propose(
                boxes[i, best.indices[i]], best.values[i], size, self.settings.nms, self.training
            )[: top.after_nms]
            for i, size in enumerate(sizes)
        ]

    def losses(
        self,
        output: RpnOutput,
        anchors: Float[Tensor, "n 4"],
        targets: list[Float[Tensor, "_ 4"]],
        shuffle: Shuffle,
    ) -> dict[str, Float[Tensor, ""]]:
        """Objectness and L1 box loss of the drawn anchors.

        Both are divided by the requested number of anchors, even if fewer were sampled.
        """
        settings = self.settings
        objectness, box = output.logits.new_zeros(()), output.logits.new_zeros(())
        for logits, deltas, boxes in zip(output.logits, output.deltas, targets, strict=True):
            matches = match(
                overlaps(boxes, anchors), low=settings.low, high=settings.high, best=True
            )
            positive, negative = sample(matches, settings.sampling, shuffle)
            drawn = torch.cat([positive, negative])
            truth = (torch.arange(len(drawn), device=drawn.device) < len(positive)).float()
            objectness = objectness + binary_cross_entropy_with_logits(
                logits[drawn], truth, reduction="sum"
            )
            wanted = encode(anchors[positive], boxes[matches.targets[positive]], SCALE)
            box = box + l1_loss(deltas[positive], wanted, reduction="sum")
        divisor = settings.sampling.boxes * len(targets)
        return {"loss_rpn_cls": objectness / divisor, "loss_rpn_loc": box / divisor}


def propose(
    boxes: Float[Tensor, "n 4"],
    logits: Float[Tensor, " n"],
    size: Size,
    threshold: float,
    training: bool,
) -> Float[Tensor, "kept 4"]:
    """One image's proposals, best first: clipped, those without area dropped, then NMS.

    Ranked by logits: sigmoids of large logits are all 1 and would tie.
    """
    finite = boxes.isfinite().all(dim=1) & logits.isfinite()
    if training and not bool(finite.all()):
        raise InputError(
            "the RPN predicts NaN or infinite boxes: training has diverged. Lower the learning"
            " rate, or use a longer warm-up."
        )
    boxes = clip(boxes, size)
    kept = (finite & not_empty(boxes)).nonzero().flatten()  # once: a GPU is waited for
    boxes, logits = boxes[kept], logits[kept]
    return boxes[nms(boxes, logits, threshold)]
