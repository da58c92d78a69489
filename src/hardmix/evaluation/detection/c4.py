"""R50-C4 as the paper fine-tunes it (Sec. 5): Faster R-CNN, or Mask R-CNN with a mask branch.

Built from torchvision's operators, and numerically the detector that detectron2 builds from MoCo's
configuration. Batch norm is trained everywhere; with several processes, the caller replaces it by a
synchronised one.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn.functional import pad

from hardmix.errors import InputError
from hardmix.evaluation.detection.anchors import anchors_of
from hardmix.evaluation.detection.boxes import Size
from hardmix.evaluation.detection.detections import Found
from hardmix.evaluation.detection.masks import MaskHead
from hardmix.evaluation.detection.matching import Shuffle
from hardmix.evaluation.detection.roi_heads import RoiHeads, RoiSettings, Target
from hardmix.evaluation.detection.rpn import Rpn, RpnSettings

MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)
"""ImageNet's, for RGB from 0 to 255, as in pre-training."""

Image = Float[Tensor, "3 _ _"] | UInt8[Tensor, "3 _ _"]
"""RGB from 0 to 255, of any size."""


class C4Detector(nn.Module):
    """A ResNet's conv1 to layer3, RPN, and RoI heads around its layer4.

    `trunk` is a torchvision ResNet of any depth and width; its layers are used, not copied.
    `shuffle` orders the boxes that losses are sampled from, such as `torch.randperm`.
    """

    def __init__(
        self,
        trunk: nn.Module,
        classes: int,
        *,
        masks: bool = False,
        mask_width: int = 256,
        rpn: RpnSettings | None = None,
        roi: RoiSettings | None = None,
        shuffle: Shuffle = torch.randperm,
    ) -> None:
        super().__init__()
        if classes < 1:
            raise InputError(f"classes={classes} must be at least 1.")
        self.trunk = Stride16(trunk)
        layer4 = trunk.get_submodule("layer4")
        convolutions = [layer for layer in layer4.modules() if isinstance(layer, nn.Conv2d)]
        inputs, width = convolutions[0].in_channels, convolutions[-1].out_channels
        self.rpn = Rpn(inputs, rpn or RpnSettings())
        mask = MaskHead(width, classes, mask_width) if masks else None
        self.roi_heads = RoiHeads(layer4, width, classes, mask, roi or RoiSettings())
        self.shuffle = shuffle
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(STD)[:, None, None], persistent=False)

    def forward(self, images: list[Image], targets: list[Target]) -> dict[str, Float[Tensor, ""]]:
        """Return the training losses under detectron2's names; their sum is minimised."""
        self._check(images, targets)
        features = self.trunk(self.batch(images))
        anchors = anchors_of(features)
        output = self.rpn(features)
        boxes = [target.boxes for target in targets]
        losses = self.rpn.losses(output, anchors, boxes, self.shuffle)
        train = self.rpn.settings.train
        proposals = self.rpn.proposals(output, anchors, _sizes(images), train)
        return losses | self.roi_heads.losses(features, proposals, targets, self.shuffle)

    @torch.no_grad()
    def detect(self, images: list[Image]) -> list[Found]:
        """Return the detections in each image, in its pixels. Call `eval()` first."""
        features = self.trunk(self.batch(images))
        proposals = self.propose(features, _sizes(images))
        return self.roi_heads.detect(features, proposals, _sizes(images))

    def propose(
        self, features: Float[Tensor, "images channels rows columns"], sizes: list[Size]
    ) -> list[Float[Tensor, "_ 4"]]:
        """Return the proposals that `detect` uses, from layer3's map and the images' sizes."""
        test = self.rpn.settings.test
        return self.rpn.proposals(self.rpn(features), anchors_of(features), sizes, test)

    def batch(self, images: list[Image]) -> Float[Tensor, "images 3 y x"]:
        """Return normalised images, padded with 0 below and on the right to the largest one.

        Sizes are not rounded to a multiple: detectron2 does that for pyramids, not for C4.
        """
        height = max(image.shape[1] for image in images)
        width = max(image.shape[2] for image in images)
        mean, std = self.get_buffer("mean"), self.get_buffer("std")
        normal = [(image.to(mean.device) - mean) / std for image in images]
        return torch.stack(
            [pad(each, (0, width - each.shape[2], 0, height - each.shape[1])) for each in normal]
        )

    def _check(self, images: list[Image], targets: list[Target]) -> None:
        if len(images) != len(targets):
            raise InputError(
                f"{len(images)} images, but {len(targets)} targets: pass one for each image,"
                " empty if it has no object."
            )
        classes = self.roi_heads.background
        for number, target in enumerate(targets):
            looked_at = target.classes.device.type == "cpu"  # a GPU would be waited for
            if looked_at and bool(((target.classes < 0) | (target.classes >= classes)).any()):
                raise InputError(
                    f"classes={target.classes.tolist()} of image {number} do not fit a detector of"
                    f" {classes} classes: count from 0 to {classes - 1}."
                )
            if self.roi_heads.mask is not None and target.masks is None:
                raise InputError(
                    f"image {number} has no masks, which the detector's mask branch needs:"
                    " pass them, or build the detector with masks=False."
                )


class Stride16(nn.Module):
    """A torchvision ResNet up to layer3, with one cell per 16 pixels."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        parts = dict(trunk.named_children())
        needed = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
        missing = [name for name in needed if name not in parts]
        if missing:
            raise InputError(
                f"the backbone has no {', '.join(missing)}: a C4 detector needs a torchvision"
                " ResNet such as resnet50."
            )
        if not isinstance(parts["maxpool"], nn.MaxPool2d):
            raise InputError(
                "the backbone has no max-pool (a '-cifar' one), so its layer3 lacks the stride of"
                " 16 that a C4 detector needs. Use a torchvision ResNet such as resnet50."
            )
        for name in needed[:-1]:
            self.add_module(name, parts[name])

    def forward(
        self, images: Float[Tensor, "images 3 y x"]
    ) -> Float[Tensor, "images channels rows columns"]:
        """The map of layer3."""
        for layer in self.children():
            images = layer(images)
        return images


def _sizes(images: list[Image]) -> list[Size]:
    return [Size(image.shape[1], image.shape[2]) for image in images]
