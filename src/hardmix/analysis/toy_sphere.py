"""Fig. 1: random embeddings on the unit sphere, and MoCHi's points from the hardest ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import normalize

from hardmix.analysis.embedding import MOST, tsne
from hardmix.analysis.picture import COLOURS, Picture, canvas, legend_below
from hardmix.errors import InputError
from hardmix.mixing.plans import hardest_negatives, materialize, plan_mochi
from hardmix.runtime.random_numbers import seed_of

RED, BLUE, PALE_BLUE = "#d62728", COLOURS[0], COLOURS[5]

LOOK: dict[str, dict[str, Any]] = {
    "memory": {"color": "#b0b0b0", "marker": ".", "s": 14},
    "hardest negatives": {"color": "#707070", "marker": "o", "s": 22},
    "pair points": {"color": BLUE, "marker": "^", "s": 26},
    "points with the query": {"color": PALE_BLUE, "marker": "v", "s": 30},
    "query": {"color": RED, "marker": "s", "s": 110},
}
"""The paper's symbols: the query is a red square, synthetic points are blue triangles, and the
memory is grey."""


class ToyPoints(NamedTuple):
    """Points of one kind in Fig. 1."""

    kind: str
    """memory, hardest negatives, pair points, points with the query, or query."""
    x: list[float]
    """Horizontal places in the plane."""
    y: list[float]
    """Vertical places in the plane."""


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
    groups_of_places = {
        "memory": places[:num_memory][~is_hardest],
        "hardest negatives": places[:num_memory][is_hardest],
        "pair points": places[num_memory:first],
        "points with the query": places[first:-1],
        "query": places[-1:],
    }
    groups = [
        ToyPoints(kind, *([round(value, 3) for value in column] for column in rows.T.tolist()))
        for kind, rows in groups_of_places.items()
        if len(rows)
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


def fig1(groups: Sequence[ToyPoints], settings: dict[str, Any]) -> Picture:
    """Fig. 1: a query, its memory, its hardest negatives and the synthetic points, by t-SNE."""
    title = "Synthetic hard negatives on a toy sphere (Fig. 1)"
    with canvas(title, 4.6) as figure:
        axes = figure.subplots()
        handles = [
            axes.scatter(
                group.x,
                group.y,
                label=f"{group.kind} ({len(group.x)})" if len(group.x) > 1 else group.kind,
                linewidths=0,
                **LOOK[group.kind],
            )
            for group in groups
        ]
        axes.set(xlabel="first t-SNE dimension", ylabel="second t-SNE dimension")
        axes.set(xticks=[], yticks=[])
        legend_below(figure, handles, columns=3)
    numbers = {"settings": settings, "groups": [group._asdict() for group in groups]}
    caption = (
        "Random embeddings on the unit sphere. The query is a red square, the memory grey, and"
        " synthetic points are blue triangles. Points that mix two of the hardest negatives are"
        " among them; points mixed with the query are between them and the query. t-SNE keeps"
        " neighbours together; its distances have no unit."
    )
    return Picture("fig1", title, caption, numbers, figure)
