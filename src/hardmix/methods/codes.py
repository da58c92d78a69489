"""SwAV's parts: the encoder of several crops, Sinkhorn's codes, and the loss between them."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import log_softmax, normalize

from hardmix.models.heads import batch_norm_mlp


class CropEncoder(nn.Module):
    """Crops of several sizes to embeddings of unit length, crop by crop."""

    def __init__(self, trunk: nn.Module, width: int, dim: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = batch_norm_mlp(width, width, dim)

    def forward(self, *crops: Float[Tensor, "batch channels _ _"]) -> Float[Tensor, "rows dim"]:
        """Return the embeddings of all crops, in float32; equal sizes must follow each other."""
        sizes = list(dict.fromkeys(crop.shape[-1] for crop in crops))
        groups = [[crop for crop in crops if crop.shape[-1] == size] for size in sizes]
        features = torch.cat([self.trunk(torch.cat(group)) for group in groups])
        return normalize(self.head(features).float(), dim=1)


@torch.no_grad()
def sinkhorn(
    scores: Float[Tensor, "batch k"], epsilon: float, iterations: int
) -> Float[Tensor, "batch k"]:
    """The paper's Eq. 4 and 5: codes whose rows sum to 1 and whose columns sum to batch / k."""
    # A column's factor is lost in the first iteration: this one keeps exp within its range.
    codes = scores.sub(scores.amax(dim=0)).div_(epsilon).exp_()
    for _ in range(iterations):
        codes /= codes.sum(dim=0)
        codes /= codes.sum(dim=1, keepdim=True).clamp_(min=1e-30)
    return codes


def swapped_loss(
    scores: Sequence[Float[Tensor, "batch k"]],
    codes: Sequence[Float[Tensor, "batch k"]],
    temperature: float,
) -> Float[Tensor, ""]:
    """The paper's Eq. 2 for several crops: `codes` are those of the first ones."""
    logs = [log_softmax(each / temperature, dim=1) for each in scores]
    terms = [
        -(code * log).sum(dim=1).mean()
        for place, code in enumerate(codes)
        for other, log in enumerate(logs)
        if other != place
    ]
    return torch.stack(terms).mean()
