"""R50-C4 as the paper fine-tunes it (Sec. 5): Faster R-CNN, or Mask R-CNN with a mask branch.

It is built from torchvision's operators, and is numerically the detector that detectron2 builds
from MoCo's configuration, with its rules throughout. The parts are in the order in which an image
passes through them: the trunk's conv1 to layer3, the region proposal network, the RoI heads around
layer4, the detections. Batch norm is trained everywhere; with several processes, the caller
replaces it by a synchronised one.
"""

from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    grid_sample,
    l1_loss,
    pad,
)
from torchvision.ops import batched_nms, nms, roi_align

from hardmix.errors import InputError
from hardmix.evaluation.detection.boxes import (
    Sampling,
    Scale,
    Shuffle,
    Size,
    clip,
    decode,
    encode,
    match,
    not_empty,
    overlaps,
    sample,
)
from hardmix.runtime.device import send

# The trunk


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
        """Return the map of layer3."""
        for layer in self.children():
            images = layer(images)
        return images


# The region proposal network

STRIDE = 16
"""Pixels per cell of layer3's map, which the RPN reads, for every size of image."""

SIZES = (32, 64, 128, 256, 512)
"""Roots of the anchors' areas, in pixels."""

RATIOS = (0.5, 1.0, 2.0)
"""Heights over widths."""

PER_CELL = len(SIZES) * len(RATIOS)
"""Anchors of a cell, in detectron2's order: sizes, then the ratios of each size."""


def cell_anchors() -> Float[Tensor, "15 4"]:
    """Return the anchors around the point (0, 0), not rounded, as in detectron2."""
    anchors = []
    for size in SIZES:
        for ratio in RATIOS:
            width = (size**2 / ratio) ** 0.5
            height = ratio * width
            anchors.append((-width / 2, -height / 2, width / 2, height / 2))
    return torch.tensor(anchors)


def anchors_of(features: Float[Tensor, "images channels rows columns"]) -> Float[Tensor, "n 4"]:
    """Return all anchors of a map, row by row, the same for every image.

    The first cell is at (0, 0).
    """
    rows, columns = features.shape[-2:]
    y = torch.arange(rows, device=features.device).float() * STRIDE
    x = torch.arange(columns, device=features.device).float() * STRIDE
    y, x = torch.meshgrid(y, x, indexing="ij")
    corners = torch.stack([x, y, x, y], dim=-1).reshape(-1, 1, 4)
    return (corners + _on_device(features.device)).reshape(-1, 4)


@cache
def _on_device(device: torch.device) -> Tensor:
    return send(cell_anchors(), device)


RPN_SCALE = Scale(1.0, 1.0)


class TopK(NamedTuple):
    """Numbers of proposals per image that are kept, by logit."""

    before_nms: int
    after_nms: int


class RpnSettings(NamedTuple):
    """The RPN in MoCo's R50-C4 configuration; the defaults are the paper's."""

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
        """Return the logits and deltas of all anchors."""
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
        boxes = decode(anchors, output.deltas, RPN_SCALE)
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
        """Return the objectness loss and the L1 box loss of the sampled anchors.

        Both are divided by the requested number of anchors, even if fewer were sampled.
        """
        settings = self.settings
        objectness, box = output.logits.new_zeros(()), output.logits.new_zeros(())
        for logits, deltas, boxes in zip(output.logits, output.deltas, targets, strict=True):
            matches = match(
                overlaps(boxes, anchors), low=settings.low, high=settings.high, best=True
            )
            positive, negative = sample(matches, settings.sampling, shuffle)
            sampled = torch.cat([positive, negative])
            truth = (torch.arange(len(sampled), device=sampled.device) < len(positive)).float()
            objectness = objectness + binary_cross_entropy_with_logits(
                logits[sampled], truth, reduction="sum"
            )
            wanted = encode(anchors[positive], boxes[matches.targets[positive]], RPN_SCALE)
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
    """Return one image's proposals, best first, after clipping and NMS; empty ones are dropped.

    They are ranked by logits, because the sigmoids of large logits are all 1 and would tie.
    """
    finite = boxes.isfinite().all(dim=1) & logits.isfinite()
    if training and not bool(finite.all()):
        raise InputError(
            "the RPN predicts NaN or infinite boxes: training has diverged. Lower the learning"
            " rate, or use a longer warm-up."
        )
    boxes = clip(boxes, size)
    kept = (finite & not_empty(boxes)).nonzero().flatten()  # once, because it waits for a GPU
    boxes, logits = boxes[kept], logits[kept]
    return boxes[nms(boxes, logits, threshold)]


# The RoI heads

ROI_SCALE = Scale(10.0, 5.0)
POOLED = 14
"""Side of a region that RoIAlign cuts out; layer4 halves it."""


