"""Three more strategies: a curriculum on N, spherical interpolation, and points with three parents.

Each is a function of `hardmix.strategies.Candidates` that returns a plan. The program prints how
similar their points are to the query, compared with MoCHi's.

python examples/more_strategies.py [--steps 20]
"""

from dataclasses import replace
from functools import partial

import torch
import tyro
from torch.nn.functional import normalize

import hardmix
from hardmix.losses import Embeddings
from hardmix.strategies import VECTOR, Candidates, plan_points


def narrowing(candidates: Candidates) -> hardmix.MixPlan:
    """Mix any negatives at first, and only the N hardest at the end."""
    total = candidates.similarity.shape[1]
    number = total + (candidates.num_hardest - total) * float(candidates.progress)
    return plan_points(replace(candidates, num_hardest=round(number)))


def slerp(candidates: Candidates) -> hardmix.MixPlan:
    """Make MoCHi's points, each at the angle share * angle from its negative."""
    assert candidates.embeddings is not None  # a loss gives them to every strategy
    plan, negatives = plan_points(candidates), candidates.embeddings.negatives
    base, other = plan.base.clamp(min=0), plan.partner.clamp(min=0)
    cosine = (negatives[base] * negatives[other]).sum(dim=2)
    with_query = candidates.similarity.gather(1, base)
    cosine = torch.where(plan.partner == hardmix.QUERY, with_query, cosine)
    angle = cosine.clamp(-1, 1).acos().clamp(1e-3, 3.14)
    there, rest = (plan.share * angle).sin(), ((1 - plan.share) * angle).sin()
    return plan._replace(share=there / (there + rest))


def three_way(candidates: Candidates) -> hardmix.MixPlan:
    """Mix three negatives: the plan has `vectors` of its own, mixes of two, as partners."""
    assert candidates.embeddings is not None
    number, negatives = candidates.num_pairs, candidates.embeddings.negatives
    which = (candidates.uniform(3 * number) * candidates.hardest.number).long()
    rows = candidates.hardest.positions.gather(1, which).unflatten(1, (3, number))
    shares = candidates.uniform(3 * number).unflatten(1, (3, number)).clamp(min=1e-6)
    shares = shares / shares.sum(dim=1, keepdim=True)
    share = shares[:, 1] + shares[:, 2]
    vectors = (shares[:, 1:].unsqueeze(3) * negatives[rows[:, 1:]]).sum(dim=1)
    partner = (VECTOR - torch.arange(number, device=rows.device)).expand_as(share)
    return hardmix.MixPlan(rows[:, 0], partner, share, vectors=vectors / share.unsqueeze(2))


def main(steps: int = 20) -> dict[str, float]:
    """Plan points for random embeddings; return their mean similarity to the query."""
    torch.manual_seed(0)
    strategies = {"MoCHi": plan_points, "narrowing": narrowing, "slerp": slerp, "three": three_way}
    sums = dict.fromkeys(strategies, 0.0)
    of_counts = partial(Candidates, num_hardest=32, num_pairs=16, num_with_query=0)
    for _ in range(steps):
        query, key, negatives = (normalize(torch.randn(n, 16), dim=1) for n in (8, 8, 256))
        embeddings = Embeddings(query, key, negatives)
        candidates = of_counts(logits=query @ negatives.T, embeddings=embeddings)
        for name, strategy in strategies.items():
            points = hardmix.materialize(strategy(candidates), query, key, negatives)
            sums[name] += float((points @ query.unsqueeze(2)).mean()) / steps
    print(", ".join(f"{name} {similarity:.2f}" for name, similarity in sums.items()))
    return sums


if __name__ == "__main__":
    tyro.cli(main)
