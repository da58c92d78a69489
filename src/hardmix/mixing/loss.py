"""MoCHi, and the family around it, for any training loop: from raw embeddings to a loss.

loss = MochiLoss()
memory = MemoryQueue(size=16384, dim=128)
loss(query, key, memory).backward()
memory.enqueue(key)                     # after the loss: a key is never its own negative
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.mixing.checks import (
    as_number,
    check_counts,
    check_labels,
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
from hardmix.mixing.diagnostics import synthetic_mass
from hardmix.mixing.family import (
    DENOMINATORS,
    FILTERS,
    WEIGHTS,
    Denominator,
    Formula,
    NegativeFilter,
    NegativeWeights,
    check_family,
    logq_weights,
    loss_of_queries,
)
from hardmix.mixing.infonce import Contrast, LogWeights, outcome_of
from hardmix.mixing.logits import Embeddings, Logits, logits_of, with_points
from hardmix.mixing.plans import MixPlan
from hardmix.mixing.queue import MemoryQueue, equal_and_known
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
from hardmix.settings.facts import check_choice
from hardmix.settings.named_choices import (
    DenominatorName,
    FilterName,
    RankBy,
    RealNegatives,
    Reduction,
    SameLabel,
    StrategyName,
    WeightsName,
)
from hardmix.settings.small_html import facts_html

TOO_MUCH_MASS = 0.8
"""Share of the softmax that points may hold without a warning."""

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
    labels: Int[Tensor, " batch"] | None
    """The class of each query, or -1. Negatives of its class are positives too, as in SupCon, or
    left out (see `same_label`)."""
    same_label: SameLabel
    """"positives" (SupCon) or "exclude" (the class oracle of Sec. 3.3)."""
    ids: Int[Tensor, " batch"] | None
    """An id of each query: of its image, item, user or document, or -1. Negatives with the same id
    are left out: they are not negatives of the query, and not positives either."""
    negative_labels: Int[Tensor, " K"] | None
    """Classes of the shared negatives, unless these are a `MemoryQueue`, which knows its own."""
    negative_ids: Int[Tensor, " K"] | None
    """The same for ids."""
    positives: Bool[Tensor, "batch columns"] | None
    """Negatives that are positives too (SupCon), besides the key; they are not mixed."""
    sample_weights: Float[Tensor, " batch"] | None
    """The weight of each query in the mean, which is divided by the weights' sum, or in the sum."""
    progress: float | Float[Tensor, "..."]
    """The share of the training that is done, from 0 to 1, for strategies that change with it."""


class _Call(NamedTuple):
    """The same, with their defaults."""

    mix: bool = True
    generator: RandomSource = None
    normalised: bool = False
    check: bool | None = None
    own_negatives: Tensor | None = None
    labels: Tensor | None = None
    same_label: SameLabel = "positives"
    ids: Tensor | None = None
    negative_labels: Tensor | None = None
    negative_ids: Tensor | None = None
    positives: Tensor | None = None
    sample_weights: Tensor | None = None
    progress: float | Tensor = 0.0


_OPTIONS = frozenset(_Call._fields)


class _Evaluated(NamedTuple):
    """The loss of each query, and what it was made of."""

    per_query: Tensor
    logits: Logits
    exclude: Tensor | None
    log_weights: LogWeights
    counts: Tensor | None = None
    """Mask of the queries that have a positive and count in the mean; None for all."""


