"""Fig. 2: how hard the negatives are, and how many of them are false.

Each function reads a `Contrast` or a plan, and computes nothing twice.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hardmix.mixing.checks import check_mask, check_similarity, check_top
from hardmix.mixing.infonce import Contrast, WeightLine
from hardmix.mixing.plans import NO_POINT, VECTOR, MixPlan, hardest_negatives

TOP = 1024
"""Number of highest-ranked negatives in Fig. 2a and 2c, of the paper's 16384."""
TOP_PART = 16
"""Part of the negatives that they are: a sixteenth also of a shorter queue."""

BINS = 80
"""Number of bins in a histogram of similarities, from -1 to 1."""


class ProxyAccuracy(NamedTuple):
    """Sec. 3.2: share of queries whose key ranks strictly above all negatives."""

    real: Float[Tensor, ""]
    """Among the real negatives only (Fig. 2b, lines with triangles)."""
    mixed: Float[Tensor, ""]
    """Among real and synthetic negatives (Fig. 2b, lines without markers)."""


class FalseParents(NamedTuple):
    """Sec. 4.3: share of synthetic points with false negatives as parents; NaN without points."""

    pairs_at_least_one: Float[Tensor, ""]
    """Share of pair points with one or two false parents (Fig. 2c, triangles)."""
    pairs_both: Float[Tensor, ""]
    """Share of pair points with two false parents (Fig. 2c, squares)."""
    with_query: Float[Tensor, ""]
    """Share of points mixed with the query (or key) whose negative is false."""


class HarderPoints(NamedTuple):
    """Sec. 4.3: share of queries whose hardest point is harder than their hardest negative.

    NaN without such points.
    """

    pairs: Float[Tensor, ""]
    """max l(h) > max l(n): among points that mix two negatives."""
    with_query: Float[Tensor, ""]
    """max l(h') > max l(n): among points mixed with the query (or key)."""


