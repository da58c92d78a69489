"""Strategies: the paper's method, its variants (App. B.2), and the points of SynCo and MixCSE.

A strategy is a function that looks at a batch (`Candidates`) and returns a `MixPlan`. The paper
found none of its variants better: they reproduce its ablations and serve as examples. A new
strategy is one function here and one line in `STRATEGIES`, or any callable passed to `MochiLoss`.

SynCo (Giakoumoglou and Stathaki 2024) has six kinds of points; all are entries of a plan,
point = normalize((1 - share) n + share partner):

    1 interpolated   with the query, share in (0, 0.5)         MoCHi's h' (Sec. 4.2)
    2 extrapolated   q + b (n - q), b in (1, 1.5)              with the query, share 1 - b
    3 pairs          of two negatives                          MoCHi's h (Eq. 3)
    4 noisy          n + sigma e, e normally distributed       with the vector e
    5 perturbed      n + delta q                               with the query
    6 adversarial    n + eta sign(q)                           with the vector sign(q)
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hardmix.errors import InputError
from hardmix.mixing.checks import (
    check_counts,
    check_mask,
    check_not_transformed,
    check_similarity,
    check_temperature,
    check_whole,
)
from hardmix.mixing.logits import Embeddings, dots, logits_of
from hardmix.mixing.plans import (
    KEY,
    NO_POINT,
    QUERY,
    VECTOR,
    HardestNegatives,
    MixPlan,
    join,
    mix,
    ranked,
)
from hardmix.mixing.random_draws import RandomSource, open_interval, uniform_numbers
from hardmix.mixing.transformations import FeatureTransformation
from hardmix.settings.facts import check_choice
from hardmix.settings.named_choices import RankBy, RealNegatives


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """A batch of queries and the negatives that a strategy may mix."""

    logits: Float[Tensor, "batch K"]
    """q.n / temperature for every query and negative; `similarity` is q.n itself."""
    temperature: float | Float[Tensor, "..."] = 1.0
    """The temperature of `logits`."""
    num_hardest: int
    """N: how many of a query's hardest negatives may be mixed."""
    num_pairs: int
    """s: how many points mix two of them."""
    num_with_query: int
    """s': how many points mix one of them with the query."""
    exclude: Bool[Tensor, "batch K"] | None = None
    """Negatives that must not be mixed."""
    embeddings: Embeddings | None = None
    """The vectors behind the similarities, with each query's own negatives if there are any."""
    generator: RandomSource = None
    """The source of random numbers; see `uniform`."""
    rank_by: RankBy = "query"
    """Whether negatives are ranked by their similarity to the query (Sec. 4.1) or to its key
    (App. B.2)."""
    progress: float | Float[Tensor, ""] = 0.0
    """The share of the training that is done, from 0 to 1: for curricula."""
    check: bool = True
    """Whether to check the fields; `MochiLoss` has checked what it passes."""
    _ranked: list[HardestNegatives] = field(default_factory=list, init=False, repr=False)
    """`hardest`, once asked for: torch.compile does not support cached_property in Python 3.11."""

    def __post_init__(self) -> None:
        if not self.check:
            return
        check_not_transformed()
        check_similarity(self.logits, "logits")
        check_counts(self.num_hardest, self.num_pairs, self.num_with_query)
        check_mask(self.exclude, *self.logits.shape)
        if self.embeddings is not None:
            check_columns(self.logits, self.embeddings)

    @property
    def similarity(self) -> Float[Tensor, "batch K"]:
        """q.n, detached."""
        return (self.logits * self.temperature).detach()

    @property
    def hardest(self) -> HardestNegatives:
        """The N hardest negatives of each query (Sec. 4.1), or all, if there are fewer."""
        if not self._ranked:
            number = min(self.num_hardest, self.logits.shape[1])
            self._ranked.append(ranked(self.ranking, number, self.exclude))
        return self._ranked[0]

    @property
    def ranking(self) -> Float[Tensor, "batch K"]:
        """The values that negatives are ranked by: q.n / temperature, or k.n with rank_by="key"."""
        if self.rank_by == "query":
            return self.logits.detach()
        embeddings = self.needed_embeddings('rank_by="key"')
        with torch.no_grad():
            key_similarity = dots(embeddings.key, embeddings.negatives, embeddings.own)
        return key_similarity.to(self.logits.dtype)

    def uniform(self, columns: int) -> Float[Tensor, "batch columns"]:
        """Return uniform numbers in [0, 1) for every query, different in every call."""
        return uniform_numbers(self.logits, columns, self.generator)

    def needed_embeddings(self, strategy: str) -> Embeddings:
        """Return the embeddings; refuse to continue without them."""
        if self.embeddings is None:
            raise InputError(
                f"embeddings=None: {strategy} needs the vectors themselves; pass"
                " embeddings=Embeddings(query, key, negatives)."
            )
        return self.embeddings


