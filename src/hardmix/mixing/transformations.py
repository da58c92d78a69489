"""Zhu et al. 2021: transform the features themselves before they are contrasted.

Positives are moved apart, q' = l q + (1 - l) k and k' = l k + (1 - l) q with l in (1, 2), and the
queue is mixed with itself, n' = l n + (1 - l) n_pi. As in the authors' code, the results are not
normalised again, each step has one l of each kind, and gradients flow through q'.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hardmix.errors import InputError
from hardmix.mixing.logits import Embeddings
from hardmix.mixing.random_draws import RandomSource


@dataclass(frozen=True)
class FeatureTransformation:
    """A change of the vectors that are contrasted; it makes no points."""

    positive_alpha: float | None = 2.0
    """l - 1 ~ Beta(alpha, alpha) for the positives; None leaves them as they are."""
    queue_alpha: float | None = 1.6
    """l ~ Beta(alpha, alpha) for the queue; None leaves it as it is."""

    def __post_init__(self) -> None:
        for name in ("positive_alpha", "queue_alpha"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(
                    f"{name}={value} must be a finite number above 0, or None for no change: it is"
                    " the parameter of a Beta distribution; the paper uses 2 and 1.6."
                )

    def transform(
        self,
        embeddings: Embeddings,
        exclude: Bool[Tensor, "batch columns"] | None,
        generator: RandomSource,
    ) -> tuple[Embeddings, Bool[Tensor, "batch columns"] | None]:
        """Return the vectors to contrast, and the mask: a mix with an excluded one is excluded."""
        if not (generator is None or isinstance(generator, torch.Generator)):
            raise InputError(
                f"generator={type(generator).__name__} draws numbers of each query, but a feature"
                " transformation needs one for the whole batch: pass a torch.Generator."
            )
        query, key, negatives = embeddings.query, embeddings.key, embeddings.negatives
        if self.positive_alpha is not None:
            query, key = extrapolated_positives(query, key, self.positive_alpha, generator)
        if self.queue_alpha is not None:
            share, order = _draws(negatives, self.queue_alpha, generator)
            negatives = share * negatives + (1 - share) * negatives[order]
            if exclude is not None:
                shared = exclude[:, : len(order)]
                exclude = torch.cat([shared | shared[:, order], exclude[:, len(order) :]], dim=1)
        return embeddings._replace(query=query, key=key, negatives=negatives), exclude


def extrapolated_positives(
    query: Float[Tensor, "batch dim"],
    key: Float[Tensor, "batch dim"],
    alpha: float = 2.0,
    generator: torch.Generator | None = None,
) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "batch dim"]]:
    """Return q' and k' of Zhu et al. 2021: further apart than q and k, and not normalised."""
    share = 1 + _beta(alpha, query, generator)
    return share * query + (1 - share) * key, share * key + (1 - share) * query


def mixed_queue(
    negatives: Float[Tensor, "K dim"],
    alpha: float = 1.6,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "K dim"]:
    """Return n' of Zhu et al. 2021: every negative mixed with another one, and not normalised."""
    share, order = _draws(negatives, alpha, generator)
    return share * negatives + (1 - share) * negatives[order]


def _draws(
    negatives: Tensor, alpha: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Draw the queue's l, and the order in which it is mixed with itself."""
    share = _beta(alpha, negatives, generator)
    if generator is None:
        return share, torch.randperm(len(negatives), device=negatives.device)
    # Generators cannot be compiled.
    order = torch.compiler.disable(torch.randperm)(
        len(negatives), generator=generator, device=generator.device
    )
    return share, order.to(negatives.device)


def _beta(alpha: float, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one number from Beta(alpha, alpha)."""
    if generator is None:
        return torch._sample_dirichlet(like.new_full((2,), alpha))[0]
    shapes = torch.full((2,), alpha, dtype=like.dtype, device=generator.device)
    drawn: Tensor = torch.compiler.disable(torch._sample_dirichlet)(shapes, generator)
    return drawn[0].to(like.device)
