"""MoCHi for any training loop: one module, from raw embeddings to a loss.

loss = MochiLoss()
memory = MemoryQueue(size=16384, dim=128)
loss(query, key, memory).backward()
memory.enqueue(key)                     # after the loss: a key is never its own negative
"""

from typing import NamedTuple, get_args

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
    wants_check,
)
from hardmix.mixing.infonce import Contrast, contrast
from hardmix.mixing.plans import DrawsByRow, Embeddings, MixPlan, Strategy
from hardmix.mixing.queue import MemoryQueue
from hardmix.mixing.ranking import in_one_piece
from hardmix.mixing.unit_length import unit_vectors
from hardmix.mixing.variants import (
    OUR_FUNCTIONS,
    STRATEGIES,
    dropped_negatives,
    function_of,
    plan_fixed_percentage,
    ranking_similarity,
)
from hardmix.settings.named_choices import RealNegatives, StrategyName


class _Sampling(NamedTuple):
    """Options for drawing a plan."""

    num_hardest: int
    mix: bool
    generator: torch.Generator | DrawsByRow | None
    check: bool | None


class MochiLoss(nn.Module):
    """Sec. 4: InfoNCE with mixed hard negatives, MoCHi (N, s, s'). s = s' = 0 is plain MoCo.

    Inputs are normalised, and everything is computed in float32 or better, also inside autocast.
    The defaults are the paper's best setting on ImageNet-100 (Table 1).
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
        """Create the loss.

        num_hardest: N, the number of hardest negatives per query that may be mixed (Sec. 4.1).
        num_pairs: s, the number of points that mix two of them (Eq. 3).
        num_with_query: s', the number of points that mix one of them with the query (Sec. 4.2).
        temperature: tau of Eq. 1.
        strategy: a name in STRATEGIES, or a callable with the signature of `plan_mochi`.
        real_negatives: whether real negatives stay in the loss next to the synthetic ones ("keep",
        as in the paper), or the N hardest ("drop_hardest") or all of them ("drop_all") are dropped.
        through_query: whether gradients flow through the query inside h' (in Eq. 2 they do not).
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
        generator: torch.Generator | DrawsByRow | None = None,
        normalised: bool = False,
        check: bool | None = None,
    ) -> Float[Tensor, ""]:
        """Return the mean loss over the batch.

        negatives: vectors, or a `MemoryQueue`, whose unfilled slots are never mixed.
        exclude: negatives to ignore, e.g. `memory.same_class(labels)` for the class oracle.
        mix: False for plain MoCo, as in the warm-up epochs (see `mixing_started`).
        generator: the random number generator; None uses PyTorch's default.
        normalised: promise that query and key are of unit length already.
        check: whether to refuse vectors that are zero, NaN or infinite. None checks on a CPU only,
        as checking would synchronise a GPU. Unchecked, such vectors make the loss NaN.
        """
        embeddings = _unit_embeddings(query, key, negatives, check, normalised)
        takes_part = _who_takes_part(query, negatives, exclude, self._mixes_slots(negatives))
        draws = _Sampling(self.num_hardest, mix, generator, check)
        return self._contrast(embeddings, takes_part, draws, overwrite=True)[0].loss

    def in_batch(
        self,
        query: Float[Tensor, "batch dim"],
        key: Float[Tensor, "batch dim"],
        exclude: Bool[Tensor, "batch batch"] | None = None,
        *,
        mix: bool = True,
        generator: torch.Generator | DrawsByRow | None = None,
        check: bool | None = None,
    ) -> Float[Tensor, ""]:
        """Return the mean loss with the other samples' keys as negatives, as in SimCLR: no queue.

        Keys receive gradients too, as positives and as real negatives. N is at most the batch size.
        """
        if len(query) < 2:
            raise InputError(
                f"query has {len(query)} row: in_batch uses the other samples of the batch as"
                " negatives and needs 2 or more."
            )
        own = torch.eye(len(query), dtype=torch.bool, device=query.device)
        check_mask(exclude, len(query), len(query))
        exclude = own if exclude is None else own | exclude
        embeddings = _unit_embeddings(query, key, key, check)
        draws = _Sampling(min(self.num_hardest, len(query)), mix, generator, check)
        takes_part = _TakesPart(exclude, exclude)
        return self._contrast(embeddings, takes_part, draws, overwrite=True)[0].loss

    def contrast(
        self,
        query: Float[Tensor, "batch dim"],
        key: Float[Tensor, "batch dim"],
        negatives: Float[Tensor, "K dim"] | MemoryQueue,
        exclude: Bool[Tensor, "batch K"] | None = None,
        *,
        mix: bool = True,
        generator: torch.Generator | DrawsByRow | None = None,
        normalised: bool = False,
        check: bool | None = None,
    ) -> tuple[Contrast, MixPlan | None]:
        """Return the loss with the similarities behind it, and the plan, for the diagnostics."""
        embeddings = _unit_embeddings(query, key, negatives, check, normalised)
        takes_part = _who_takes_part(query, negatives, exclude, self._mixes_slots(negatives))
        draws = _Sampling(self.num_hardest, mix, generator, check)
        return self._contrast(embeddings, takes_part, draws, overwrite=False)

    def _contrast(
        self,
        embeddings: Embeddings,
        takes_part: "_TakesPart",
        draws: "_Sampling",
        overwrite: bool,
    ) -> tuple[Contrast, MixPlan | None]:
        query, key, vectors = embeddings
        exclude, not_mixed, in_loss, mixed = takes_part
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            similarity, plan = query @ vectors.T, None
            if draws.mix and self.num_pairs + self.num_with_query > 0:
                some = embeddings._replace(negatives=vectors[:mixed])
                if mixed is not None:
                    draws = draws._replace(num_hardest=min(draws.num_hardest, mixed))
                plan, dropped = self._plan(some, similarity[:, :mixed], not_mixed, draws)
                exclude = _either(exclude, dropped)
        known = function_of(self.strategy)
        ours = known in OUR_FUNCTIONS
        outcome = contrast(
            query,
            key,
            vectors[:in_loss],
            plan,
            temperature=self.temperature,
            exclude=exclude,
            similarity=similarity[:, :in_loss],
            through_query=self.through_query,
            overwrite=overwrite,
            num_pairs=self.num_pairs if ours else None,
            every_point=ours and not_mixed is None and known is not plan_fixed_percentage,
            check=False,
        )
        return (outcome if overwrite else outcome._replace(real=similarity)), plan

    def _mixes_slots(self, negatives: Tensor | MemoryQueue) -> bool:
        """Return whether a queue that is not full is simply a shorter one for this loss.

        Not for others' strategies, which may count its slots; not where N means more than a limit,
        or for a pair of one. In torch.compile every fill shall be one graph.
        """
        known = function_of(self.strategy)
        return (
            not torch.compiler.is_compiling()
            and isinstance(negatives, MemoryQueue)
            and known in OUR_FUNCTIONS
            and known is not plan_fixed_percentage
            and self.real_negatives == "keep"
            and negatives.filled >= 2
            and self.num_hardest <= len(negatives)
        )

    def _plan(
        self,
        embeddings: Embeddings,
        similarity: Tensor,
        not_mixed: Tensor | None,
        draws: "_Sampling",
    ) -> tuple[MixPlan, Tensor | None]:
        """Return the strategy's plan and the real negatives to drop from the loss."""
        looks = wants_check(draws.check, similarity)
        if not looks and not in_one_piece(similarity) and not bool(similarity.sum().isfinite()):
            similarity = similarity.nan_to_num()  # ranking refuses NaN; the loss shall be NaN
        plan = self.strategy(
            similarity,
            num_hardest=draws.num_hardest,
            num_pairs=self.num_pairs,
            num_with_query=self.num_with_query,
            exclude=not_mixed,
            # By row without being a generator only for our strategies: others' may need one.
            generator=draws.generator,  # type: ignore[arg-type]
            embeddings=embeddings,
        )
        if function_of(self.strategy) not in OUR_FUNCTIONS:
            check_plan(plan, len(similarity))
            if looks:
                check_plan_rows(plan, similarity.shape[1])
        if self.real_negatives == "keep":
            return plan, None
        ranked = ranking_similarity(self.strategy, similarity, embeddings)
        return plan, dropped_negatives(ranked, self.real_negatives, draws.num_hardest, not_mixed)

    def extra_repr(self) -> str:
        """Return the text that print() shows: the paper's MoCHi (N, s, s')."""
        numbers = f"{self.num_hardest}, {self.num_pairs}, {self.num_with_query}"
        return f"MoCHi ({numbers}), temperature={self.temperature}"


