"""Other ways to plan synthetic points (App. B.2), and the table of strategies.

All have the signature of `plan_mochi`; some add options. The paper found none of them better: they
reproduce its ablations and serve as examples of a strategy.
"""

from functools import partial
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hardmix.errors import InputError
from hardmix.mixing.checks import check_choice, check_counts, check_similarity, check_temperature
from hardmix.mixing.closed_form import evaluate_plan
from hardmix.mixing.device_infonce import made_points
from hardmix.mixing.plans import (
    KEY,
    NO_POINT,
    QUERY,
    DrawsByRow,
    Embeddings,
    HardestNegatives,
    MixPlan,
    Strategy,
    draw,
    hardest_negatives,
    join,
    mix,
    open_interval,
    plan_mochi,
)
from hardmix.mixing.ranking import in_one_piece
from hardmix.settings.named_choices import RealNegatives


def plan_ranked_by_key(
    similarity: Float[Tensor, "batch K"],
    *,
    num_hardest: int,
    num_pairs: int,
    num_with_query: int,
    exclude: Bool[Tensor, "batch K"] | None = None,
    generator: torch.Generator | DrawsByRow | None = None,
    embeddings: Embeddings | None = None,
) -> MixPlan:
    """App. B.2: rank negatives by their similarity to the key. Paper: about 0.2 % lower."""
    check_similarity(similarity)
    embeddings = _need(embeddings, "ranked-by-key")
    return plan_mochi(
        ranking_similarity(plan_ranked_by_key, similarity, embeddings),
        num_hardest=num_hardest,
        num_pairs=num_pairs,
        num_with_query=num_with_query,
        exclude=exclude,
        generator=generator,
    )


def plan_mixed_with_key(
    similarity: Float[Tensor, "batch K"],
    *,
    num_hardest: int,
    num_pairs: int,
    num_with_query: int,
    exclude: Bool[Tensor, "batch K"] | None = None,
    generator: torch.Generator | DrawsByRow | None = None,
    embeddings: Embeddings | None = None,
) -> MixPlan:
    """App. B.2: mix negatives with the key, not the query (h''). Paper: about 0.1-0.2 % lower."""
    plan = plan_mochi(
        similarity,
        num_hardest=num_hardest,
        num_pairs=num_pairs,
        num_with_query=num_with_query,
        exclude=exclude,
        generator=generator,
    )
    return plan._replace(partner=plan.partner.masked_fill(plan.partner == QUERY, KEY))


def plan_beta_weighted(
    similarity: Float[Tensor, "batch K"],
    *,
    num_hardest: int,
    num_pairs: int,
    num_with_query: int,
    exclude: Bool[Tensor, "batch K"] | None = None,
    generator: torch.Generator | DrawsByRow | None = None,
    embeddings: Embeddings | None = None,
    weighing: Literal["beta", "one-minus-beta", "log-beta"] = "beta",
) -> MixPlan:
    """App. B.2: weight points mixed with the query by the query's share, beta.

    "beta" multiplies the logit by beta, as the paper states. "one-minus-beta" multiplies it by
    1 - beta, as the paper's reason ("how negative this point is") suggests. "log-beta" multiplies
    the point's term in Eq. 1 by beta.
    """
    check_choice("weighing", weighing, ("beta", "one-minus-beta", "log-beta"))
    plan = plan_mochi(
        similarity,
        num_hardest=num_hardest,
        num_pairs=num_pairs,
        num_with_query=num_with_query,
        exclude=exclude,
        generator=generator,
    )
    factor = 1 - plan.share if weighing == "one-minus-beta" else plan.share
    factor = torch.where(plan.partner == QUERY, factor, 1.0)
    return plan._replace(weight=factor) if weighing == "log-beta" else plan._replace(scale=factor)


