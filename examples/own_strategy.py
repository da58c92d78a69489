"""A strategy of your own: a function of `hardmix.strategies.Candidates` that returns a plan.

The very hardest negatives are often of the query's own class (Fig. 2c). This one skips them, and
mixes those that come next.

python examples/own_strategy.py [--steps 100] [--num-skipped 64]
"""

import copy
from dataclasses import replace
from functools import partial

import torch
import tyro

from digits import DIM, build_encoder, follow, read_digits, view
from hardmix import MemoryQueue, MixPlan, MochiLoss, false_parents
from hardmix.strategies import Candidates, plan_points


def plan_semi_hard(candidates: Candidates, *, num_skipped: int = 64) -> MixPlan:
    """Make MoCHi's points of the N hardest negatives after the `num_skipped` very hardest."""
    similarity, exclude = candidates.similarity, candidates.exclude
    if exclude is None:
        exclude = torch.zeros_like(similarity, dtype=torch.bool)
    allowed = similarity.masked_fill(exclude, -torch.inf)
    least = allowed.topk(num_skipped, dim=1).values[:, -1:]
    return plan_points(replace(candidates, exclude=exclude | (allowed >= least)))


def main(steps: int = 100, num_skipped: int = 64) -> tuple[float, float]:
    """Train with it; return how many points have two false parents: MoCHi's, and these."""
    torch.manual_seed(0)
    images, labels = read_digits()
    encoder = build_encoder()
    key_encoder = copy.deepcopy(encoder).requires_grad_(False)
    loss = MochiLoss(128, 128, 16, strategy=partial(plan_semi_hard, num_skipped=num_skipped))
    memory = MemoryQueue(size=1024, dim=DIM)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    for _ in range(steps):
        rows = torch.randint(len(images), (64,))
        follow(key_encoder, encoder)
        with torch.no_grad():
            key = key_encoder(view(images[rows]))
        query = encoder(view(images[rows]))
        optimizer.zero_grad()
        loss(query, key, memory).backward()
        optimizer.step()
        memory.enqueue(key, labels=labels[rows], ids=rows)

    shares, rows = [], torch.arange(64)
    query, key = encoder(view(images[rows])).detach(), key_encoder(view(images[rows]))
    for chosen in (MochiLoss(128, 128, 16), loss):
        _, plan = chosen.contrast(query, key, memory, ids=rows)
        assert plan is not None
        shares.append(float(false_parents(plan, memory.same_class(labels[rows])).pairs_both))
    print(f"points with two false parents: MoCHi {shares[0]:.0%}, semi-hard {shares[1]:.0%}")
    return shares[0], shares[1]


if __name__ == "__main__":
    tyro.cli(main)