class _TakesPart(NamedTuple):
    """Which negatives are in the loss, and which are mixed: leading slots, less those of a mask."""

    exclude: Tensor | None
    not_mixed: Tensor | None
    in_loss: int | None = None
    """Number of leading slots; None for all."""
    mixed: int | None = None


def _who_takes_part(
    query: Tensor, negatives: Tensor | MemoryQueue, exclude: Tensor | None, by_slots: bool
) -> _TakesPart:
    """Unfilled slots are not mixed, and not in the loss either with start="empty".

    by_slots: leave them out by their number, which the host knows, else by a mask.
    """
    check_mask(exclude, len(query), len(negatives))
    if not isinstance(negatives, MemoryQueue):
        return _TakesPart(exclude, exclude)
    if by_slots:
        filled = negatives.filled
        not_mixed = None if exclude is None else exclude[:, :filled]
        if negatives.start == "empty":
            return _TakesPart(not_mixed, not_mixed, filled, filled)
        return _TakesPart(exclude, not_mixed, None, filled)
    unfilled = negatives.unfilled()
    if unfilled is None:
        return _TakesPart(exclude, exclude)
    not_mixed = _either(exclude, unfilled.expand(len(query), -1))
    return _TakesPart(not_mixed if negatives.start == "empty" else exclude, not_mixed)


def _unit_embeddings(
    query: Tensor,
    key: Tensor,
    negatives: Tensor | MemoryQueue,
    check: bool | None,
    normalised: bool = False,
) -> Embeddings:
    """Return all three at unit length in one dtype, float32 or better."""
    check_not_transformed()
    vectors = negatives.keys if isinstance(negatives, MemoryQueue) else negatives
    check_shapes(query, key, vectors)
    dtype = torch.promote_types(torch.promote_types(query.dtype, vectors.dtype), torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        if normalised:
            unit_query, unit_key = query.to(dtype), key.to(dtype)
        else:
            unit_query = unit_vectors("query", query, dtype, check)
            unit_key = unit_vectors("key", key, dtype, check)
        if isinstance(negatives, MemoryQueue):
            vectors = vectors.to(dtype)
        else:
            in_batch = negatives is key
            vectors = unit_key if in_batch else unit_vectors("negatives", vectors, dtype, check)
    return Embeddings(unit_query, unit_key, vectors)


def _either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first | second