class MochiLoss(nn.Module):
    """Sec. 4: InfoNCE with mixed hard negatives, MoCHi (N, s, s'). s = s' = 0 is plain MoCo.

    Inputs are normalised, and everything is computed in float32 or better, also inside autocast.
    The defaults are the paper's best setting on ImageNet-100 (Table 1). `strategy`, `weights`,
    `denominator` and `filter_negatives` choose other members of the family, in any combination.
    """

    def __init__(
        self,
        num_hardest: int | Literal["sixteenth"] = 1024,
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
            num_hardest: N, the number of hardest negatives per query that may be mixed (Sec. 4.1);
                "sixteenth" for that share of all, as the paper's 1024 of 16384.
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
            denominator: how the loss follows from its positive and its negatives: a name in
                DENOMINATORS, a `Denominator`, or a function of `Masses`.
            filter_negatives: which negatives are taken for false, and neither contrasted nor
                mixed: a name in FILTERS, or a `NegativeFilter`.
        """
        super().__init__()
        check_counts(2 if num_hardest == "sixteenth" else num_hardest, num_pairs, num_with_query)
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
        self._calls, self._has_warned = 0, False
        choices = {
            "strategy": strategy,
            "real_negatives": real_negatives,
            "weights": weights,
            "denominator": denominator,
            "filter_negatives": filter_negatives,
        }
        self._chosen = {
            name: choice if isinstance(choice, str) else _name_of(choice)
            for name, choice in choices.items()
            if choice not in ("mochi", "keep", "none", "infonce")
        }

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
            options: `labels`, `ids`, `mix`, `generator` and others: see `CallOptions`.
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
        return self._outcome(evaluated, call)

    def in_batch(
        self,
        query: Float[Tensor, "batch dim"],
        key: Float[Tensor, "batch dim"] | None = None,
        exclude: Bool[Tensor, "batch columns"] | None = None,
        *,
        reduction: Reduction = "mean",
        gathered: Float[Tensor, "all dim"] | None = None,
        first_row: int = 0,
        **options: Unpack[CallOptions],
    ) -> Float[Tensor, "..."]:
        """Return the mean loss with the other samples' keys as negatives, as in SimCLR: no queue.

        Keys receive gradients too, as positives and as real negatives. N is at most the batch size.
        `in_batch(embeddings, labels=labels)` is SupCon (Khosla et al. 2020): every sample is
        contrasted with all others, those of its class are its positives, and samples without a
        positive do not count in the mean.

        Args:
            query: q.
            key: k, the positive of the query in the same row. None, or `query` itself, if the
                samples are contrasted with each other; `labels` then say which are positives.
            exclude: pairs of samples that are not negatives of each other.
            reduction: "none" for the loss of each query, "sum" for their sum.
            gathered: the keys of all processes, `hardmix.gather(key, with_gradient=True)`; those of
                this process begin at row `first_row`, which is its rank times the batch size.
                `negative_labels` and `negative_ids` are then gathered, too.
            first_row: see `gathered`.
            options: see `CallOptions`.
        """
        check_choice("reduction", reduction, get_args(Reduction))
        call = _call(options)
        evaluated = self._of_batch(query, key, exclude, gathered, first_row, call, kept=False)
        return _reduced(evaluated.per_query, reduction, call, evaluated.counts)

    def contrast_in_batch(
        self,
        query: Float[Tensor, "batch dim"],
        key: Float[Tensor, "batch dim"] | None = None,
        exclude: Bool[Tensor, "batch columns"] | None = None,
        *,
        gathered: Float[Tensor, "all dim"] | None = None,
        first_row: int = 0,
        **options: Unpack[CallOptions],
    ) -> tuple[Contrast, MixPlan | None]:
        """Return `in_batch` with the similarities behind it, and the plan, for the diagnostics."""
        call = _call(options)
        evaluated = self._of_batch(query, key, exclude, gathered, first_row, call, kept=True)
        return self._outcome(evaluated, call)

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
        call = _with_labels_of(negatives, call)
        embeddings = _unit_embeddings(query, key, negatives, own, call)
        exclude, positives = _masks(embeddings, exclude, call)
        points = self.num_pairs + self.num_with_query
        counted = own is None and points > 0 and not self.mixing.checked
        if call.mix and counted and self.num_hardest != "sixteenth":
            check_num_hardest(self.num_hardest, len(embeddings.negatives))
        if not isinstance(negatives, MemoryQueue):
            return self._evaluate(embeddings, exclude, positives, call, kept=kept)
        keeps = self.real_negatives == "keep" and positives is None
        if keeps and _is_shorter(negatives, own):  # no mask is needed, and no launch for it
            filled = negatives.filled
            if negatives.start == "random":
                return self._evaluate(embeddings, exclude, None, call, kept=kept, num_mixed=filled)
            if not kept:
                exclude = None if exclude is None else exclude[:, :filled]
                embeddings = _first_negatives(embeddings, filled)
                return self._evaluate(embeddings, exclude, None, call, kept=kept)
        unfilled = negatives.unfilled()
        if unfilled is not None:
            unfilled = _widened(unfilled.expand(len(query), -1), embeddings)
        if negatives.start == "empty":
            exclude, unfilled = _either(exclude, unfilled), None
        return self._evaluate(embeddings, exclude, positives, call, kept=kept, not_mixed=unfilled)

    def _of_batch(
        self,
        query: Tensor,
        key: Tensor | None,
        exclude: Tensor | None,
        gathered: Tensor | None,
        first_row: int,
        call: _Call,
        kept: bool,
    ) -> "_Evaluated":
        alone = key is None or key is query
        if key is None and call.labels is None and call.positives is None:
            raise InputError(
                "in_batch of one view needs labels=..., which say what its positives are; with two"
                " views pass both: in_batch(query, key)."
            )
        key = query if key is None else key
        keys = key if gathered is None else gathered
        _check_batch(query, keys, gathered, first_row)
        if gathered is None:
            call = call._replace(negative_labels=call.labels, negative_ids=call.ids)
        embeddings = _unit_embeddings(query, key, keys, call.own_negatives, call)
        place = torch.arange(len(query), device=query.device).unsqueeze(1) + first_row
        itself = _widened(place == torch.arange(len(keys), device=query.device), embeddings)
        exclude, positives = _masks(embeddings, exclude, call)
        exclude = _either(itself, exclude)
        counts = None
        if alone and (positives is not None or call.labels is not None):
            embeddings, exclude, positives, counts = _one_as_key(embeddings, exclude, positives)
        evaluated = self._evaluate(embeddings, exclude, positives, call, kept=kept)
        if counts is None:
            return evaluated
        per_query = torch.where(counts, evaluated.per_query, 0.0)
        return evaluated._replace(per_query=per_query, counts=counts)

    def _outcome(self, evaluated: _Evaluated, call: _Call) -> tuple[Contrast, MixPlan | None]:
        """Return what the public functions return for the diagnostics."""
        per_query, logits, exclude, log_weights, counts = evaluated
        outcome = outcome_of(per_query, logits, exclude, log_weights, self.denominator.powers)
        if call.sample_weights is not None or counts is not None:
            outcome = outcome._replace(loss=_reduced(per_query, "mean", call, counts))
        return outcome, outcome.plan

    def _evaluate(
        self,
        embeddings: Embeddings,
        exclude: Tensor | None,
        positives: Tensor | None,
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
        with torch.autocast(embeddings.query.device.type, enabled=False):
            logits = logits_of(embeddings, temperature=temperature)
            if call.negative_ids is not None:
                logits = logits._replace(ids=call.negative_ids[: len(embeddings.negatives)])
            if self.filter_negatives is not None:
                false = self._filtered(logits)
                exclude = _either(exclude, false if positives is None else false & ~positives)
            log_weights = None if self.weights is None else self._weighed(logits, exclude)
            if call.mix:
                not_mixed = _either(_either(exclude, not_mixed), positives)
                candidates = self._candidates(logits, not_mixed, num_mixed, call)
                plan = self._plan(candidates, call)
                logits = with_points(logits, plan, through_query=self.through_query)
                if self.real_negatives != "keep":
                    exclude = _either(exclude, dropped_negatives(candidates, self.real_negatives))
                self._warn_if_points_dominate(logits, exclude, log_weights, call)
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
            real = real[:, :num_mixed]
            not_mixed = None if not_mixed is None else not_mixed[:, :num_mixed]
            embeddings = _first_negatives(embeddings, num_mixed)
        unchecked = not wants_check(call.check, real) and not in_one_piece(real)
        if unchecked and not bool(real.sum().isfinite()):
            real = real.nan_to_num()  # ranking would refuse NaN, but the loss is NaN
        progress = call.progress
        if isinstance(progress, Tensor):
            progress = progress.reshape(())
        return Candidates(
            logits=real,
            temperature=logits.temperature,
            num_hardest=self._number_of_hardest(logits.real.shape[1]),
            num_pairs=self.num_pairs if real.shape[1] > 1 else 0,
            num_with_query=self.num_with_query,
            exclude=not_mixed,
            embeddings=embeddings,
            generator=call.generator,
            rank_by=self.mixing.rank_by,
            progress=progress,
            check=False,
        )

    def _number_of_hardest(self, columns: int) -> int:
        """Return N: at most all negatives, and at least a pair."""
        if self.num_hardest == "sixteenth":
            return max(2, columns // 16)
        return min(self.num_hardest, columns)

    def _warn_if_points_dominate(
        self, logits: Logits, exclude: Tensor | None, log_weights: LogWeights, call: _Call
    ) -> None:
        """Warn once if points hold nearly all of the denominator; look at calls 1, 10, 100 ..."""
        if self._has_warned or logits.plan is None or not wants_check(call.check, logits.real):
            return
        self._calls += 1
        if str(self._calls).rstrip("0") != "1":
            return
        copy = logits._replace(real=logits.real.detach().clone())
        powers = self.denominator.powers
        outcome = outcome_of(logits.positive.detach(), copy, exclude, log_weights, powers)
        share = float(synthetic_mass(outcome))
        if share > TOO_MUCH_MASS:
            self._has_warned = True
            warnings.warn(
                f"synthetic points hold {share:.0%} of the softmax, so that real negatives hardly"
                f" count: lower num_pairs={self.num_pairs} and"
                f" num_with_query={self.num_with_query}, or raise the temperature.",
                stacklevel=2,
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
        if self.mixing.checked:
            assert embeddings is not None
            check_plan(plan, len(real), embeddings.query.shape[1])
            if wants_check(call.check, real):
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
            log_weights = self.weights(logits, exclude)
        check_family(self.denominator, log_weights, None, logits.real)  # before they are read
        return log_weights

    def extra_repr(self) -> str:
        """Return the text that print() shows: the paper's MoCHi (N, s, s'), and other choices."""
        method, *others = self._shown().items()
        return ", ".join([method[1], *(f"{name}={value}" for name, value in others)])

    def _repr_html_(self) -> str:
        return facts_html(type(self).__name__, self._shown())

    def _shown(self) -> dict[str, str]:
        numbers = f"{self.num_hardest}, {self.num_pairs}, {self.num_with_query}"
        temperature: Any = self.temperature
        if isinstance(temperature, Tensor):
            temperature = f"{as_number(temperature):.4g}, learnt"
        return {"method": f"MoCHi ({numbers})", "temperature": str(temperature), **self._chosen}


def _name_of(choice: object) -> str:
    return str(getattr(choice, "__name__", type(choice).__name__))


def _mixing_choice(
    strategy: str | Strategy | MixingChoice,
    rank_by: RankBy | None,
    transformation: FeatureTransformation | None,
) -> MixingChoice:
    """Return the strategy by its name, with what it ranks by and what it transforms."""
    if isinstance(strategy, str):
        check_choice(
            "strategy",
            strategy,
            STRATEGIES,
            ", or pass a function of hardmix.strategies.Candidates",
        )
        chosen = STRATEGIES[strategy]
    elif isinstance(strategy, MixingChoice):
        chosen = strategy
    elif callable(strategy):
        chosen = MixingChoice(strategy, checked=True)
    else:
        raise InputError(
            f"strategy={strategy!r} is neither a name nor a function: choose one of"
            f" {', '.join(STRATEGIES)}, or pass a function of hardmix.strategies.Candidates."
        )
    if rank_by is not None:
        check_choice("rank_by", rank_by, get_args(RankBy))
        chosen = chosen._replace(rank_by=rank_by)
    return chosen if transformation is None else chosen._replace(transformation=transformation)


def _member(name: str, chosen: Any, table: Mapping[str, Callable[..., Any]]) -> Any:
    """Return a member of the family by its name, or the callable that was passed."""
    if chosen == "none":
        return None
    more = ", or pass a callable"
    if isinstance(chosen, str):
        names = table if name == "denominator" else ("none", *table)
        check_choice(name, chosen, names, more)
        return table[chosen]()
    if any(chosen is factory for factory in (*table.values(), logq_weights)):
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
    if not _OPTIONS.issuperset(options):
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
    if own is not None:
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
    if mask is None:
        return None
    batch, shared = len(embeddings.query), len(embeddings.negatives)
    num_own = embeddings.num_own
    if num_own == 0 or mask.shape[-1] != shared:
        check_mask(mask, batch, shared + num_own, name)
        return mask
    check_mask(mask, batch, shared, name)
    return torch.cat([mask, mask.new_zeros(batch, num_own)], dim=1)


def _is_shorter(queue: MemoryQueue, own: Tensor | None) -> bool:
    """Return whether a queue is not full, and can be treated as a shorter one in this call.

    In `torch.compile` it cannot, so that one graph serves every fill.
    """
    if torch.compiler.is_compiling() or own is not None:
        return False
    return 2 <= queue.filled < len(queue)


def _first_negatives(embeddings: Embeddings, number: int) -> Embeddings:
    """Return the vectors with the first of the shared negatives alone."""
    return embeddings._replace(negatives=embeddings.negatives[:number])


def _with_labels_of(negatives: Tensor | MemoryQueue, call: _Call) -> _Call:
    """Return the options with the labels and ids of a queue; refuse a queue without them."""
    if not isinstance(negatives, MemoryQueue):
        return call
    stored = {"labels": negatives.labels, "ids": negatives.ids}
    for name, values in stored.items():
        if getattr(call, f"negative_{name}") is not None:
            raise InputError(
                f"negative_{name} with a MemoryQueue: it knows its own; pass them to"
                f" memory.enqueue(keys, {name}=...) instead."
            )
        asked = getattr(call, name) is not None and negatives.filled > 0
        if asked and wants_check(call.check, values) and not bool((values >= 0).any()):
            raise InputError(
                f"{name}=... with a queue that holds none: memory.enqueue(keys, {name}={name})"
                " stores them beside the keys."
            )
    return call._replace(negative_labels=negatives.labels, negative_ids=negatives.ids)


def _masks(
    embeddings: Embeddings, exclude: Tensor | None, call: _Call
) -> tuple[Tensor | None, Tensor | None]:
    """Return the masks of negatives to leave out and of further positives, from labels and ids."""
    exclude = _widened(exclude, embeddings)
    positives = _widened(call.positives, embeddings, "positives")
    if call.labels is not None:
        check_choice("same_label", call.same_label, get_args(SameLabel))
        same = _equal("labels", call.labels, call.negative_labels, embeddings)
        if call.same_label == "exclude":
            exclude = _either(exclude, same)
        else:
            positives = _either(positives, same)
    if call.ids is not None:
        exclude = _either(exclude, _equal("ids", call.ids, call.negative_ids, embeddings))
    return exclude, positives


def _equal(
    name: str, values: Tensor, of_negatives: Tensor | None, embeddings: Embeddings
) -> Tensor | None:
    """Return where a negative has the query's label, or id."""
    check_labels(name, values, len(embeddings.query))
    if of_negatives is None:
        raise InputError(
            f"{name}=... without those of the negatives: pass negative_{name}, one for each"
            " negative, or a MemoryQueue, which stores them."
        )
    check_labels(f"negative_{name}", of_negatives, len(embeddings.negatives), of="negatives")
    return _widened(equal_and_known(values, of_negatives), embeddings)


