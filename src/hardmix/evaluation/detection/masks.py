"""The mask branch of Mask R-CNN C4, on the map of the box predictors (detectron2's rules)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchvision.ops import roi_align


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
        """Logits of every class's mask."""
        logits: Tensor = self.predictor(torch.relu(self.deconv(maps))).float()
        return logits


@torch.no_grad()
def crop(
    masks: Bool[Tensor, "objects y x"],
    boxes: Float[Tensor, "n 4"],
    owners: Int[Tensor, " n"],
    side: int,
) -> Bool[Tensor, "n side side"]:
    """Return the mask of each box's object within the box: where RoIAlign's mean is >= 0.5."""
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
    """Mean binary cross-entropy of each region's own class."""
    if len(logits) == 0:
        # A zero that still reaches the weights: DDP waits for the gradient of each.
        return logits.sum() * 0
    own = logits[torch.arange(len(logits), device=logits.device), classes]
    return binary_cross_entropy_with_logits(own, truth.to(own.dtype))
