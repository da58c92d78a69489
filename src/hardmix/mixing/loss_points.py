"""Which points MochiLoss makes, and which real negatives these replace."""

from typing import NamedTuple

import torch
from torch import Tensor

from hardmix.mixing.checks import check_plan, check_plan_rows, wants_check
from hardmix.mixing.loss_inputs import Call
from hardmix.mixing.plans import MixPlan, Strategy, Vectors
from hardmix.mixing.queue import MemoryQueue
from hardmix.mixing.ranking import in_one_piece
from hardmix.mixing.variants import (
    COUNTS_ITSELF,
    OUR_FUNCTIONS,
    dropped_negatives,
    function_of,
    plan_fixed_percentage,
    ranking_similarity,
)
from hardmix.settings.named_choices import RealNegatives


class PointChoice(NamedTuple):
    """MoCHi (N, s, s'), a strategy, and what happens to the real negatives."""

    num_hardest: int
    num_pairs: int
    num_with_query: int
    strategy: Strategy
    real_negatives: RealNegatives

    @property
    def ours(self) -> bool:
        """Whether the strategy is one of this package's."""
        return function_of(self.strategy) in OUR_FUNCTIONS

    @property
    def every_point(self) -> bool:
        """Whether no point is missing, unless negatives are excluded."""
        return self.ours and function_of(self.strategy) is not plan_fixed_percentage

    def any(self) -> bool:
        """Return whether there are points at all."""
        known = function_of(self.strategy)
        return self.num_pairs + self.num_with_query > 0 or known in COUNTS_ITSELF

    def at_most(self, number: int, limited: bool) -> "PointChoice":
        """Return the same, with N limited by the number of negatives."""
        return self._replace(num_hardest=min(self.num_hardest, number)) if limited else self

    def by_slots(self, negatives: Tensor | MemoryQueue) -> bool:
        """Return whether a queue that is not full is simply a shorter one for this loss.

        Not for others' strategies, which may count its slots; not where N means more than a limit,
        or for a pair of one. In torch.compile every fill shall be one graph.
        """
        return (
            not torch.compiler.is_compiling()
            and isinstance(negatives, MemoryQueue)
            and self.every_point
            and self.real_negatives == "keep"
            and negatives.filled >= 2
            and self.num_hardest <= len(negatives)
        )

    def plan(
        self, vectors: Vectors, similarity: Tensor, not_mixed: Tensor | None, call: Call
    ) -> tuple[MixPlan, Tensor | None]:
        """Return the strategy's plan and the real negatives to drop from the loss."""
        looks = wants_check(call.check, similarity)
        if not looks and not in_one_piece(similarity) and not bool(similarity.sum().isfinite()):
            similarity = similarity.nan_to_num()  # ranking refuses NaN; the loss shall be NaN
        embeddings = vectors.for_strategies()
        plan = self.strategy(
            similarity,
            num_hardest=self.num_hardest,
            num_pairs=self.num_pairs,
            num_with_query=self.num_with_query,
            exclude=not_mixed,
            # By row without being a generator only for our strategies: others' may need one.
            generator=call.generator,  # type: ignore[arg-type]
            embeddings=embeddings,
        )
        if not self.ours:
            check_plan(plan, len(similarity))
            if looks:
                check_plan_rows(plan, similarity.shape[1])
        if self.real_negatives == "keep":
            return plan, None
        ranked = ranking_similarity(self.strategy, similarity, embeddings)
        dropped = dropped_negatives(ranked, self.real_negatives, self.num_hardest, not_mixed)
        return plan, dropped
