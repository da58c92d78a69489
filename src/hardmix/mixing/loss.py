"""MoCHi, and the family around it, for any training loop: from raw embeddings to a loss.

loss = MochiLoss()
memory = MemoryQueue(size=16384, dim=128)
loss(query, key, memory).backward()
memory.enqueue(key)                     # after the loss: a key is never its own negative
"""

from typing import Any, Unpack, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.mixing.checks import (
    as_number,
    check_choice,
    check_counts,
    check_temperature,
)
from hardmix.mixing.denominators import Denominator, denominator_of
from hardmix.mixing.filters import FILTERS, NegativeFilter
from hardmix.mixing.infonce import Contrast, contrast
from hardmix.mixing.loss_inputs import (
    Call,
    CallOptions,
    TakesPart,
    Temperature,
    either,
    filtered,
    positives_of,
    reduced,
    shared_and_own,
    unit_embeddings,
    who_takes_part,
    widened,
)
from hardmix.mixing.loss_points import PointChoice
from hardmix.mixing.negative_weights import WEIGHTS, NegativeWeights
from hardmix.mixing.plans import MixPlan, Strategy, Vectors
from hardmix.mixing.points import dots
from hardmix.mixing.queue import MemoryQueue
from hardmix.mixing.transformations import FeatureTransformation
from hardmix.mixing.variants import STRATEGIES
from hardmix.settings.named_choices import (
    DenominatorName,
    FilterName,
    RealNegatives,
    Reduction,
    StrategyName,
    WeightsName,
)