def plan_softmax_sampled(
    similarity: Float[Tensor, "batch K"],
    *,
    num_hardest: int,
    num_pairs: int,
    num_with_query: int,
    exclude: Bool[Tensor, "batch K"] | None = None,
    generator: torch.Generator | DrawsByRow | None = None,
    embeddings: Embeddings | None = None,
    sampling_temperature: float = 0.2,
) -> MixPlan:
    """App. B.2: draw parents by softmax(q.n / tau') over the N hardest. Paper: 10-30 % lower.

    `sampling_temperature` is tau'. The paper gives no value; 0.2 is the temperature of the loss.
    """
    check_temperature(sampling_temperature, "sampling_temperature")
    check_counts(num_hardest, num_pairs, num_with_query)
    hardest = hardest_negatives(similarity, num_hardest, exclude)
    # In float64: the differences of cumulative probabilities are needed.
    logits = _values(similarity, hardest).double() / sampling_temperature
    cumulative = _cumulative_softmax(logits)
    dtype, positions, count = similarity.dtype, hardest.positions, hardest.count.unsqueeze(1)

    first, second, alpha = draw(hardest, num_pairs, 3, dtype, generator)
    i = _invert(cumulative, first.double(), count)
    j = _invert_without(logits, second.double(), i, count)
    base = positions.gather(1, i).masked_fill(count < 2, NO_POINT)
    partner = positions.gather(1, j).clamp(min=0)
    pairs = MixPlan(base, partner, 1 - open_interval(alpha, 1.0))

    which, beta = draw(hardest, num_with_query, 2, dtype, generator)
    base = positions.gather(1, _invert(cumulative, which.double(), count))
    return join(pairs, MixPlan(base, torch.full_like(base, QUERY), open_interval(beta, 0.5)))


