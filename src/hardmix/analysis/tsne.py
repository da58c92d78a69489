"""t-SNE: maps vectors to the plane, keeping neighbours together."""

import torch
from jaxtyping import Float
from torch import Tensor

from hardmix.errors import InputError
from hardmix.runtime.console import say

MOST = 5000
"""Most points of a map: more take minutes and hide each other."""
PERPLEXITY = 30.0
FEWEST = 5


def tsne(vectors: Float[Tensor, "n dim"], seed: int) -> Float[Tensor, "n 2"]:
    """Return places in the plane, reproducible by the seed, of at most `MOST` vectors."""
    number = len(vectors)
    if not FEWEST <= number <= MOST:
        raise InputError(f"t-SNE of {number} points: it needs {FEWEST} to {MOST}.")
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    say(f"t-SNE of {number} points: about {max(1, round(number / 100))} s ...")
    places = TSNE(
        perplexity=min(PERPLEXITY, (number - 1) / 3),
        init="pca" if vectors.shape[1] > 1 else "random",
        random_state=seed % 2**32,
    )
    # With several threads, sums are rounded in varying order, and the map differs each time.
    with threadpool_limits(limits=1):
        found = places.fit_transform(vectors.detach().float().cpu().numpy())
    return torch.from_numpy(found)