class MochiLoss(nn.Module):
    """Sec. 4: InfoNCE with mixed hard negatives, MoCHi (N, s, s'). s = s' = 0 is plain MoCo.

    Inputs are normalised, and everything is computed in float32 or better, also inside autocast.
    The defaults are the paper's best setting on ImageNet-100 (Table 1). `strategy`, `weights`,
    `denominator` and `filter_negatives` choose other members of the family, in any combination.
    """

    def __init__(
        self,
        num_hardest: int = 1024,
        num_pairs: int = 1024,
        num_with_query: int = 128,
        temperature: Temperature = 0.2,
        strategy: StrategyName | Strategy = "mochi",
        *,
        real_negatives: RealNegatives = "keep",
        through_query: bool = False,
        weights: WeightsName | NegativeWeights = "none",
        denominator: DenominatorName | Denominator = "infonce",
        filter_negatives: FilterName | NegativeFilter = "none",
    ) -> None:
        """Create the loss.

        num_hardest: N, the number of hardest negatives per query that may be mixed (Sec. 4.1).
        num_pairs: s, the number of points that mix two of them (Eq. 3).
        num_with_query: s', the number of points that mix one of them with the query (Sec. 4.2).
        temperature: tau of Eq. 1: a number, or a tensor or nn.Parameter, which gets its gradient,
        or a function that returns one: lambda: (-model.logit_scale).exp() for CLIP's.
        strategy: a name in STRATEGIES, or a callable with the signature of `plan_mochi`.
        real_negatives: whether real negatives stay in the loss next to the synthetic ones ("keep",
        as in the paper), or the N hardest ("drop_hardest") or all of them ("drop_all") are dropped.
        through_query: whether gradients flow through the query inside h' (in Eq. 2 they do not).
        weights: weights of the real negatives: a name in WEIGHTS, or a `NegativeWeights`.
        denominator: what the loss is made of its positive and its negatives: a name in
        DENOMINATORS, or a function of `Masses`.
        filter_negatives: which negatives are taken for false, and neither contrasted nor mixed: a
        name in FILTERS, or a `NegativeFilter`.
        """
        super().__init__()
        check_counts(num_hardest, num_pairs, num_with_query)
        if not callable(temperature):
            check_temperature(temperature)
        self.num_hardest = num_hardest
        self.num_pairs = num_pairs
        self.num_with_query = num_with_query
        self.temperature = temperature
        check_choice("real_negatives", real_negatives, get_args(RealNegatives))
        self.strategy: Strategy = _named("strategy", strategy, STRATEGIES, "hardmix.plan_mochi")
        self.weights: NegativeWeights | None = _named(
            "weights", weights, {"none": None} | WEIGHTS, "hardmix.hcl_weights()"
        )
        self.filter_negatives: NegativeFilter | None = _named(
            "filter_negatives", filter_negatives, {"none": None} | FILTERS, "above_positive()"
        )
        self.denominator = denominator_of(denominator)
        self.real_negatives: RealNegatives = real_negatives
        self.through_query = through_query

    def forward(
        self,
        query: Float[Tensor, "batch dim"],
        key: Float[Tensor, "batch dim"],
        negatives: Float[Tensor, "K dim"] | Float[Tensor, "batch M dim"] | MemoryQueue,
        exclude: Bool[Tensor, "batch columns"] | None = None,
        *,
        reduction: Reduction = "mean",
        **options: Unpack[CallOptions],
    ) -> Float[Tensor, "..."]:
        """Return the mean loss over the batch.

        negatives: vectors that all queries share, or a `MemoryQueue`, whose unfilled slots are
        never mixed, or vectors of each query's own.
        exclude: negatives to ignore, e.g. `memory.same_class(labels)` for the class oracle.
        reduction: "none" for the loss of each query, "sum" for their sum.
        options: `mix`, `generator`, `normalised`, `check`, `own_negatives`, `positives`,
        `sample_weights`: see `CallOptions`.
        """
        check_choice("reduction", reduction, get_args(Reduction))
        call = Call(**options)
        outcome, _ = self._of_negatives(query, key, negatives, exclude, call, overwrite=True)
        return _loss(outcome, reduction, call)

    def in_batch(
        self,
        query: Float[Tensor, "batch dim"],
        key: Float[Tensor, "batch dim"],
        exclude: Bool[Tensor, "batch columns"] | None = None,
        *,
        reduction: Reduction = "mean",
        gathered: Float[Tensor, "all dim"] | None = None,
        first_row: int = 0,
        **options: Unpack[CallOptions],
    ) -> Float[Tensor, "..."]:
        """Return the mean loss with the other samples' keys as negatives, as in SimCLR: no queue.

        Keys receive gradients too, as positives and as real negatives. N is at most the batch size.
        gathered: the keys of all processes, `hardmix.gather(key, with_gradient=True)`; those of
        this process begin at row `first_row`, which is its rank times the batch size.
        """
        check_choice("reduction", reduction, get_args(Reduction))
        keys = key if gathered is None else gathered
        if len(keys) < 2:
            raise InputError(
                f"query has {len(query)} row: in_batch uses the other samples of the batch as"
                " negatives and needs 2 or more."
            )
        if gathered is not None and not 0 <= first_row <= len(keys) - len(query):
            raise InputError(
                f"first_row={first_row} with {len(query)} queries and {len(keys)} keys: the"
                " queries' own keys are rows first_row and on; pass rank * batch size."
            )
        call = Call(**options)
        num_own = 0 if call.own_negatives is None else call.own_negatives.shape[1]
        place = torch.arange(len(query), device=query.device).unsqueeze(1) + first_row
        own = place == torch.arange(len(keys), device=query.device)
        exclude = widened(exclude, len(query), len(keys), num_own)
        exclude = either(widened(own, len(query), len(keys), num_own), exclude)
        given = call.own_negatives, call.normalised
        vectors = unit_embeddings(query, key, keys, call.check, *given)
        takes_part = TakesPart(exclude, exclude)
        outcome, _ = self._contrast(vectors, takes_part, call, overwrite=True, at_most=True)
        return _loss(outcome, reduction, call)

    def symmetric(
        self,
        first: Float[Tensor, "batch dim"],
        second: Float[Tensor, "batch dim"],
        exclude: Bool[Tensor, "batch columns"] | None = None,
        *,
        reduction: Reduction = "mean",
        gathered: tuple[Float[Tensor, "all dim"], Float[Tensor, "all dim"]] | None = None,
        first_row: int = 0,
        **options: Unpack[CallOptions],
    ) -> Float[Tensor, "..."]:
        """Return the mean of both directions' `in_batch`, as in CLIP: first to second, and back.

        Points are mixed of the negatives' side alone. exclude and positives: pairs of samples,
        for both directions. gathered: `first` and `second` of all processes.
        """
        of_first, of_second = (None, None) if gathered is None else gathered
        given: dict[str, Any] = {"reduction": reduction, "first_row": first_row, **options}
        there = self.in_batch(first, second, exclude, gathered=of_second, **given)
        back = self.in_batch(second, first, exclude, gathered=of_first, **given)
        return (there + back) / 2

    def contrast(
        self,
        query: Float[Tensor, "batch dim"],
        key: Float[Tensor, "batch dim"],
        negatives: Float[Tensor, "K dim"] | Float[Tensor, "batch M dim"] | MemoryQueue,
        exclude: Bool[Tensor, "batch columns"] | None = None,
        **options: Unpack[CallOptions],
    ) -> tuple[Contrast, MixPlan | None]:
        """Return the loss with the similarities behind it, and the plan, for the diagnostics."""
        call = Call(**options)
        outcome, plan = self._of_negatives(query, key, negatives, exclude, call, overwrite=False)
        if call.sample_weights is not None:
            outcome = outcome._replace(loss=_loss(outcome, "mean", call))
        return outcome, plan

    def _of_negatives(
        self,
        query: Tensor,
        key: Tensor,
        negatives: Tensor | MemoryQueue,
        exclude: Tensor | None,
        call: Call,
        overwrite: bool,
    ) -> tuple[Contrast, MixPlan | None]:
        negatives, own = shared_and_own(query, negatives, call.own_negatives)
        vectors = unit_embeddings(query, key, negatives, call.check, own, call.normalised)
        by_slots = own is None and call.positives is None and self._points().by_slots(negatives)
        num_own = 0 if own is None else own.shape[1]
        takes_part = who_takes_part(query, negatives, exclude, by_slots, num_own)
        return self._contrast(vectors, takes_part, call, overwrite, at_most=own is not None)

    def _contrast(
        self,
        vectors: Vectors,
        takes_part: TakesPart,
        call: Call,
        overwrite: bool,
        at_most: bool = False,
    ) -> tuple[Contrast, MixPlan | None]:
        """`at_most`: N is limited by the number of negatives, without an error."""
        temperature = self.temperature() if callable(self.temperature) else self.temperature
        if call.mix and isinstance(self.strategy, FeatureTransformation):
            exclude = takes_part.exclude
            vectors, exclude = self.strategy.transform(vectors, exclude, call.generator)
            takes_part = takes_part._replace(exclude=exclude)
        query, key, negatives, own = vectors
        positives = positives_of(vectors, call)
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            similarity, plan, log_weights = dots(query, negatives, own), None, None
            takes_part = filtered(self.filter_negatives, vectors, similarity, takes_part, positives)
            exclude, not_mixed, in_loss, mixed = takes_part
            if self.weights is not None:
                log_weights = self.weights(
                    similarity[:, :in_loss],
                    positive=(query * key).sum(dim=1),
                    temperature=temperature,
                    exclude=exclude,
                    num_own=0 if own is None else own.shape[1],
                )
            points = self._points().at_most(
                similarity.shape[1] if mixed is None else mixed, at_most or mixed is not None
            )
            if call.mix and points.any():
                some = vectors._replace(negatives=negatives[:mixed])
                plan, dropped = points.plan(some, similarity[:, :mixed], not_mixed, call)
                exclude = either(exclude, dropped)
        outcome = contrast(
            query,
            key,
            negatives[:in_loss],
            plan,
            temperature=temperature,
            exclude=exclude,
            similarity=similarity[:, :in_loss],
            through_query=self.through_query,
            overwrite=overwrite,
            num_pairs=self.num_pairs if points.ours else None,
            every_point=not_mixed is None and points.every_point,
            check=False,
            own=own,
            log_weights=log_weights,
            denominator=self.denominator,
            positives=positives,
        )
        return (outcome if overwrite else outcome._replace(real=similarity)), plan

    def _points(self) -> PointChoice:
        counts = self.num_hardest, self.num_pairs, self.num_with_query
        return PointChoice(*counts, self.strategy, self.real_negatives)

    def extra_repr(self) -> str:
        """Return the text that print() shows: the paper's MoCHi (N, s, s')."""
        numbers = f"{self.num_hardest}, {self.num_pairs}, {self.num_with_query}"
        given = self.temperature
        shown = f"{as_number(given):.4g}, learnt" if isinstance(given, Tensor) else given
        return f"MoCHi ({numbers}), temperature={shown}"


def _named(name: str, given: Any, table: dict[str, Any], example: str) -> Any:
    """Return the function of this name, or the one that was given."""
    if not isinstance(given, str):
        return given
    check_choice(name, given, table, f", or pass a callable like {example}")
    return table[given]


def _loss(outcome: Contrast, reduction: Reduction, call: Call) -> Tensor:
    if reduction == "mean" and call.sample_weights is None:
        return outcome.loss
    return reduced(outcome.per_query, reduction, call.sample_weights)