class MaskHead(nn.Module):
    """A transposed convolution that doubles the map, ReLU, and a 1x1 convolution to the classes."""

    def __init__(self, inputs: int, classes: int, width: int = 256) -> None:
        super().__init__()
        self.deconv = nn.ConvTranspose2d(inputs, width, 2, stride=2)
        self.predictor = nn.Conv2d(width, classes, 1)
        nn.init.kaiming_normal_(self.deconv.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.predictor.weight, std=0.001)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self, maps: Float[Tensor, "n inputs half half"]
    ) -> Float[Tensor, "n classes side side"]:
        """Return the logits of every class's mask."""
        logits: Tensor = self.predictor(torch.relu(self.deconv(maps))).float()
        return logits


@torch.no_grad()
def crop(
    masks: Bool[Tensor, "objects y x"],
    boxes: Float[Tensor, "n 4"],
    owners: Int[Tensor, " n"],
    side: int,
) -> Bool[Tensor, "n side side"]:
    """Return the mask of each box's object within the box.

    A cell belongs to it if RoIAlign's mean is at least 0.5.
    """
    rois = torch.cat([owners[:, None].to(boxes.dtype), boxes], dim=1)
    cells: Tensor = roi_align(
        masks[:, None].to(boxes.dtype), rois, side, 1.0, sampling_ratio=0, aligned=True
    )
    return cells[:, 0] >= 0.5


def mask_loss(
    logits: Float[Tensor, "n classes side side"],
    classes: Int[Tensor, " n"],
    truth: Bool[Tensor, "n side side"],
) -> Float[Tensor, ""]:
    """Return the mean binary cross-entropy of each region's own class."""
    if len(logits) == 0:
        # A zero that depends on the weights: DDP waits for the gradient of each.
        return logits.sum() * 0
    own = logits[torch.arange(len(logits), device=logits.device), classes]
    return binary_cross_entropy_with_logits(own, truth.to(own.dtype))


class DetectionSettings(NamedTuple):
    """Limits on the detections of an image that are kept; the defaults are detectron2's."""

    score: float = 0.05
    """Detections must score above this."""
    nms: float = 0.5
    limit: int = 100
    """Most detections per image, over all classes."""


class Detections(NamedTuple):
    """One image's detections, the best first, in pixels of the image that the detector saw."""

    boxes: Float[Tensor, "n 4"]
    scores: Float[Tensor, " n"]
    classes: Int[Tensor, " n"]
    masks: Float[Tensor, "n side side"] | None = None
    """Probabilities over the box, for its class."""


def choose(
    boxes: Float[Tensor, "n classes 4"],
    probabilities: Float[Tensor, "n classes_and_background"],
    size: Size,
    settings: DetectionSettings,
) -> Detections:
    """Return every pair of a box and a class above the score, after NMS within each class.

    A RoI can be detected as several classes. Boxes are clipped, but none is dropped for being
    small or empty: `resized` drops the empty ones later, after they have taken a place.
    """
    finite = boxes.isfinite().all(dim=2).all(dim=1) & probabilities.isfinite().all(dim=1)
    rows = finite.nonzero().flatten()  # once, because it waits for a GPU
    boxes, scores = clip(boxes[rows], size), probabilities[rows, :-1]
    rows, classes = (scores > settings.score).nonzero(as_tuple=True)
    boxes, scores = boxes[rows, classes], scores[rows, classes]
    kept = batched_nms(boxes.float(), scores, classes, settings.nms)[: settings.limit]
    return Detections(boxes[kept], scores[kept], classes[kept])


def resized(found: Detections, seen: Size, original: Size) -> Detections:
    """Return detections in pixels of the original image; those without area there are dropped."""
    boxes = found.boxes.clone()
    boxes[:, 0::2] *= original.width / seen.width
    boxes[:, 1::2] *= original.height / seen.height
    boxes = clip(boxes, original)
    kept = not_empty(boxes).nonzero().flatten()
    masks = None if found.masks is None else found.masks[kept]
    return Detections(boxes[kept], found.scores[kept], found.classes[kept], masks)


def paste(found: Detections, size: Size, threshold: float = 0.5) -> Bool[Tensor, "n y x"]:
    """Return masks of the whole image, of `size`, from the probabilities over each box.

    They are interpolated between their centres and 0 outside the box, as detectron2 pastes them.
    """
    if found.masks is None:
        raise ValueError("these detections have no masks: the detector has no mask branch.")
    pasted = torch.zeros(len(found.boxes), *size, dtype=torch.bool, device=found.boxes.device)
    # One pixel more on each side, where the interpolation towards 0 still has a value.
    first = (found.boxes[:, :2].floor() - 1).clamp(min=0)
    edges = torch.cat([first, found.boxes[:, 2:].ceil() + 1], dim=1).long().tolist()
    for mask, box, image, (x1, y1, x2, y2) in zip(
        found.masks, found.boxes, pasted, edges, strict=True
    ):
        part = image[y1:y2, x1:x2]
        x = _relative(x1, part.shape[1], box[0], box[2])
        y = _relative(y1, part.shape[0], box[1], box[3])
        grid = torch.stack([x.expand(len(y), -1), y[:, None].expand(-1, len(x))], dim=-1)
        values = grid_sample(mask[None, None], grid[None], align_corners=False)[0, 0]
        part.copy_(values >= threshold)
    return pasted