def check_columns(logits: Float[Tensor, "batch K"], embeddings: Embeddings) -> None:
    """Refuse logits that are not those of these vectors."""
    columns = len(embeddings.negatives) + embeddings.num_own
    if tuple(logits.shape) != (len(embeddings.query), columns):
        raise InputError(
            f"logits has shape {tuple(logits.shape)}: with these embeddings it must be"
            f" ({len(embeddings.query)}, {columns}), one number for each query and negative."
        )


@runtime_checkable
class Strategy(Protocol):
    """The signature of a strategy: any such callable may be passed in place of a name."""

    def __call__(self, candidates: Candidates) -> MixPlan:
        """Return a plan for every query of the batch."""


def plan_points(candidates: Candidates) -> MixPlan:
    """Sec. 4: MoCHi's plan, s pair points and then s' points mixed with the query."""
    num_pairs, num_with_query = candidates.num_pairs, candidates.num_with_query
    if num_pairs == num_with_query == 0:
        return plan_nothing(candidates)
    like, generator = candidates.logits, candidates.generator
    return mix(candidates.hardest, num_pairs, num_with_query, like, generator)


def plan_mixed_with_key(candidates: Candidates) -> MixPlan:
    """App. B.2: mix negatives with the key, not the query (h''). Paper: about 0.1-0.2 % lower."""
    plan = plan_points(candidates)
    return plan._replace(partner=plan.partner.masked_fill(plan.partner == QUERY, KEY))


Weighing = Literal["beta", "one-minus-beta", "log-beta"]


def plan_beta_weighted(candidates: Candidates, *, weighing: Weighing = "beta") -> MixPlan:
    """App. B.2: weight points mixed with the query by the query's share, beta.

    "beta" multiplies the logit by beta, as the paper states. "one-minus-beta" multiplies it by
    1 - beta, as the paper's reason ("how negative this point is") suggests. "log-beta" multiplies
    the point's term in Eq. 1 by beta.
    """
    check_choice("weighing", weighing, get_args(Weighing))
    plan = plan_points(candidates)
    factor = 1 - plan.share if weighing == "one-minus-beta" else plan.share
    factor = torch.where(plan.partner == QUERY, factor, 1.0)
    return plan._replace(weight=factor) if weighing == "log-beta" else plan._replace(scale=factor)


def plan_softmax_sampled(candidates: Candidates, *, sampling_temperature: float = 0.2) -> MixPlan:
    """App. B.2: draw parents by softmax(q.n / tau') over the N hardest. Paper: 10-30 % lower.

    `sampling_temperature` is tau'. The paper gives no value; 0.2 is the temperature of the loss.
    """
    check_temperature(sampling_temperature, "sampling_temperature")
    hardest = candidates.hardest
    # The differences of cumulative probabilities are needed: float64.
    logits = _hardest_similarities(candidates).double() / sampling_temperature
    cumulative, count = cumulative_softmax(logits), hardest.count.unsqueeze(1)
    num_pairs, num_with_query = candidates.num_pairs, candidates.num_with_query

    # Lists of widths: split(0) would give one part.
    first, second, alpha = candidates.uniform(3 * num_pairs).split([num_pairs] * 3, dim=1)
    i = invert(cumulative, first.double(), count)
    j = invert_without(logits, second.double(), i, count)
    base = hardest.positions.gather(1, i).masked_fill(count < 2, NO_POINT)
    partner = hardest.positions.gather(1, j).clamp(min=0)
    pairs = MixPlan(base, partner, 1 - open_interval(alpha, 1.0))

    which, beta = candidates.uniform(2 * num_with_query).split([num_with_query] * 2, dim=1)
    base = hardest.positions.gather(1, invert(cumulative, which.double(), count))
    return join(pairs, MixPlan(base, torch.full_like(base, QUERY), open_interval(beta, 0.5)))


