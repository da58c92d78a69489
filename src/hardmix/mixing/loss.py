"""MoCHi, and the family around it, for any training loop: from raw embeddings to a loss.

loss = MochiLoss()
memory = MemoryQueue(size=16384, dim=128)
loss(query, key, memory).backward()
memory.enqueue(key)                     # after the loss: a key is never its own negative
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict, Unpack, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.mixing.checks import (
    as_number,
    check_choice,
    check_counts,
    check_mask,
    check_not_transformed,
    check_num_hardest,
    check_own,
    check_plan,
    check_plan_rows,
    check_shapes,
    check_temperature,
    wants_check,
)
from hardmix.mixing.family import (
    DENOMINATORS,
    FILTERS,
    WEIGHTS,
    Denominator,
    Formula,
    NegativeFilter,
    NegativeWeights,
    loss_of_queries,
)
from hardmix.mixing.infonce import Contrast, LogWeights, outcome_of
from hardmix.mixing.logits import Embeddings, Logits, logits_of, with_points
from hardmix.mixing.plans import MixPlan
from hardmix.mixing.queue import MemoryQueue
from hardmix.mixing.random_draws import RandomSource
from hardmix.mixing.ranking import in_one_piece
from hardmix.mixing.strategies import (
    STRATEGIES,
    Candidates,
    MixingChoice,
    Strategy,
    dropped_negatives,
)
from hardmix.mixing.transformations import FeatureTransformation
from hardmix.mixing.unit_length import unit_vectors
from hardmix.settings.named_choices import (
    DenominatorName,
    FilterName,
    RankBy,
    RealNegatives,
    Reduction,
    StrategyName,
    WeightsName,
)

Temperature = float | Tensor | Callable[[], Tensor]
"""A number, a tensor that may be learnt, or a function that returns one, such as
lambda: (-model.logit_scale).exp() for CLIP's."""


class CallOptions(TypedDict, total=False):
    """Options of every entry point of `MochiLoss`."""

    mix: bool
    """False for no points, as in the warm-up epochs (see `mixing_started`)."""
    generator: RandomSource
    """The random number generator; None uses PyTorch's default."""
    normalised: bool
    """Promise that query and key are of unit length already."""
    check: bool | None
    """Whether to refuse vectors that are zero, NaN or infinite. None checks on a CPU only, as
    checking would synchronise a GPU. Unchecked, such vectors make the loss NaN."""
    own_negatives: Float[Tensor, "batch M dim"] | None
    """Further negatives of each query's own. Masks may have K or K + M columns."""
    positives: Bool[Tensor, "batch columns"] | None
    """Negatives that are positives too (SupCon), besides the key; they are not mixed."""
    sample_weights: Float[Tensor, " batch"] | None
    """How much each query counts in the mean, which is divided by their sum, or in the sum."""
    progress: float | Float[Tensor, "..."]
    """How much of the training is done, from 0 to 1, for strategies that change with it."""


class _Call(NamedTuple):
    """The same, with their defaults."""

    mix: bool = True
    generator: RandomSource = None
    normalised: bool = False
    check: bool | None = None
    own_negatives: Tensor | None = None
    positives: Tensor | None = None
    sample_weights: Tensor | None = None
    progress: float | Tensor = 0.0


