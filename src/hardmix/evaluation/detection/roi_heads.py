"""RoI heads of a C4: layer4 on every region, one more batch norm, class, box and mask predictors.

detectron2's Res5 heads with MoCo's extra norm (paper, Sec. 5; `Res5ROIHeadsExtraNorm`).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, l1_loss
from torchvision.ops import roi_align

from hardmix.evaluation.detection.anchors import STRIDE
from hardmix.evaluation.detection.boxes import Scale, Size, decode, encode, overlaps
from hardmix.evaluation.detection.detections import DetectionSettings, Found, choose
from hardmix.evaluation.detection.masks import MaskHead, crop, mask_loss
from hardmix.evaluation.detection.matching import Sampling, Shuffle, match, sample

SCALE = Scale(10.0, 5.0)
POOLED = 14
"""Side of a region that RoIAlign cuts out; layer4 halves it."""


class RoiSettings(NamedTuple):
    """MoCo's R50-C4 configuration; the defaults are the paper's."""

    sampling: Sampling = Sampling(512, 0.25)
    overlap: float = 0.5
    """Smallest overlap of a positive proposal."""
    detections: DetectionSettings = DetectionSettings()


class Target(NamedTuple):
    """The objects of a training image, in pixels of the image as the detector sees it."""

    boxes: Float[Tensor, "n 4"]
    classes: Int[Tensor, " n"]
    """Class of each object, counted from 0, without the background."""
    masks: Bool[Tensor, "n y x"] | None = None
    """Needed by a detector with a mask branch."""


class Regions(NamedTuple):
    """The proposals of an image that the losses are computed on; the positive ones first."""

    boxes: Float[Tensor, "n 4"]
    classes: Int[Tensor, " n"]
    """Class of each proposal; the background is the number of classes."""
    targets: Int[Tensor, " positive"]
    """Object of each positive one."""


class RoiHeads(nn.Module):
    """Regions of the map of layer3 -> classes, boxes, and masks if there is a mask branch."""

    def __init__(
        self,
        layer4: nn.Module,
        width: int,
        classes: int,
        mask: MaskHead | None,
        settings: RoiSettings,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.layer4 = layer4
        self.norm = nn.BatchNorm2d(width)
        self.classes = nn.Linear(width, classes + 1)
        self.boxes = nn.Linear(width, classes * 4)
        self.mask = mask
        for layer, std in ((self.classes, 0.01), (self.boxes, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    @property
    def background(self) -> int:
        """The predictor's last class."""
        return self.classes.out_features - 1

    def forward(
        self,
        features: Float[Tensor, "images channels rows columns"],
        boxes: list[Float[Tensor, "_ 4"]],
    ) -> Float[Tensor, "n width side side"]:
        """Return the normalised map of every region, image by image. No ReLU after the norm."""
        pooled = roi_align(features, boxes, POOLED, 1 / STRIDE, sampling_ratio=0, aligned=True)
        maps: Tensor = self.norm(self.layer4(pooled))
        return maps

    def losses(
        self,
        features: Float[Tensor, "images channels rows columns"],
        proposals: list[Float[Tensor, "_ 4"]],
        targets: list[Target],
        shuffle: Shuffle,
    ) -> dict[str, Float[Tensor, ""]]:
        """Return class, L1 box and mask losses, from one pass of layer4 over sampled regions."""
        regions = [
            self._draw(boxes, target, shuffle)
            for boxes, target in zip(proposals, targets, strict=True)
        ]
        maps = self(features, [each.boxes for each in regions])
        classes = torch.cat([each.classes for each in regions])
        pooled = maps.mean(dim=(2, 3))
        positive = (classes != self.background).nonzero()[:, 0]
        losses = {
            "loss_cls": cross_entropy(self.classes(pooled).float(), classes),
            "loss_box_reg": self._box_loss(pooled[positive], regions, targets) / len(classes),
        }
        if self.mask is not None:
            logits = self.mask(maps[positive])
            crops = [
                crop(target.masks, each.boxes[: len(each.targets)], each.targets, POOLED)
                for target, each in zip(targets, regions, strict=True)
                if target.masks is not None
            ]
            losses["loss_mask"] = mask_loss(logits, classes[positive], torch.cat(crops))
        return losses

    @torch.no_grad()
    def _draw(self, proposals: Float[Tensor, "n 4"], target: Target, shuffle: Shuffle) -> Regions:
        # The objects' own boxes too: at first, the RPN may propose nothing near them.
        boxes = torch.cat([proposals, target.boxes])
        overlap = self.settings.overlap
        matches = match(overlaps(target.boxes, boxes), low=overlap, high=overlap)
        positive, negative = sample(matches, self.settings.sampling, shuffle)
        chosen = matches.targets[positive]
        background = torch.full_like(negative, self.background)
        return Regions(
            boxes[torch.cat([positive, negative])],
            torch.cat([target.classes[chosen], background]),
            chosen,
        )

    def _box_loss(
        self,
        pooled: Float[Tensor, "positive width"],
        regions: list[Regions],
        targets: list[Target],
    ) -> Float[Tensor, ""]:
        boxes = torch.cat([each.boxes[: len(each.targets)] for each in regions])
        classes = torch.cat([each.classes[: len(each.targets)] for each in regions])
        wanted = torch.cat(
            [target.boxes[each.targets] for target, each in zip(targets, regions, strict=True)]
        )
        deltas = self._deltas(pooled)
        own = deltas[torch.arange(len(pooled), device=pooled.device), classes]
        return l1_loss(own, encode(boxes, wanted, SCALE), reduction="sum")

    def _deltas(self, pooled: Float[Tensor, "n width"]) -> Float[Tensor, "n classes 4"]:
        deltas: Tensor = self.boxes(pooled).float()
        return deltas.reshape(len(pooled), self.background, 4)

    @torch.no_grad()
    def detect(
        self,
        features: Float[Tensor, "images channels rows columns"],
        proposals: list[Float[Tensor, "_ 4"]],
        sizes: list[Size],
    ) -> list[Found]:
        """Return each image's detections. For masks, layer4 runs again on the detected boxes."""
        pooled = self(features, proposals).mean(dim=(2, 3))
        probabilities = self.classes(pooled).float().softmax(dim=1)
        deltas = self._deltas(pooled)
        boxes = decode(torch.cat(proposals)[:, None], deltas, SCALE)
        counts = [len(each) for each in proposals]
        found = [
            choose(*each, self.settings.detections)
            for each in zip(boxes.split(counts), probabilities.split(counts), sizes, strict=True)
        ]
        return found if self.mask is None else self._with_masks(self.mask, features, found)

    def _with_masks(
        self,
        mask: MaskHead,
        features: Float[Tensor, "images channels rows columns"],
        found: list[Found],
    ) -> list[Found]:
        logits = mask(self(features, [each.boxes for each in found]))
        classes = torch.cat([each.classes for each in found])
        own = logits[torch.arange(len(classes), device=classes.device), classes].sigmoid()
        masks = own.split([len(each.boxes) for each in found])
        return [each._replace(masks=part) for each, part in zip(found, masks, strict=True)]