def top_of(num_negatives: int) -> int:
    """Return how many negatives count as the highest: min(1024, K // 16), at least one."""
    return min(TOP, max(1, num_negatives // TOP_PART))


def matching_probability(
    outcome: Contrast, exclude: Bool[Tensor, "batch K"] | None = None, top: int | None = None
) -> Float[Tensor, " top"]:
    """Return Fig. 2a: the matching probability of the `top` highest negatives, by rank.

    This is the probability of Eq. 2 over the key and the real negatives, averaged over the queries.
    Unset, `top` is the paper's 1024 of 16384, and a sixteenth of fewer negatives.
    """
    check_top(top)
    top = top_of(outcome.real.shape[1]) if top is None else top
    temperature, real = outcome.temperature, _shown(outcome.real, exclude)
    log_total = torch.logaddexp(
        outcome.positive / temperature, torch.logsumexp(real / temperature, dim=1)
    )
    highest = real.topk(min(top, real.shape[1]), dim=1).values / temperature
    return (highest - log_total.unsqueeze(1)).exp().mean(dim=0)


def proxy_accuracy(
    outcome: Contrast, exclude: Bool[Tensor, "batch K"] | None = None
) -> ProxyAccuracy:
    """Return Fig. 2b: accuracy on the proxy task, without and with the synthetic points."""
    return proxy_of_edges(edges(outcome, exclude))


def edges(
    outcome: Contrast, exclude: Bool[Tensor, "batch K"] | None = None
) -> Float[Tensor, "3 batch"]:
    """Return each query's similarity to its key, its hardest negative and its hardest point.

    Without points, the last is that of the hardest negative.
    """
    hardest = _shown(outcome.real, exclude).amax(dim=1)
    points = outcome.synthetic.amax(dim=1) if outcome.synthetic.shape[1] else hardest
    return torch.stack([outcome.positive, hardest, points])


def proxy_of_edges(edges: Float[Tensor, "3 queries"]) -> ProxyAccuracy:
    """Return Fig. 2b for queries of any number of steps."""
    key, hardest, point = edges
    real = key > hardest
    return ProxyAccuracy(_share(real), _share(real & (key > point)))


def harder_points(
    outcome: Contrast, plan: MixPlan, exclude: Bool[Tensor, "batch K"] | None = None
) -> HarderPoints:
    """Return Sec. 4.3's comparison of the hardest points with the hardest real negative."""
    hardest, pair = _shown(outcome.real, exclude).amax(dim=1), plan.partner >= 0
    kinds = torch.stack([pair, ~pair])
    # The hardest point of each kind: -inf where none could be made.
    point = torch.where(kinds, outcome.synthetic, -torch.inf).amax(dim=2)
    shares = (point > hardest).sum(dim=1) / (point > -torch.inf).sum(dim=1)
    return HarderPoints(*shares.unbind())


def synthetic_mass(outcome: Contrast) -> Float[Tensor, ""]:
    """Return the synthetic points' share of the denominator, averaged over the queries."""
    return negative_mass(outcome).points


KINDS = ("vector", "key", "query", "pairs", "beyond")
"""Kinds of points, in the order of `_marks`."""


class NegativeMass(NamedTuple):
    """The distribution of the weight over the negatives; means over the queries."""

    points: Float[Tensor, ""]
    """Share of the denominator, positive included, that all points hold."""
    kinds: dict[str, Float[Tensor, ""]]
    """The same of each kind of point: "pairs" of two negatives,
    "query" for points with a share of the query, "beyond" for those moved away from it, "key", and
    "vector" for SynCo's noisy and adversarial points."""
    effective: Float[Tensor, ""]
    """Effective number of negatives: the perplexity of their probabilities, exp of the entropy."""
    top: dict[int, Float[Tensor, ""]]
    """Share of Eq. 2's push away from negatives that the hardest hold, by how many these are."""


def negative_mass(outcome: Contrast, ranks: tuple[int, ...] = (10, 100)) -> NegativeMass:
    """Return the share of the loss that each kind of negative has, by its masks and weights."""
    plan, terms = outcome.plan, _log_terms(outcome)
    positive = (outcome.positive / outcome.temperature).unsqueeze(1)
    share = torch.cat([terms, positive], dim=1).softmax(dim=1)[:, :-1]
    # Among the negatives; all 0 of a query without any.
    among = share / share.sum(dim=1, keepdim=True).clamp_(min=torch.finfo(share.dtype).tiny)
    effective = torch.special.entr(among).sum(dim=1).exp().mean()
    highest = among.topk(min(max(ranks), among.shape[1]), dim=1).values.cumsum(dim=1).mean(dim=0)
    top = {rank: highest[min(rank, len(highest)) - 1] for rank in ranks}
    if plan is None:
        return NegativeMass(share.new_zeros(()), {}, effective, top)
    marks = torch.arange(VECTOR, VECTOR + len(KINDS), device=share.device)
    which = (_marks(plan).flatten() == marks.unsqueeze(1)).to(share.dtype)
    flat, scale = share[:, outcome.real.shape[1] :].flatten(), 1 / len(share)
    sums = torch.addmv(share.new_empty(len(KINDS)), which, flat, beta=0, alpha=scale)
    return NegativeMass(sums.sum(), dict(zip(KINDS, sums.unbind(), strict=True)), effective, top)


def _log_terms(outcome: Contrast) -> Float[Tensor, "batch columns"]:
    """Return the log of each negative's and each point's term in the loss's denominator.

    If there are several powers, the first gives the terms; the others are a factor of each query.
    """
    plan, real = outcome.plan, outcome.real / outcome.temperature
    points = outcome.synthetic / outcome.temperature
    if plan is not None and plan.scale is not None:
        points = (points * plan.scale).masked_fill(plan.base == NO_POINT, -torch.inf)
    added, of_points = outcome.log_weights, None if plan is None else plan.weight
    if isinstance(added, WeightLine):
        added = added.weights(real)
    terms: Tensor | None = None
    for scale, exponent in outcome.powers:
        values, extra = (real, points) if scale == 1 else (real * scale, points * scale)
        values = values if added is None else values + added
        extra = extra if of_points is None else extra + of_points.log()
        scaled = torch.cat([_shown(values, outcome.exclude), extra], dim=1)
        if terms is None:
            terms = scaled
            continue
        number = (scaled > -torch.inf).sum(dim=1, keepdim=True)
        mean = scaled.logsumexp(dim=1, keepdim=True) - number.log()
        terms = terms + torch.where(number > 0, exponent * mean, 0.0)
    assert terms is not None
    return terms


def _marks(plan: MixPlan) -> Tensor:
    """Return the mark of each point's partner, 0 for a row, 1 if the share is below 0."""
    return plan.partner.clamp(VECTOR, 0).masked_fill_(plan.share < 0, 1)


def false_negatives_top(
    similarity: Float[Tensor, "batch K"],
    false_negative: Bool[Tensor, "batch K"],
    top: int | None = None,
) -> Float[Tensor, ""]:
    """Return Fig. 2c: the share of false negatives among the `top` highest negatives.

    Unset, `top` is the paper's 1024 of 16384, and a sixteenth of fewer negatives.

    `similarity` covers all negatives, also those excluded from the loss by the oracle, as
    `Contrast.real` does. `false_negative` is the mask from `MemoryQueue.same_class`.
    """
    check_similarity(similarity)
    check_top(top)
    check_mask(false_negative, len(similarity), similarity.shape[1], "false_negative")
    top = top_of(similarity.shape[1]) if top is None else top
    highest = hardest_negatives(similarity, min(top, similarity.shape[1]))
    return _share(false_negative.gather(1, highest.positions))


def false_parents(plan: MixPlan, false_negative: Bool[Tensor, "batch K"]) -> FalseParents:
    """Return Fig. 2c: the shares of a plan's points with false negatives as parents."""
    check_mask(false_negative, len(plan.base), false_negative.shape[-1], "false_negative")
    valid, pair = plan.base != NO_POINT, plan.partner >= 0
    base = false_negative.gather(1, plan.base.clamp(min=0))
    partner = false_negative.gather(1, plan.partner.clamp(min=0)) & pair
    return FalseParents(
        pairs_at_least_one=_share(base | partner, valid & pair),
        pairs_both=_share(base & partner, valid & pair),
        with_query=_share(base, valid & ~pair),
    )


def similarity_histogram(similarity: Float[Tensor, "..."]) -> list[int]:
    """Count similarities in each of `BINS` equal parts of [-1, 1]; NaN and infinity are skipped."""
    values = similarity.detach().float().flatten().cpu()
    values = values[values.isfinite()].clamp(-1, 1)
    return [int(count) for count in torch.histc(values, bins=BINS, min=-1.0, max=1.0)]


def _shown(real: Tensor, exclude: Tensor | None) -> Tensor:
    check_mask(exclude, len(real), real.shape[1])
    return real if exclude is None else real.masked_fill(exclude, -torch.inf)


def _share(mask: Tensor, among: Tensor | None = None) -> Tensor:
    """Return the share of true values; NaN if there are none to look at. A GPU need not wait."""
    return mask.float().mean() if among is None else (mask & among).sum() / among.sum()