class _Evaluated(NamedTuple):
    """The loss of each query, and what it was made of."""

    per_query: Tensor
    logits: Logits
    exclude: Tensor | None
    log_weights: LogWeights


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
        strategy: StrategyName | Strategy | MixingChoice = "mochi",
        *,
        real_negatives: RealNegatives = "keep",
        through_query: bool = False,
        rank_by: RankBy | None = None,
        transformation: FeatureTransformation | None = None,
        weights: WeightsName | NegativeWeights = "none",
        denominator: DenominatorName | Denominator | Formula = "infonce",
        filter_negatives: FilterName | NegativeFilter = "none",
    ) -> None:
        """Create the loss.

        Args:
            num_hardest: N, the number of hardest negatives per query that may be mixed (Sec. 4.1).
            num_pairs: s, the number of points that mix two of them (Eq. 3).
            num_with_query: s', the number of points that mix one of them with the query (Sec. 4.2).
            temperature: tau of Eq. 1: a number, or a tensor or nn.Parameter, which gets its
                gradient, or a function that returns one: lambda: (-model.logit_scale).exp() for
                CLIP's.
            strategy: a name in STRATEGIES, or a function of `Candidates` that returns a `MixPlan`;
                it decides itself how many points it makes.
            real_negatives: whether real negatives stay in the loss next to the synthetic ones
                ("keep", as in the paper), or the N hardest ("drop_hardest") or all of them
                ("drop_all") are dropped.
            through_query: whether gradients flow through the query inside h' (in Eq. 2 they do
                not).
            rank_by: what negatives are ranked by; None means the query, unless the strategy's name
                says otherwise.
            transformation: a change of the features before they are contrasted (Zhu et al. 2021).
            weights: weights of the real negatives: a name in WEIGHTS, or a `NegativeWeights`.
            denominator: what the loss is made of its positive and its negatives: a name in
                DENOMINATORS, a `Denominator`, or a function of `Masses`.
            filter_negatives: which negatives are taken for false, and neither contrasted nor
                mixed: a name in FILTERS, or a `NegativeFilter`.
        """
        super().__init__()
        check_counts(num_hardest, num_pairs, num_with_query)
        if not callable(temperature):
            check_temperature(temperature)
        check_choice("real_negatives", real_negatives, get_args(RealNegatives))
        self.num_hardest = num_hardest
        self.num_pairs = num_pairs
        self.num_with_query = num_with_query
        self.temperature = temperature
        self.mixing = _mixing_choice(strategy, rank_by, transformation)
        self.weights: NegativeWeights | None = _member("weights", weights, WEIGHTS)
        self.filter_negatives: NegativeFilter | None = _member(
            "filter_negatives", filter_negatives, FILTERS
        )
        chosen = _member("denominator", denominator, DENOMINATORS)
        self.denominator = chosen if isinstance(chosen, Denominator) else Denominator(chosen)
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

        Args:
            query: q, of any length but 0.
            key: k, from the momentum encoder or from another tower.
            negatives: vectors that all queries share, or a `MemoryQueue`, whose unfilled slots are
                never mixed, or vectors of each query's own.
            exclude: negatives to ignore, e.g. `memory.same_class(labels)` for the class oracle.
            reduction: "none" for the loss of each query, "sum" for their sum.
            options: `mix`, `generator`, `normalised`, `check`, `own_negatives`, `positives`,
                `sample_weights`, `progress`: see `CallOptions`.
        """
        check_choice("reduction", reduction, get_args(Reduction))
        call = _call(options)
        evaluated = self._of_negatives(query, key, negatives, exclude, call, kept=False)
        return _reduced(evaluated.per_query, reduction, call)

    def contrast(
        self,
        query: Float[Tensor, "batch dim"],
        key: Float[Tensor, "batch dim"],
        negatives: Float[Tensor, "K dim"] | Float[Tensor, "batch M dim"] | MemoryQueue,
        exclude: Bool[Tensor, "batch columns"] | None = None,
        **options: Unpack[CallOptions],
    ) -> tuple[Contrast, MixPlan | None]:
        """Return the loss with the similarities behind it, and the plan, for the diagnostics."""
        call = _call(options)
        evaluated = self._of_negatives(query, key, negatives, exclude, call, kept=True)
        outcome = outcome_of(*evaluated, self.denominator.powers)
        if call.sample_weights is not None:
            outcome = outcome._replace(loss=_reduced(outcome.per_query, "mean", call))
        return outcome, outcome.plan

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

        Args:
            query: q.
            key: k, the positive of the query in the same row.
            exclude: pairs of samples that are no negatives of each other.
            reduction: "none" for the loss of each query, "sum" for their sum.
            gathered: the keys of all processes, `hardmix.gather(key, with_gradient=True)`; those of
                this process begin at row `first_row`, which is its rank times the batch size.
            first_row: see `gathered`.
            options: see `CallOptions`.
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
        call = _call(options)
        embeddings = _unit_embeddings(query, key, keys, call.own_negatives, call)
        place = torch.arange(len(query), device=query.device).unsqueeze(1) + first_row
        own_key = place == torch.arange(len(keys), device=query.device)
        exclude = _either(_widened(own_key, embeddings), _widened(exclude, embeddings))
        evaluated = self._evaluate(embeddings, exclude, call, kept=False)
        return _reduced(evaluated.per_query, reduction, call)

    def symmetric(
        self,
        first: Float[Tensor, "batch dim"],
        second: Float[Tensor, "batch dim"],
        exclude: Bool[Tensor, "batch columns"] | None = None,
        *,
        reduction: Reduction = "mean",
        gathered: tuple[Float[Tensor, "all dim"], Float[Tensor, "all dim"]] | None = None,
        first_row: int = 0,
        both_own_negatives: tuple[Tensor, Tensor] | None = None,
        **options: Unpack[CallOptions],
    ) -> Float[Tensor, "..."]:
        """Return the mean of both directions' `in_batch`, as in CLIP: first to second, and back.

        Points are mixed from the negatives' side alone.

        Args:
            first: embeddings of one modality or view.
            second: those of the other, row by row.
            exclude: pairs of samples, for both directions, like `positives`.
            reduction: see `in_batch`.
            gathered: `first` and `second` of all processes.
            first_row: see `in_batch`.
            both_own_negatives: further negatives of each row of `first`, and of each of `second`.
            options: see `CallOptions`.
        """
        if options.pop("own_negatives", None) is not None:
            raise InputError(
                "own_negatives cannot serve both directions: pass both_own_negatives, a tuple of"
                " those of `first` and those of `second`."
            )
        of_first, of_second = (None, None) if gathered is None else gathered
        own_there, own_back = (None, None) if both_own_negatives is None else both_own_negatives
        both: dict[str, Any] = {"reduction": reduction, "first_row": first_row, **options}
        there = self.in_batch(
            first, second, exclude, gathered=of_second, own_negatives=own_there, **both
        )
        back = self.in_batch(
            second, first, exclude, gathered=of_first, own_negatives=own_back, **both
        )
        return (there + back) / 2

    def _of_negatives(
        self,
        query: Tensor,
        key: Tensor,
        negatives: Tensor | MemoryQueue,
        exclude: Tensor | None,
        call: _Call,
        kept: bool,
    ) -> "_Evaluated":
        negatives, own = _shared_and_own(query, negatives, call.own_negatives)
        embeddings = _unit_embeddings(query, key, negatives, own, call)
        exclude = _widened(exclude, embeddings)
        points = self.num_pairs + self.num_with_query
        if call.mix and own is None and points > 0 and not self.mixing.checked:
            check_num_hardest(self.num_hardest, len(embeddings.negatives))
        if not isinstance(negatives, MemoryQueue):
            return self._evaluate(embeddings, exclude, call, kept=kept)
        keeps = self.real_negatives == "keep"
        if keeps and _is_shorter(negatives, own, call):  # no mask is needed, and no launch for it
            filled = negatives.filled
            if negatives.start == "random":
                return self._evaluate(embeddings, exclude, call, kept=kept, num_mixed=filled)
            if not kept:
                exclude = None if exclude is None else exclude[:, :filled]
                embeddings = embeddings._replace(negatives=embeddings.negatives[:filled])
                return self._evaluate(embeddings, exclude, call, kept=kept)
        unfilled = negatives.unfilled()
        if unfilled is not None:
            unfilled = _widened(unfilled.expand(len(query), -1), embeddings)
        if negatives.start == "empty":
            exclude, unfilled = _either(exclude, unfilled), None
        return self._evaluate(embeddings, exclude, call, kept=kept, not_mixed=unfilled)

    def _evaluate(
        self,
        embeddings: Embeddings,
        exclude: Tensor | None,
        call: _Call,
        *,
        kept: bool,
        not_mixed: Tensor | None = None,
        num_mixed: int | None = None,
    ) -> "_Evaluated":
        """Return the loss of unit vectors.

        `kept`: whether the logits are wanted afterwards; `not_mixed`: negatives that are in the
        loss, but not mixed; `num_mixed`: that only so many of the first may be mixed.
        """
        temperature = self.temperature() if callable(self.temperature) else self.temperature
        check_temperature(temperature)  # again: it may be learnt
        transformation = self.mixing.transformation
        if call.mix and transformation is not None:
            embeddings, exclude = transformation.transform(embeddings, exclude, call.generator)
        positives = _widened(call.positives, embeddings, "positives")
        with torch.autocast(embeddings.query.device.type, enabled=False):
            logits = logits_of(embeddings, temperature=temperature)
            if self.filter_negatives is not None:
                false = self._filtered(logits)
                exclude = _either(exclude, false if positives is None else false & ~positives)
            log_weights = None if self.weights is None else self._weighed(logits, exclude)
            if call.mix:
                not_mixed = _either(_either(exclude, not_mixed), positives)
                candidates = self._candidates(logits, not_mixed, num_mixed, call)
                plan = self._plan(candidates, call)
                logits = with_points(logits, plan, through_query=self.through_query)
                exclude = _either(exclude, dropped_negatives(candidates, self.real_negatives))
            per_query = loss_of_queries(
                self.denominator, logits, exclude, log_weights, positives, overwrite=not kept
            )
        return _Evaluated(per_query, logits, exclude, log_weights)

    def _candidates(
        self, logits: Logits, not_mixed: Tensor | None, num_mixed: int | None, call: _Call
    ) -> Candidates:
        """Return what the strategy may look at."""
        real, embeddings = logits.real.detach(), logits.embeddings
        if num_mixed is not None:
            real, not_mixed = real[:, :num_mixed], _first_columns(not_mixed, num_mixed)
            embeddings = embeddings._replace(negatives=embeddings.negatives[:num_mixed])
        unchecked = not wants_check(call.check, real) and not in_one_piece(real)
        if unchecked and not bool(real.sum().isfinite()):
            real = real.nan_to_num()  # ranking refuses NaN; the loss shall be NaN
        progress = call.progress
        if isinstance(progress, Tensor):
            progress = progress.reshape(())
        return Candidates(
            logits=real,
            temperature=logits.temperature,
            num_hardest=min(self.num_hardest, logits.real.shape[1]),
            num_pairs=self.num_pairs if real.shape[1] > 1 else 0,
            num_with_query=self.num_with_query,
            exclude=not_mixed,
            embeddings=embeddings,
            generator=call.generator,
            rank_by=self.mixing.rank_by,
            progress=progress,
        )

    def _plan(self, candidates: Candidates, call: _Call) -> MixPlan:
        """Return the strategy's plan; refuse one that cannot be evaluated."""
        real, embeddings = candidates.logits, candidates.embeddings
        with torch.no_grad():
            plan = self.mixing.strategy(candidates)
        if not isinstance(plan, MixPlan):
            raise InputError(
                f"the strategy returned {type(plan).__name__}: it must return a MixPlan, as"
                " hardmix.plan_mochi does."
            )
        assert embeddings is not None
        check_plan(plan, len(real), embeddings.query.shape[1])
        if self.mixing.checked and wants_check(call.check, real):
            check_plan_rows(plan, real.shape[1])
        return plan

    def _filtered(self, logits: Logits) -> Tensor:
        assert self.filter_negatives is not None
        with torch.no_grad():
            false = self.filter_negatives(logits)
        batch, columns = logits.real.shape
        if not isinstance(false, Tensor):
            raise InputError(
                f"filter_negatives returned {type(false).__name__}: it must return a bool mask of"
                f" shape ({batch}, {columns}), true for negatives to leave out."
            )
        check_mask(false, batch, columns, "the mask of filter_negatives")
        return false

    def _weighed(self, logits: Logits, exclude: Tensor | None) -> Any:
        assert self.weights is not None
        with torch.no_grad():
            return self.weights(logits, exclude)

    def extra_repr(self) -> str:
        """Return the text that print() shows: the paper's MoCHi (N, s, s')."""
        numbers = f"{self.num_hardest}, {self.num_pairs}, {self.num_with_query}"
        temperature: Any = self.temperature
        if isinstance(temperature, Tensor):
            temperature = f"{as_number(temperature):.4g}, learnt"
        return f"MoCHi ({numbers}), temperature={temperature}"


