"""The smallest honest demonstration: one batch of random embeddings, no training.

It shows what mixing does to a loss, and that the closed form is the definition.
"""

import time

import torch
from torch.nn.functional import cross_entropy, normalize

from hardmix.checks import check_counts, check_num_hardest
from hardmix.console import say, table
from hardmix.contrast import Contrast, contrast
from hardmix.mixing import MixPlan, materialize, plan_mochi

BATCH, QUEUE, DIM, TEMPERATURE = 64, 4096, 128, 0.2


def show(num_hardest: int, num_pairs: int, num_with_query: int, seed: int) -> None:
    """Sec. 4 on random unit vectors: losses, hardest similarities, and the exactness of both."""
    check_counts(num_hardest, num_pairs, num_with_query)
    check_num_hardest(num_hardest, QUEUE)
    generator = torch.Generator().manual_seed(seed)
    key = normalize(torch.randn(BATCH, DIM, generator=generator), dim=1)
    query = normalize(key + 0.1 * torch.randn(BATCH, DIM, generator=generator), dim=1)
    negatives = normalize(torch.randn(QUEUE, DIM, generator=generator), dim=1)

    start = time.perf_counter()
    plan = plan_mochi(
        query @ negatives.T,
        num_hardest=num_hardest,
        num_pairs=num_pairs,
        num_with_query=num_with_query,
        generator=generator,
    )
    mochi = contrast(query, key, negatives, plan, temperature=TEMPERATURE)
    seconds = time.perf_counter() - start
    moco = contrast(query, key, negatives, temperature=TEMPERATURE)
    difference = abs(float(mochi.loss) - _by_definition(query, key, negatives, plan))

    setting = f"({num_hardest}, {num_pairs}, {num_with_query})"
    table(
        f"{BATCH} queries, queue of {QUEUE} random vectors, temperature {TEMPERATURE}",
        ["", "loss", "hardest real", "hardest synthetic"],
        [_row("MoCo", moco), _row(f"MoCHi {setting}", mochi)],
    )
    say(
        f"The closed form is {difference:.0e} from its float64 definition and took {seconds:.3f} s."
    )
    say("It shows the loss, not learning: nothing was trained, and the vectors are random.")


def _row(name: str, outcome: Contrast) -> list[str]:
    synthetic = outcome.synthetic.max().item() if outcome.synthetic.numel() else None
    shown = "-" if synthetic is None else f"{synthetic:.3f}"
    return [name, f"{outcome.loss.item():.4f}", f"{outcome.real.max().item():.3f}", shown]


def _by_definition(
    query: torch.Tensor, key: torch.Tensor, negatives: torch.Tensor, plan: MixPlan
) -> float:
    """Eq. 1 over real and materialised negatives, in float64."""
    query, key, negatives = query.double(), key.double(), negatives.double()
    points = materialize(plan._replace(share=plan.share.double()), query, key, negatives)
    logits = torch.cat(
        [
            (query * key).sum(dim=1, keepdim=True),
            query @ negatives.T,
            torch.einsum("bd,bsd->bs", query, points),
        ],
        dim=1,
    )
    target = torch.zeros(len(query), dtype=torch.long)
    return float(cross_entropy(logits / TEMPERATURE, target))
