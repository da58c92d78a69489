"""Labels at hand: the paper's class oracle (Sec. 3.3) discards negatives of the query's class.

Trains with and without it, and compares what the paper compares: how many synthetic points have a
false negative for a parent (Fig. 2c), and alignment and uniformity of the embedding (App. A).

python examples/supervised_oracle.py [--steps 200] [--batch-size 64]
"""

import copy
from typing import NamedTuple

import torch
import tyro

from digits import DIM, build_encoder, follow, read_digits, view
from hardmix import MemoryQueue, MochiLoss, alignment, false_parents, uniformity


class Outcome(NamedTuple):
    """Results of a run: the lower, the better."""

    false_points: float
    """Share of the last step's pairs of which one parent is of the query's class, or both."""
    alignment: float
    uniformity: float


def train(steps: int, batch_size: int, oracle: bool) -> Outcome:
    """Train as in plain_pytorch.py, but with labels in the queue."""
    torch.manual_seed(0)
    images, labels = read_digits()
    encoder = build_encoder()
    key_encoder = copy.deepcopy(encoder).requires_grad_(False)
    loss = MochiLoss(num_hardest=128, num_pairs=128, num_with_query=16, temperature=0.2)
    memory = MemoryQueue(size=1024, dim=DIM)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    false_points = 0.0
    for _ in range(steps):
        rows = torch.randint(len(images), (batch_size,))
        follow(key_encoder, encoder)
        with torch.no_grad():
            key = key_encoder(view(images[rows]))
        same_class = memory.same_class(labels[rows])
        exclude = same_class if oracle else None  # neither in the loss nor in a synthetic point
        outcome, plan = loss.contrast(encoder(view(images[rows])), key, memory, exclude)
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
        memory.enqueue(key, labels=labels[rows])
        assert plan is not None
        false_points = float(false_parents(plan, same_class).pairs_at_least_one)
    features = encoder(images).detach()
    return Outcome(false_points, alignment(features, labels), uniformity(features))


def main(steps: int = 200, batch_size: int = 64) -> dict[str, Outcome]:
    """Train twice; return both outcomes by name."""
    outcomes = {
        "without oracle": train(steps, batch_size, oracle=False),
        "with oracle": train(steps, batch_size, oracle=True),
    }
    for name, (false_points, align, uniform) in outcomes.items():
        measures = f"alignment {align:.2f}, uniformity {uniform:.2f}"
        print(f"{name}: {false_points:.0%} of the points have a false parent, {measures}")
    return outcomes


if __name__ == "__main__":
    tyro.cli(main)
