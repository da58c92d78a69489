"""Losses that the benchmark compares: plain MoCo, MoCHi as usually written, lightly's, hardmix's.

Every variant starts from the same raw query and key, normalises them, and ends with the gradient
of the query; the negatives have unit length already, as a queue's keys have.
"""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from hardmix.mixing.loss import MochiLoss
from hardmix.mixing.queue import MemoryQueue

DIM = 128
TEMPERATURE = 0.2


class LossShape(NamedTuple):
    """What is measured: batch, K, and MoCHi's N, s, s'."""

    batch: int
    num_negatives: int
    num_hardest: int
    num_pairs: int
    num_with_query: int


TINY = LossShape(8, 64, 16, 16, 8)
"""Runs every line once, so that what libraries set up on first use is not counted as memory."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Raw query and key to the mean loss."""


def plain_moco(_: LossShape, negatives: Tensor) -> Loss:
    """MoCo as it is usually written. Its layout, (dim, K) or (K, dim), made no difference."""

    def loss(query: Tensor, key: Tensor) -> Tensor:
        query, key = normalize(query, dim=1), normalize(key, dim=1)
        positive = torch.einsum("bd,bd->b", query, key).unsqueeze(1)
        real = torch.einsum("bd,kd->bk", query, negatives)
        return _label_zero(torch.cat([positive, real], dim=1) / TEMPERATURE)

    return loss


def materialised_mochi(shape: LossShape, negatives: Tensor) -> Loss:
    """MoCHi as it is usually written: every synthetic point is a vector, detached."""

    def loss(query: Tensor, key: Tensor) -> Tensor:
        query, key = normalize(query, dim=1), normalize(key, dim=1)
        positive = torch.einsum("bd,bd->b", query, key).unsqueeze(1)
        real = torch.einsum("bd,kd->bk", query, negatives)
        with torch.no_grad():
            hardest = real.topk(shape.num_hardest, dim=1).indices
            pairs = _pair_points(shape, negatives, hardest)
            with_query = _query_points(shape, negatives, hardest, query)
            points = torch.cat([pairs, with_query], dim=1)
        synthetic = torch.einsum("bd,bsd->bs", query, points)
        return _label_zero(torch.cat([positive, real, synthetic], dim=1) / TEMPERATURE)

    return loss


def _pair_points(shape: LossShape, negatives: Tensor, hardest: Tensor) -> Tensor:
    size, device = (len(hardest), shape.num_pairs), hardest.device
    first = torch.randint(shape.num_hardest, size, device=device)
    offset = torch.randint(1, shape.num_hardest, size, device=device)
    second = (first + offset) % shape.num_hardest
    alpha = torch.rand(*size, 1, device=device)
    left = negatives[hardest.gather(1, first)]
    right = negatives[hardest.gather(1, second)]
    return normalize(alpha * left + (1 - alpha) * right, dim=-1)


def _query_points(shape: LossShape, negatives: Tensor, hardest: Tensor, query: Tensor) -> Tensor:
    size, device = (len(hardest), shape.num_with_query), hardest.device
    which = torch.randint(shape.num_hardest, size, device=device)
    beta = 0.5 * torch.rand(*size, 1, device=device)
    chosen = negatives[hardest.gather(1, which)]
    return normalize(beta * query.unsqueeze(1) + (1 - beta) * chosen, dim=-1)


def _label_zero(logits: Tensor) -> Tensor:
    return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


def lightly_bank(shape: LossShape, negatives: Tensor) -> Loss:
    """Plain MoCo by lightly. Unlike the others it copies the bank and enqueues in each call."""
    size = (shape.num_negatives, DIM)
    make = import_module("lightly.loss").NTXentLoss
    loss = make(temperature=TEMPERATURE, memory_bank_size=size).to(negatives.device)
    loss.memory_bank.bank.copy_(negatives)
    return cast("Loss", loss)


def hardmix_mochi(shape: LossShape, negatives: Tensor) -> Loss:
    """The loss of hardmix with a queue."""
    mochi = MochiLoss(*shape[2:], temperature=TEMPERATURE)
    memory = MemoryQueue.prefilled(negatives)
    return lambda query, key: mochi(query, key, memory)


def hardmix_tensor(shape: LossShape, negatives: Tensor) -> Loss:
    """The loss of hardmix with a plain tensor, whose lengths it must look at itself."""
    mochi = MochiLoss(*shape[2:], temperature=TEMPERATURE)
    return lambda query, key: mochi(query, key, negatives)


def hardmix_moco(shape: LossShape, negatives: Tensor) -> Loss:
    """The loss of hardmix without synthetic points."""
    return hardmix_mochi(shape._replace(num_pairs=0, num_with_query=0), negatives)


VARIANTS: dict[str, Callable[[LossShape, Tensor], Loss]] = {
    "plain_moco": plain_moco,
    "materialised": materialised_mochi,
    "lightly": lightly_bank,
    "hardmix": hardmix_mochi,
    "hardmix_tensor": hardmix_tensor,
    "hardmix_moco": hardmix_moco,
}


def embeddings(
    shape: LossShape, device: str
) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "batch dim"], Float[Tensor, "K dim"]]:
    """Random query, key and unit negatives."""
    query = torch.randn(shape.batch, DIM, device=device, requires_grad=True)
    key = torch.randn(shape.batch, DIM, device=device)
    negatives = normalize(torch.randn(shape.num_negatives, DIM, device=device), dim=1)
    return query, key, negatives