def _mixing_choice(
    strategy: str | Strategy | MixingChoice,
    rank_by: RankBy | None,
    transformation: FeatureTransformation | None,
) -> MixingChoice:
    """Return the strategy by its name, with what it ranks by and what it transforms."""
    if isinstance(strategy, str):
        check_choice("strategy", strategy, STRATEGIES, ", or pass a function of hardmix.Candidates")
        chosen = STRATEGIES[strategy]
    elif isinstance(strategy, MixingChoice):
        chosen = strategy
    elif callable(strategy):
        chosen = MixingChoice(strategy, checked=True)
    else:
        raise InputError(
            f"strategy={strategy!r} is neither a name nor a function: choose one of"
            f" {', '.join(STRATEGIES)}, or pass a function of hardmix.Candidates."
        )
    if rank_by is not None:
        check_choice("rank_by", rank_by, get_args(RankBy))
        chosen = chosen._replace(rank_by=rank_by)
    return chosen if transformation is None else chosen._replace(transformation=transformation)


def _member(name: str, chosen: Any, table: Mapping[str, Callable[..., Any]]) -> Any:
    """Return a member of the family by its name, or the callable that was passed."""
    if chosen == "none":
        return None
    more = ", or pass a callable (docs/extending.md)"
    if isinstance(chosen, str):
        names = table if name == "denominator" else ("none", *table)
        check_choice(name, chosen, names, more)
        return table[chosen]()
    if any(chosen is factory for factory in table.values()):
        raise InputError(
            f"{name}={chosen.__name__} is the factory itself: call it, {chosen.__name__}(...)."
        )
    if not callable(chosen) and not isinstance(chosen, Denominator):
        raise InputError(
            f"{name}={chosen!r} is neither a name nor a function: choose one of"
            f" {', '.join(table)}{more}."
        )
    return chosen


