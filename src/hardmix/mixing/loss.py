"""MoCHi for anybody's training loop: one module, from raw embeddings to a loss.

loss = MochiLoss()
memory = MemoryQueue(size=16384, dim=128)
loss(query, key, memory).backward()
memory.enqueue(key)                     # after the loss: a key is never its own negative
"""

from typing import get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.mixing.checks import (
    check_choice,
    check_counts,
    check_mask,
    check_not_transformed,
    check_plan,
    check_plan_rows,
    check_shapes,
    check_temperature,
    unit_vectors,
)
from hardmix.mixing.infonce import Contrast, contrast
from hardmix.mixing.plans import Embeddings, MixPlan, Strategy
from hardmix.mixing.queue import MemoryQueue
from hardmix.mixing.variants import STRATEGIES, dropped_negatives, ranking_similarity
from hardmix.settings.config import RealNegatives, StrategyName


class MochiLoss(nn.Module):
    """Sec. 4: InfoNCE with mixed hard negatives, MoCHi (N, s, s'). s = s' = 0 is plain MoCo.

    Normalises its inputs itself and computes in float32 or better, also inside autocast. The
    defaults are the paper's best setting on ImageNet-100 (Table 1).
    """

    def __init__(
        self,
        num_hardest: int = 1024,
        num_pairs: int = 1024,
        num_with_query: int = 128,
        temperature: float = 0.2,
        strategy: StrategyName | Strategy = "mochi",
        *,
        real_negatives: RealNegatives = "keep",
        through_query: bool = False,
    ) -> None:
        """Settings.

        num_hardest: N, hardest negatives of a query that may be mixed (Sec. 4.1).
        num_pairs: s, points that mix two of them (Eq. 3).
        num_with_query: s', points that mix one of them with the query (Sec. 4.2).
        temperature: tau of Eq. 1.
        strategy: a name in STRATEGIES, or any callable like `plan_mochi`.
        real_negatives: whether real negatives count beside the synthetic ones (paper: they do).
        through_query: whether the gradient passes the query inside h' (it does not, in Eq. 2).
        """
        super().__init__()
        check_counts(num_hardest, num_pairs, num_with_query)
        check_temperature(temperature)
        self.num_hardest = num_hardest
        self.num_pairs = num_pairs
        self.num_with_query = num_with_query
        self.temperature = temperature
        if isinstance(strategy, str):
            more = ", or pass a callable like hardmix.plan_mochi"
            check_choice("strategy", strategy, STRATEGIES, more)
        check_choice("real_negatives", real_negatives, get_args(RealNegatives))
        self.strategy = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
        self.real_negatives: RealNegatives = real_negatives
        self.through_query = through_query

    def forward(
        self,
        query: Float[Tensor, "batch dim"],
        key: Float[Tensor, "batch dim"],
        negatives: Float[Tensor, "K dim"] | MemoryQueue,
        exclude: Bool[Tensor, "batch K"] | None = None,
        *,
        mix: bool = True,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, ""]:
        """The mean loss over the batch.

        negatives: vectors, or a `MemoryQueue`, whose unfilled slots are never mixed.
        exclude: negatives that take no part, e.g. `memory.same_class(labels)`, the oracle.
        mix: False in the warm-up epochs: plain MoCo (`schedules.mixing_started`).
        """
        exclude, not_mixed = _masks(query, negatives, exclude)
        outcome, _ = self._contrast(
            query, key, negatives, exclude, not_mixed, self.num_hardest, mix, generator, True
        )
        return outcome.loss

    def in_batch(
        self,
        query: Float[Tensor, "batch dim"],
        key: Float[Tensor, "batch dim"],
        exclude: Bool[Tensor, "batch batch"] | None = None,
        *,
        mix: bool = True,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, ""]:
        """SimCLR style, no queue: the other samples' keys are the negatives, the own one is not.

        Gradients reach the keys too, as positives and as real negatives. N is at most the batch.
        """
        if len(query) < 2:
            raise InputError(
                f"query has {len(query)} row: in_batch takes the other samples of the batch for"
                " negatives and needs 2 or more."
            )
        own = torch.eye(len(query), dtype=torch.bool, device=query.device)
        check_mask(exclude, len(query), len(query))
        exclude = own if exclude is None else own | exclude
        num_hardest = min(self.num_hardest, len(query))
        outcome, _ = self._contrast(
            query, key, key, exclude, exclude, num_hardest, mix, generator, True
        )
        return outcome.loss

    def contrast(
        self,
        query: Float[Tensor, "batch dim"],
        key: Float[Tensor, "batch dim"],
        negatives: Float[Tensor, "K dim"] | MemoryQueue,
        exclude: Bool[Tensor, "batch K"] | None = None,
        *,
        mix: bool = True,
        generator: torch.Generator | None = None,
    ) -> tuple[Contrast, MixPlan | None]:
        """The same with all that was measured on the way, and the plan, for `diagnostics`."""
        exclude, not_mixed = _masks(query, negatives, exclude)
        return self._contrast(
            query, key, negatives, exclude, not_mixed, self.num_hardest, mix, generator, False
        )

    def _contrast(
        self,
        query: Tensor,
        key: Tensor,
        negatives: Tensor | MemoryQueue,
        exclude: Tensor | None,
        not_mixed: Tensor | None,
        num_hardest: int,
        mix: bool,
        generator: torch.Generator | None,
        overwrite: bool,
    ) -> tuple[Contrast, MixPlan | None]:
        embeddings = _unit_embeddings(query, key, negatives)
        query, key, vectors = embeddings
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            similarity = query @ vectors.T
            plan = None
            if mix and self.num_pairs + self.num_with_query > 0:
                plan = self.strategy(
                    similarity,
                    num_hardest=num_hardest,
                    num_pairs=self.num_pairs,
                    num_with_query=self.num_with_query,
                    exclude=not_mixed,
                    generator=generator,
                    embeddings=embeddings,
                )
                if self.strategy not in STRATEGIES.values():
                    check_plan(plan, len(query))
                    check_plan_rows(plan, len(vectors))
                if self.real_negatives != "keep":
                    ranked = ranking_similarity(self.strategy, similarity, embeddings)
                    dropped = dropped_negatives(ranked, self.real_negatives, num_hardest, not_mixed)
                    exclude = _either(exclude, dropped)
        outcome = contrast(
            query,
            key,
            vectors,
            plan,
            temperature=self.temperature,
            exclude=exclude,
            similarity=similarity,
            through_query=self.through_query,
            overwrite=overwrite,
            check=False,
        )
        return outcome, plan

    def extra_repr(self) -> str:
        """What print() shows: the paper's MoCHi (N, s, s')."""
        numbers = f"{self.num_hardest}, {self.num_pairs}, {self.num_with_query}"
        return f"MoCHi ({numbers}), temperature={self.temperature}"