def plan_fixed_percentage(
    candidates: Candidates, *, percentage: float = 50.0, percentage_end: float | None = None
) -> MixPlan:
    """App. B.2: add points until X % of the top N logits are synthetic, alternating the two kinds.

    s and s' limit the number of points of each kind. X changes linearly from `percentage` to
    `percentage_end` over training, which the paper leaves as future work; None keeps it constant.
    """
    for name, value in {"percentage": percentage, "percentage_end": percentage_end}.items():
        if value is not None and not 0 <= value <= 100:
            raise InputError(
                f"{name}={value} is not between 0 and 100: it is the share of the top N."
            )
    share: float | Tensor = percentage
    if percentage_end is not None:
        share = percentage + (percentage_end - percentage) * candidates.progress
    embeddings = candidates.needed_embeddings("the strategy 'fixed-percentage'")
    hardest, like = candidates.hardest, candidates.logits
    num_hardest, plan = candidates.num_hardest, plan_points(candidates)
    with torch.no_grad():
        points = logits_of(embeddings, plan, temperature=1.0).synthetic.to(like.dtype)
        real = _hardest_similarities(candidates)
    turn = _alternating(candidates.num_pairs, candidates.num_with_query, like.device)
    target, number = -(-num_hardest * share // 100), min(num_hardest, real.shape[1] + len(turn))
    # Few enough points: the count of synthetic ones among the top N never falls when one is added.
    low, high = torch.zeros_like(hardest.count), torch.full_like(hardest.count, len(turn))
    for _ in range(len(turn).bit_length()):
        middle = (low + high) // 2
        shown = points.masked_fill(turn >= middle.unsqueeze(1), -torch.inf)
        top = torch.cat([real, shown], dim=1).topk(number, dim=1)
        synthetic = ((top.indices >= real.shape[1]) & (top.values > -torch.inf)).sum(dim=1)
        enough = synthetic >= target
        low, high = (
            torch.where(enough, low, middle + 1).minimum(high),
            torch.where(enough, middle, high),
        )
    return plan._replace(base=plan.base.masked_fill(turn >= high.unsqueeze(1), NO_POINT))


def plan_synco(
    candidates: Candidates,
    *,
    num_extrapolated: int = 256,
    num_noisy: int = 64,
    num_perturbed: int = 64,
    num_adversarial: int = 64,
    sigma: float = 0.01,
    delta: float = 0.01,
    eta: float = 0.01,
) -> MixPlan:
    """Giakoumoglou and Stathaki 2024: six kinds of points. Published: N = 1024, 256 x 3, 64 x 3.

    num_with_query is their kind 1, num_pairs their kind 3 (both 256); any count may be 0. In the
    authors' code a pair may mix a negative with itself (here it never does), and the switches of
    kinds 4 and 5 are swapped (here each has its own count). Columns: pairs, interpolated,
    extrapolated, perturbed, adversarial, noisy.
    """
    counts = {
        "num_extrapolated": num_extrapolated,
        "num_perturbed": num_perturbed,
        "num_adversarial": num_adversarial,
        "num_noisy": num_noisy,
    }
    _check_synco(counts, {"sigma": sigma, "delta": delta, "eta": eta})
    plan = plan_points(candidates)
    number = sum(counts.values())
    if number == 0:
        return plan
    which, uniform = candidates.uniform(2 * number).split(number, dim=1)
    base = _drawn_negatives(candidates.hardest, which)
    widths = list(counts.values())
    shares = [
        -0.5 * uniform[:, :num_extrapolated].clamp(min=torch.finfo(uniform.dtype).eps),
        *(
            torch.full_like(uniform[:, :width], strength / (1 + strength))
            for width, strength in zip(widths[1:], (delta, eta, sigma), strict=True)
        ),
    ]
    signs = int(num_adversarial > 0)
    partner = torch.full_like(base, QUERY)
    partner[:, number - num_noisy - num_adversarial :] = VECTOR
    partner[:, number - num_noisy :] -= signs + torch.arange(num_noisy, device=base.device)
    vectors = _synco_vectors(candidates, signs, num_noisy)
    return join(plan, MixPlan(base, partner, torch.cat(shares, dim=1), vectors=vectors))


def plan_mixcse(candidates: Candidates, *, share: float = 0.2) -> MixPlan:
    """Zhang et al. 2022 (MixCSE): 0.2 k + 0.8 n, a constant: mix the key into negatives.

    num_with_query such points; the paper has one for each query and no pairs, and draws from all
    negatives: num_hardest=K. The authors' code mixes before it normalises; here all vectors have
    unit length already. There a query also meets the points of the batch's other keys, as pairs of
    negatives (with its own key in them, at a logit of 0), and all keys meet points of the queries,
    in the same sum: a test reproduces all of it, but this plan makes the paper's points alone.
    """
    if not 0 < share < 1:
        raise InputError(
            f"share={share} must be between 0 and 1: it is the key's share of a point; the paper"
            " uses 0.2."
        )
    plan = plan_points(candidates)
    mixed = plan.partner == QUERY
    return plan._replace(
        partner=plan.partner.masked_fill(mixed, KEY), share=plan.share.masked_fill(mixed, share)
    )


def plan_nothing(candidates: Candidates) -> MixPlan:
    """Return a plan without points."""
    like = candidates.logits
    none = torch.empty(len(like), 0, dtype=torch.int64, device=like.device)
    return MixPlan(none, none, like.new_empty(len(like), 0))


def dropped_negatives(
    candidates: Candidates, real_negatives: RealNegatives
) -> Bool[Tensor, "batch K"] | None:
    """Return the mask of real negatives to mix but leave out of the loss; None for "keep".

    This is our reading of the paper's "(all queue)".
    """
    check_choice("real_negatives", real_negatives, get_args(RealNegatives))
    if real_negatives == "keep":
        return None
    like = candidates.logits
    if real_negatives == "drop_all":
        return torch.ones_like(like, dtype=torch.bool)
    positions, width = candidates.hardest.positions, like.shape[1]
    dropped = like.new_zeros(len(like), width + 1, dtype=torch.bool)
    # Where fewer than N are allowed, the last column takes what would land on a real negative.
    return dropped.scatter_(1, positions.masked_fill(positions < 0, width), True)[:, :width]


def cumulative_softmax(logits: Float[Tensor, "batch N"]) -> Float[Tensor, "batch N"]:
    """Return cumulative probabilities over the N hardest; all 0 where there is none."""
    return logits.softmax(dim=1).nan_to_num(0.0).cumsum(dim=1)


def invert(
    cumulative: Float[Tensor, "batch N"],
    uniform: Float[Tensor, "batch S"],
    count: Int[Tensor, "batch 1"],
) -> Int[Tensor, "batch S"]:
    """Inverse transform sampling: map uniform numbers to columns by their probability."""
    columns = torch.searchsorted(cumulative, uniform.contiguous(), right=True)
    return torch.minimum(columns, (count - 1).clamp(min=0))


def invert_without(
    logits: Float[Tensor, "batch N"],
    uniform: Float[Tensor, "batch S"],
    taken: Int[Tensor, "batch S"],
    count: Int[Tensor, "batch 1"],
) -> Int[Tensor, "batch S"]:
    """Do the same as `invert`, with column `taken` masked out of the softmax.

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


def _hardest_similarities(candidates: Candidates) -> Tensor:
    """Return q.n of the hardest negatives, -inf where there is none."""
    positions = candidates.hardest.positions
    values = candidates.logits.detach().gather(1, positions.clamp(min=0)) * candidates.temperature
    return values.masked_fill(positions < 0, -torch.inf)


def _alternating(num_pairs: int, num_with_query: int, device: torch.device) -> Tensor:
    """Return the turn at which each column is made: pair, query, pair, query, then the rest."""
    pairs = torch.arange(num_pairs, device=device)
    queries = torch.arange(num_with_query, device=device)
    return torch.cat(
        [pairs + pairs.clamp(max=num_with_query), queries + (queries + 1).clamp(max=num_pairs)]
    )


def _drawn_negatives(hardest: HardestNegatives, uniform: Tensor) -> Tensor:
    """Map uniform numbers to negatives; -1 where a query has none."""
    count = hardest.count.unsqueeze(1)
    which = torch.minimum((uniform * count).long(), (count - 1).clamp(min=0))
    return hardest.positions.gather(1, which)


def _synco_vectors(candidates: Candidates, signs: int, num_noisy: int) -> Tensor | None:
    """Return the signs of the query, then the noise; None if there are neither."""
    if not signs and not num_noisy:
        return None
    embeddings = candidates.needed_embeddings(
        "the strategy 'synco' with noisy or adversarial points"
    )
    query = embeddings.query.detach().to(candidates.logits.dtype)
    batch, dim = query.shape
    parts = [query.sign().unsqueeze(1)] if signs else []
    if num_noisy:
        half = -(-num_noisy * dim // 2)
        first, angle = candidates.uniform(2 * half).chunk(2, dim=1)
        radius, angle = (-2 * torch.log1p(-first)).sqrt(), 2 * math.pi * angle  # Box and Muller
        normal = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)
        parts.append(normal[:, : num_noisy * dim].reshape(batch, num_noisy, dim))
    return torch.cat(parts, dim=1)


def _check_synco(counts: dict[str, int], strengths: dict[str, float]) -> None:
    check_whole(**counts)
    for name, number in counts.items():
        if number < 0:
            raise InputError(
                f"{name}={number} is below 0: it is a number of synthetic points; use 0 for none."
            )
    for name, value in strengths.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name}={value} must be a finite number above 0: SynCo uses 0.01.")


class MixingChoice(NamedTuple):
    """The meaning of a name in `STRATEGIES`."""

    strategy: Strategy = plan_points
    """Makes the points."""
    rank_by: RankBy = "query"
    """The vector whose similarities rank the negatives."""
    transformation: FeatureTransformation | None = None
    """Changes the vectors before they are contrasted."""
    checked: bool = False
    """Whether its plans are checked: those of users' strategies are."""


STRATEGIES: dict[str, MixingChoice] = {
    "mochi": MixingChoice(),
    "ranked-by-key": MixingChoice(rank_by="key"),
    "mixed-with-key": MixingChoice(plan_mixed_with_key),
    "beta-weighted": MixingChoice(plan_beta_weighted),
    "one-minus-beta-weighted": MixingChoice(partial(plan_beta_weighted, weighing="one-minus-beta")),
    "log-beta-weighted": MixingChoice(partial(plan_beta_weighted, weighing="log-beta")),
    "softmax-sampled": MixingChoice(plan_softmax_sampled),
    "fixed-percentage": MixingChoice(plan_fixed_percentage),
    "synco": MixingChoice(plan_synco),
    "mixcse": MixingChoice(plan_mixcse),
    "feature-transformation": MixingChoice(plan_nothing, transformation=FeatureTransformation()),
    "extrapolated-positives": MixingChoice(
        plan_nothing, transformation=FeatureTransformation(queue_alpha=None)
    ),
    "mixed-queue": MixingChoice(
        plan_nothing, transformation=FeatureTransformation(positive_alpha=None)
    ),
}
"""The strategies by name, as in `MochiLoss(strategy=...)` and the setting mix.strategy."""