def _one_as_key(
    embeddings: Embeddings, exclude: Tensor | None, positives: Tensor | None
) -> tuple[Embeddings, Tensor | None, Tensor | None, Tensor]:
    """Return the first positive of every query as its key, and whether it has one.

    The sum of Eq. 1 and the mean over the positives are then SupCon's: over all other samples.
    """
    if positives is None:
        raise InputError(
            'same_label="exclude" without keys: the other samples of a class are the only'
            ' positives there are; pass keys, or same_label="positives".'
        )
    if exclude is not None:
        positives = positives & ~exclude
    column = torch.arange(positives.shape[1], device=positives.device)
    number = len(embeddings.negatives)
    first = torch.where(positives, column, number).amin(dim=1)
    key = embeddings.negatives[first.clamp(max=number - 1)]
    chosen = column == first.unsqueeze(1)
    embeddings = embeddings._replace(key=key)
    return embeddings, _either(exclude, chosen), positives & ~chosen, first < number


def _check_batch(query: Tensor, keys: Tensor, gathered: Tensor | None, first_row: int) -> None:
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


def _either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the mask of both."""
    if first is None or second is None:
        return second if first is None else first
    return first | second


def _reduced(
    per_query: Tensor, reduction: Reduction, call: _Call, counts: Tensor | None = None
) -> Tensor:
    """Return the mean or the sum of the queries' losses, or these themselves.

    `counts`: which queries count in the mean; the losses of the others are 0.
    """
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
    if counts is not None:
        weights = counts.to(per_query.dtype) * (1.0 if weights is None else weights)
        return per_query.sum() / weights.sum().clamp(min=torch.finfo(per_query.dtype).tiny)
    return per_query.mean() if weights is None else per_query.sum() / weights.sum()