def _masks(
    query: Tensor, negatives: Tensor | MemoryQueue, exclude: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Negatives that do not count, and those that are not mixed: unfilled slots are the latter."""
    check_mask(exclude, len(query), len(negatives))
    unfilled = negatives.unfilled() if isinstance(negatives, MemoryQueue) else None
    if unfilled is None or not isinstance(negatives, MemoryQueue):
        return exclude, exclude
    not_mixed = _either(exclude, unfilled.expand(len(query), -1))
    return not_mixed if negatives.start == "empty" else exclude, not_mixed


def _unit_embeddings(query: Tensor, key: Tensor, negatives: Tensor | MemoryQueue) -> Embeddings:
    """All three in one dtype, float32 or better, and of unit length; a queue's keys are already."""
    check_not_transformed()
    vectors = negatives.keys if isinstance(negatives, MemoryQueue) else negatives
    check_shapes(query, key, vectors)
    dtype = torch.promote_types(torch.promote_types(query.dtype, vectors.dtype), torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        if isinstance(negatives, MemoryQueue):
            vectors = vectors.to(dtype)
        else:
            vectors = unit_vectors("negatives", vectors, dtype)
        query, key = unit_vectors("query", query, dtype), unit_vectors("key", key, dtype)
    return Embeddings(query, key, vectors)


def _either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first | second