def plan_fixed_percentage(
    similarity: Float[Tensor, "batch K"],
    *,
    num_hardest: int,
    num_pairs: int,
    num_with_query: int,
    exclude: Bool[Tensor, "batch K"] | None = None,
    generator: torch.Generator | DrawsByRow | None = None,
    embeddings: Embeddings | None = None,
    percentage: float = 50.0,
) -> MixPlan:
    """App. B.2: add points until X % of the top N logits are synthetic, alternating the two kinds.

    s and s' limit the number of points of each kind. `decreasing` gives a percentage that falls
    over training, which the paper leaves as future work.
    """
    if not 0 <= percentage <= 100:
        raise InputError(
            f"percentage={percentage} is not between 0 and 100: it is the share of the top N."
        )
    query, key, negatives = _need(embeddings, "fixed-percentage")
    check_counts(num_hardest, num_pairs, num_with_query)
    hardest = hardest_negatives(similarity, num_hardest, exclude)
    plan = mix(hardest, num_pairs, num_with_query, similarity.dtype, generator)
    with torch.no_grad():
        dtype = similarity.dtype
        vectors = Embeddings(query.to(dtype), key.to(dtype), negatives.to(dtype))
        points = _point_similarities(plan, vectors, similarity)
        real = _values(similarity, hardest)
    turn = _alternating(num_pairs, num_with_query, similarity.device)
    target = -(-num_hardest * percentage // 100)
    # Few enough points: the count of synthetic ones among the top N never falls when one is added.
    low, high = torch.zeros_like(hardest.count), torch.full_like(hardest.count, len(turn))
    for _ in range(len(turn).bit_length()):
        middle = (low + high) // 2
        shown = points.masked_fill(turn >= middle.unsqueeze(1), -torch.inf)
        top = torch.cat([real, shown], dim=1).topk(num_hardest, dim=1)
        synthetic = ((top.indices >= num_hardest) & (top.values > -torch.inf)).sum(dim=1)
        enough = synthetic >= target
        low, high = (
            torch.where(enough, low, middle + 1).minimum(high),
            torch.where(enough, middle, high),
        )
    return plan._replace(base=plan.base.masked_fill(turn >= high.unsqueeze(1), NO_POINT))


def dropped_negatives(
    similarity: Float[Tensor, "batch K"],
    real_negatives: RealNegatives,
    num_hardest: int,
    exclude: Bool[Tensor, "batch K"] | None = None,
) -> Bool[Tensor, "batch K"] | None:
    """Return the mask of real negatives to mix but leave out of the loss; None for "keep".

    This is our reading of the paper's "(all queue)". Make the plan with `exclude` alone, then pass
    this mask, combined with `exclude`, to `contrast`. `similarity` must be the one that the
    strategy ranks by: the key's for "ranked-by-key".
    """
    check_choice("real_negatives", real_negatives, get_args(RealNegatives))
    if real_negatives == "keep":
        return None
    if real_negatives == "drop_all":
        return torch.ones_like(similarity, dtype=torch.bool)
    hardest = hardest_negatives(similarity, num_hardest, exclude)
    batch, width = similarity.shape
    dropped = similarity.new_zeros(batch, width + 1, dtype=torch.bool)
    # Where fewer than N are allowed, the last column takes what would land on a real negative.
    positions = hardest.positions.masked_fill(hardest.positions < 0, width)
    return dropped.scatter_(1, positions, True)[:, :width]


def ranking_similarity(
    strategy: Strategy, similarity: Float[Tensor, "batch K"], embeddings: Embeddings
) -> Float[Tensor, "batch K"]:
    """Return the similarities that a strategy ranks by: q.n, or k.n for "ranked-by-key"."""
    if function_of(strategy) is not plan_ranked_by_key:
        return similarity
    return (embeddings.key.detach() @ embeddings.negatives.detach().T).to(similarity.dtype)


def _need(embeddings: Embeddings | None, strategy: str) -> Embeddings:
    if embeddings is None:
        raise InputError(
            f"embeddings=None: the strategy {strategy!r} needs the vectors themselves; pass"
            " embeddings=Embeddings(query, key, negatives)."
        )
    return embeddings


def _values(similarity: Tensor, hardest: HardestNegatives) -> Tensor:
    """Similarities of the hardest negatives, -inf where there is none."""
    values = similarity.detach().gather(1, hardest.positions.clamp(min=0))
    return values.masked_fill(hardest.positions < 0, -torch.inf)


def _point_similarities(plan: MixPlan, embeddings: Embeddings, similarity: Tensor) -> Tensor:
    """q.h of every point."""
    query, key, negatives = embeddings
    if in_one_piece(similarity):
        return made_points(plan, query, key, negatives, every_point=False).similarity
    positive = (query * key).sum(dim=1)
    return evaluate_plan(plan, key, negatives, similarity, positive).similarity


def _cumulative_softmax(logits: Float[Tensor, "batch N"]) -> Float[Tensor, "batch N"]:
    """Cumulative probabilities over the N hardest; all 0 where there is none."""
    return logits.softmax(dim=1).nan_to_num(0.0).cumsum(dim=1)


def _invert(cumulative: Tensor, uniform: Tensor, count: Tensor) -> Tensor:
    """Inverse transform sampling: uniform numbers to columns by their probability."""
    columns = torch.searchsorted(cumulative, uniform.contiguous(), right=True)
    return torch.minimum(columns, (count - 1).clamp(min=0))


def _invert_without(logits: Tensor, uniform: Tensor, taken: Tensor, count: Tensor) -> Tensor:
    """As `_invert`, with column `taken` masked out of the softmax.

    A probability of up to 0.5 is cut out of the cumulative ones without loss. Only the likeliest
    column may have more, and there is one of these: its softmax without it is made anew.
    """
    cumulative = _cumulative_softmax(logits)
    upto = cumulative.gather(1, taken)
    before = torch.where(taken > 0, cumulative.gather(1, (taken - 1).clamp(min=0)), 0.0)
    point = uniform * (cumulative[:, -1:] - (upto - before))
    point = torch.where(point >= before, point + (upto - before), point)
    others = _invert(cumulative, point, count)
    likeliest = logits.argmax(dim=1, keepdim=True)
    others = torch.where(others == taken, likeliest, others)  # rounding at the edge of the cut
    masked = _cumulative_softmax(logits.scatter(1, likeliest, -torch.inf))
    instead = _invert(masked, uniform * masked[:, -1:], count)
    return torch.where(taken == likeliest, instead, others)


def _alternating(num_pairs: int, num_with_query: int, device: torch.device) -> Tensor:
    """The turn at which each column is made: pair, query, pair, query, then what is left."""
    pairs = torch.arange(num_pairs, device=device)
    queries = torch.arange(num_with_query, device=device)
    return torch.cat(
        [pairs + pairs.clamp(max=num_with_query), queries + (queries + 1).clamp(max=num_pairs)]
    )


STRATEGIES: dict[str, Strategy] = {
    "mochi": plan_mochi,
    "ranked-by-key": plan_ranked_by_key,
    "mixed-with-key": plan_mixed_with_key,
    "beta-weighted": plan_beta_weighted,
    "one-minus-beta-weighted": partial(plan_beta_weighted, weighing="one-minus-beta"),
    "log-beta-weighted": partial(plan_beta_weighted, weighing="log-beta"),
    "softmax-sampled": plan_softmax_sampled,
    "fixed-percentage": plan_fixed_percentage,
}
"""The strategies by name, as in `MochiLoss(strategy=...)` and the setting mix.strategy."""


def function_of(strategy: Strategy) -> object:
    """Return the strategy's function, without its options."""
    return strategy.func if isinstance(strategy, partial) else strategy


OUR_FUNCTIONS = {function_of(strategy) for strategy in STRATEGIES.values()}
"""Their plans have the pairs first, and all row indices are valid."""
