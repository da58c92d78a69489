"""Fig. 1: random embeddings on the unit sphere, and MoCHi's points from the hardest ones."""

import torch
from torch.nn.functional import normalize

from hardmix.analysis.figures.maps import ToyPoints, fig1
from hardmix.analysis.figures.picture import Picture
from hardmix.analysis.tsne import MOST, tsne
from hardmix.errors import InputError
from hardmix.mixing.plans import hardest_negatives, materialize, plan_mochi
from hardmix.runtime.random_numbers import seed_of


def toy_sphere(
    *,
    seed: int = 0,
    dim: int = 32,
    num_memory: int = 512,
    num_hardest: int = 64,
    num_pairs: int = 64,
    num_with_query: int = 32,
) -> Picture:
    """Draw a query and its memory, mix the N hardest both ways, and map all by t-SNE."""
    number = 1 + num_memory + num_pairs + num_with_query
    if dim < 2 or num_memory < 2 or number > MOST:
        raise InputError(
            f"dim={dim}, num_memory={num_memory}, {number} points in total: at least 2 dimensions"
            f" and 2 negatives are needed, and at most {MOST} points are supported."
        )
    generator = torch.Generator().manual_seed(seed_of("toy sphere", seed))
    query = normalize(torch.randn(1, dim, generator=generator), dim=1)
    memory = normalize(torch.randn(num_memory, dim, generator=generator), dim=1)
    similarity = query @ memory.T
    hardest = hardest_negatives(similarity, num_hardest).positions[0]
    plan = plan_mochi(
        similarity,
        num_hardest=num_hardest,
        num_pairs=num_pairs,
        num_with_query=num_with_query,
        generator=generator,
    )
    points = materialize(plan, query, query, memory)[0]
    places = tsne(torch.cat([memory, points, query]), seed_of("toy map", seed))
    is_hardest = torch.zeros(num_memory, dtype=torch.bool)
    is_hardest[hardest] = True
    first = num_memory + num_pairs
    chosen = {
        "memory": places[:num_memory][~is_hardest],
        "hardest negatives": places[:num_memory][is_hardest],
        "pair points": places[num_memory:first],
        "points with the query": places[first:-1],
        "query": places[-1:],
    }
    groups = [
        ToyPoints(kind, *([round(value, 3) for value in column] for column in some.T.tolist()))
        for kind, some in chosen.items()
        if len(some)
    ]
    settings = {
        "seed": seed,
        "dim": dim,
        "num_memory": num_memory,
        "num_hardest": num_hardest,
        "num_pairs": num_pairs,
        "num_with_query": num_with_query,
    }
    return fig1(groups, settings)
