"""SynCo's six kinds of synthetic negatives (Giakoumoglou and Stathaki 2024), and MixCSE's.

All are lines of a plan, point = normalize((1 - share) n + share partner):

    1 interpolated   with the query, share in (0, 0.5)         MoCHi's h' (Sec. 4.2)
    2 extrapolated   q + b (n - q), b in (1, 1.5)              with the query, share 1 - b
    3 pairs          of two negatives                          MoCHi's h (Eq. 3)
    4 noisy          n + sigma e, e normally distributed       with the vector e
    5 perturbed      n + delta q                               with the query
    6 adversarial    n + eta sign(q)                           with the vector sign(q)

Only kinds 4 and 6 have vectors, and only their noise and signs are stored.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hardmix.errors import InputError
from hardmix.mixing.checks import check_counts, check_whole
from hardmix.mixing.plans import (
    KEY,
    QUERY,
    VECTOR,
    DrawsByRow,
    Embeddings,
    HardestNegatives,
    MixPlan,
    draw,
    hardest_negatives,
    mix,
    plan_mochi,
    uniform_numbers,
)
from hardmix.mixing.points import join


def plan_synco(
    similarity: Float[Tensor, "batch K"],
    *,
    num_hardest: int,
    num_pairs: int,
    num_with_query: int,
    exclude: Bool[Tensor, "batch K"] | None = None,
    generator: torch.Generator | DrawsByRow | None = None,
    embeddings: Embeddings | None = None,
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
    check_counts(num_hardest, num_pairs, num_with_query)
    counts = {
        "num_extrapolated": num_extrapolated,
        "num_perturbed": num_perturbed,
        "num_adversarial": num_adversarial,
        "num_noisy": num_noisy,
    }
    _check(counts, {"sigma": sigma, "delta": delta, "eta": eta})
    hardest = hardest_negatives(similarity, num_hardest, exclude)
    dtype = similarity.dtype
    plan = mix(hardest, num_pairs, num_with_query, dtype, generator)
    if sum(counts.values()) == 0:
        return plan
    which, uniform = draw(hardest, sum(counts.values()), 2, dtype, generator)
    base = _chosen(hardest, which)
    partner, share = torch.full_like(base, QUERY), torch.empty_like(uniform)
    first, second, third, _ = (sum(list(counts.values())[: i + 1]) for i in range(4))
    share[:, :first] = -0.5 * uniform[:, :first].clamp(min=torch.finfo(dtype).eps)
    share[:, first:second] = delta / (1 + delta)
    share[:, second:third] = eta / (1 + eta)
    share[:, third:] = sigma / (1 + sigma)
    partner[:, second:third] = VECTOR
    signs = int(num_adversarial > 0)
    noisy = torch.arange(num_noisy, device=base.device)
    partner[:, third:] = VECTOR - signs - noisy
    vectors = _vectors(hardest, embeddings, signs, num_noisy, dtype, generator)
    return join(plan, MixPlan(base, partner, share, vectors=vectors))


def plan_mixcse(
    similarity: Float[Tensor, "batch K"],
    *,
    num_hardest: int,
    num_pairs: int,
    num_with_query: int,
    exclude: Bool[Tensor, "batch K"] | None = None,
    generator: torch.Generator | DrawsByRow | None = None,
    embeddings: Embeddings | None = None,
    share: float = 0.2,
) -> MixPlan:
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
    plan = plan_mochi(
        similarity,
        num_hardest=num_hardest,
        num_pairs=num_pairs,
        num_with_query=num_with_query,
        exclude=exclude,
        generator=generator,
    )
    mixed = plan.partner == QUERY
    return plan._replace(
        partner=plan.partner.masked_fill(mixed, KEY), share=plan.share.masked_fill(mixed, share)
    )


def _chosen(hardest: HardestNegatives, uniform: Tensor) -> Tensor:
    """Uniform numbers to negatives; -1 where a query has none."""
    count = hardest.count.unsqueeze(1)
    which = torch.minimum((uniform * count).long(), (count - 1).clamp(min=0))
    return hardest.positions.gather(1, which)


def _vectors(
    hardest: HardestNegatives,
    embeddings: Embeddings | None,
    signs: int,
    num_noisy: int,
    dtype: torch.dtype,
    generator: torch.Generator | DrawsByRow | None,
) -> Tensor | None:
    """The signs of the query, then the noise; None if there are neither."""
    if not signs and not num_noisy:
        return None
    if embeddings is None:
        raise InputError(
            "embeddings=None: adversarial and noisy points need the vectors themselves; pass"
            " embeddings=Embeddings(query, key, negatives), or set num_adversarial and num_noisy"
            " to 0."
        )
    query = embeddings.query.detach().to(dtype)
    batch, dim = query.shape
    parts = [query.sign().unsqueeze(1)] if signs else []
    if num_noisy:
        half = -(-num_noisy * dim // 2)
        first, angle = uniform_numbers(hardest, 2 * half, dtype, generator).chunk(2, dim=1)
        radius, angle = (-2 * torch.log1p(-first)).sqrt(), 2 * math.pi * angle  # Box and Muller
        normal = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)
        parts.append(normal[:, : num_noisy * dim].reshape(batch, num_noisy, dim))
    return torch.cat(parts, dim=1)


def _check(counts: dict[str, int], strengths: dict[str, float]) -> None:
    check_whole(**counts)
    for name, number in counts.items():
        if number < 0:
            raise InputError(
                f"{name}={number} is below 0: it is a number of synthetic points; use 0 for none."
            )
    for name, value in strengths.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name}={value} must be a finite number above 0: SynCo uses 0.01.")
