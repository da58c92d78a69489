"""Draws by a softmax over the N hardest negatives (App. B.2)."""

import torch
from jaxtyping import Float
from torch import Tensor


def cumulative_softmax(logits: Float[Tensor, "batch N"]) -> Float[Tensor, "batch N"]:
    """Cumulative probabilities over the N hardest; all 0 where there is none."""
    return logits.softmax(dim=1).nan_to_num(0.0).cumsum(dim=1)


def invert(cumulative: Tensor, uniform: Tensor, count: Tensor) -> Tensor:
    """Inverse transform sampling: uniform numbers to columns by their probability."""
    columns = torch.searchsorted(cumulative, uniform.contiguous(), right=True)
    return torch.minimum(columns, (count - 1).clamp(min=0))


def invert_without(logits: Tensor, uniform: Tensor, taken: Tensor, count: Tensor) -> Tensor:
    """As `invert`, with column `taken` masked out of the softmax.

    A probability of up to 0.5 is cut out of the cumulative ones without loss. Only the likeliest
    column may have more, and there is one of these: its softmax without it is made anew.
    """
    cumulative = cumulative_softmax(logits)
    upto = cumulative.gather(1, taken)
    before = torch.where(taken > 0, cumulative.gather(1, (taken - 1).clamp(min=0)), 0.0)
    point = uniform * (cumulative[:, -1:] - (upto - before))
    point = torch.where(point >= before, point + (upto - before), point)
    others = invert(cumulative, point, count)
    likeliest = logits.argmax(dim=1, keepdim=True)
    others = torch.where(others == taken, likeliest, others)  # rounding at the edge of the cut
    masked = cumulative_softmax(logits.scatter(1, likeliest, -torch.inf))
    instead = invert(masked, uniform * masked[:, -1:], count)
    return torch.where(taken == likeliest, instead, others)