def _call(options: Mapping[str, Any]) -> _Call:
    """Return the options of a call with their defaults; refuse unknown ones."""
    for name in options:
        check_choice("option", name, _Call._fields)
    return _Call(**options)


def _unit_embeddings(
    query: Tensor,
    key: Tensor,
    negatives: Tensor | MemoryQueue,
    own: Tensor | None,
    call: _Call,
) -> Embeddings:
    """Return all vectors at unit length in one dtype, float32 or better."""
    check_not_transformed()
    vectors = negatives.keys if isinstance(negatives, MemoryQueue) else negatives
    check_own(own, query)
    check_shapes(query, key, vectors, may_be_empty=own is not None)
    dtype = torch.promote_types(torch.promote_types(query.dtype, vectors.dtype), torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        if call.normalised:
            unit_query, unit_key = query.to(dtype), key.to(dtype)
        else:
            unit_query = unit_vectors("query", query, dtype, call.check)
            unit_key = unit_vectors("key", key, dtype, call.check)
        if isinstance(negatives, MemoryQueue):
            vectors = vectors.to(dtype)
        elif negatives is key:
            vectors = unit_key
        else:
            vectors = unit_vectors("negatives", vectors, dtype, call.check)
        if own is not None:
            rows = unit_vectors("own_negatives", own.flatten(0, 1), dtype, call.check)
            own = rows.view_as(own)
    return Embeddings(unit_query, unit_key, vectors, own)


def _shared_and_own(
    query: Tensor, negatives: Tensor | MemoryQueue, own: Tensor | None
) -> tuple[Tensor | MemoryQueue, Tensor | None]:
    """Return the shared negatives, and those of each query's own: `negatives` may be either."""
    if isinstance(negatives, MemoryQueue) or negatives.ndim != 3:
        return negatives, own
    if own is not None:
        raise InputError(
            f"negatives of shape {tuple(negatives.shape)} are each query's own, and own_negatives"
            " are given as well: concatenate the two, or pass shared negatives of shape (K, dim)."
        )
    check_own(negatives, query, "negatives")
    return query.new_empty(0, query.shape[-1]), negatives


def _widened(
    mask: Tensor | None, embeddings: Embeddings, name: str = "exclude"
) -> Bool[Tensor, "batch columns"] | None:
    """Return a mask with columns for the query's own negatives, too: False if it has none."""
    batch, shared = len(embeddings.query), len(embeddings.negatives)
    num_own = embeddings.num_own
    if mask is None or num_own == 0 or mask.shape[-1] != shared:
        check_mask(mask, batch, shared + num_own, name)
        return mask
    check_mask(mask, batch, shared, name)
    return torch.cat([mask, mask.new_zeros(batch, num_own)], dim=1)


def _is_shorter(queue: MemoryQueue, own: Tensor | None, call: _Call) -> bool:
    """Return whether a queue is not full, and simply a shorter one for this call.

    In `torch.compile` every fill shall be one graph.
    """
    if torch.compiler.is_compiling() or own is not None or call.positives is not None:
        return False
    return 2 <= queue.filled < len(queue)


def _first_columns(mask: Tensor | None, number: int) -> Tensor | None:
    return None if mask is None else mask[:, :number]


def _either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the mask of both."""
    if first is None or second is None:
        return second if first is None else first
    return first | second


def _reduced(per_query: Tensor, reduction: Reduction, call: _Call) -> Tensor:
    """Return the mean or the sum of the queries' losses, or these themselves."""
    weights = call.sample_weights
    if weights is not None:
        if tuple(weights.shape) != tuple(per_query.shape):
            raise InputError(
                f"sample_weights have shape {tuple(weights.shape)}: they must hold one"
                f" number for each of the {len(per_query)} queries."
            )
        per_query = per_query * weights
    if reduction == "none":
        return per_query
    if reduction == "sum":
        return per_query.sum()
    return per_query.mean() if weights is None else per_query.sum() / weights.sum()