def _relative(
    first: int, count: int, low: Float[Tensor, ""], high: Float[Tensor, ""]
) -> Float[Tensor, " count"]:
    """Return the centres of pixels in coordinates in which the box extends from -1 to 1."""
    pixels = torch.arange(first, first + count, device=low.device, dtype=torch.float32) + 0.5
    return (pixels - low) / (high - low) * 2 - 1


class RoiSettings(NamedTuple):
    """The RoI heads in MoCo's R50-C4 configuration; the defaults are the paper's."""

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
    """Masks of the objects, which a detector with a mask branch needs."""


class Regions(NamedTuple):
    """The proposals of an image that the losses are computed on; the positive ones first."""

    boxes: Float[Tensor, "n 4"]
    classes: Int[Tensor, " n"]
    """Class of each proposal; the background is the number of classes."""
    targets: Int[Tensor, " positive"]
    """Index of the object of each positive proposal."""


class RoiHeads(nn.Module):
    """Classes, boxes and perhaps masks from regions of layer3's map.

    layer4 runs on every region, followed by one more batch norm and the predictors: detectron2's
    Res5 heads with MoCo's extra norm (`Res5ROIHeadsExtraNorm`).
    """

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
        """Number of the background class, the predictor's last one."""
        return self.classes.out_features - 1

    def forward(
        self,
        features: Float[Tensor, "images channels rows columns"],
        boxes: list[Float[Tensor, "_ 4"]],
    ) -> Float[Tensor, "n width side side"]:
        """Return the normalised map of every region, image by image; the norm has no ReLU."""
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
        """Return the class, L1 box and mask losses of one pass of layer4 over sampled regions."""
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
        # The objects' own boxes are added: at first, the RPN may propose nothing near them.
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
        return l1_loss(own, encode(boxes, wanted, ROI_SCALE), reduction="sum")

    def _deltas(self, pooled: Float[Tensor, "n width"]) -> Float[Tensor, "n classes 4"]:
        deltas: Tensor = self.boxes(pooled).float()
        return deltas.reshape(len(pooled), self.background, 4)

    @torch.no_grad()
    def detect(
        self,
        features: Float[Tensor, "images channels rows columns"],
        proposals: list[Float[Tensor, "_ 4"]],
        sizes: list[Size],
    ) -> list[Detections]:
        """Return each image's detections; for masks, layer4 runs again on the detected boxes."""
        pooled = self(features, proposals).mean(dim=(2, 3))
        probabilities = self.classes(pooled).float().softmax(dim=1)
        deltas = self._deltas(pooled)
        boxes = decode(torch.cat(proposals)[:, None], deltas, ROI_SCALE)
        counts = [len(each) for each in proposals]
        parts = zip(boxes.split(counts), probabilities.split(counts), sizes, strict=True)
        detections = [choose(*part, self.settings.detections) for part in parts]
        return (
            detections if self.mask is None else self._with_masks(self.mask, features, detections)
        )

    def _with_masks(
        self,
        mask: MaskHead,
        features: Float[Tensor, "images channels rows columns"],
        found: list[Detections],
    ) -> list[Detections]:
        logits = mask(self(features, [each.boxes for each in found]))
        classes = torch.cat([each.classes for each in found])
        own = logits[torch.arange(len(classes), device=classes.device), classes].sigmoid()
        masks = own.split([len(each.boxes) for each in found])
        return [each._replace(masks=part) for each, part in zip(found, masks, strict=True)]


# The detector

MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)
"""Mean and standard deviation of ImageNet's pixels, for RGB from 0 to 255."""

Image = Float[Tensor, "3 _ _"] | UInt8[Tensor, "3 _ _"]
"""An RGB image of any size, from 0 to 255."""


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
    def detect(self, images: list[Image]) -> list[Detections]:
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
            on_host = target.classes.device.type == "cpu"  # reading from a GPU would wait for it
            if on_host and bool(((target.classes < 0) | (target.classes >= classes)).any()):
                raise InputError(
                    f"classes={target.classes.tolist()} of image {number} do not fit a detector of"
                    f" {classes} classes: count from 0 to {classes - 1}."
                )
            if self.roi_heads.mask is not None and target.masks is None:
                raise InputError(
                    f"image {number} has no masks, which the detector's mask branch needs:"
                    " pass them, or build the detector with masks=False."
                )


def _sizes(images: list[Image]) -> list[Size]:
    return [Size(image.shape[1], image.shape[2]) for image in images]
