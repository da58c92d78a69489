"""What MochiLoss is called with: vectors of any length, masks, and options."""

from collections.abc import Callable
from typing import NamedTuple, TypedDict

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hardmix.errors import InputError
from hardmix.mixing.checks import check_mask, check_not_transformed, check_own, check_shapes
from hardmix.mixing.filters import NegativeFilter
from hardmix.mixing.plans import DrawsByRow, Vectors
from hardmix.mixing.queue import MemoryQueue
from hardmix.mixing.unit_length import unit_vectors

Temperature = float | Tensor | Callable[[], Tensor]
"""A number, a tensor that may be learnt, or a function that returns one, such as
lambda: (-model.logit_scale).exp() for CLIP's."""


class CallOptions(TypedDict, total=False):
    """Options of every entry point of `MochiLoss`."""

    mix: bool
    """False for no points, as in the warm-up epochs (see `mixing_started`)."""
    generator: torch.Generator | DrawsByRow | None
    """The random number generator; None uses PyTorch's default."""
    normalised: bool
    """Promise that query and key are of unit length already."""
    check: bool | None
    """Whether to refuse vectors that are zero, NaN or infinite. None checks on a CPU only, as
    checking would synchronise a GPU. Unchecked, such vectors make the loss NaN."""
    own_negatives: Float[Tensor, "batch M dim"] | None
    """Further negatives of each query's own. Masks may have K or K + M columns."""
    positives: Bool[Tensor, "batch columns"] | None
    """Negatives that are positives too (SupCon), besides the key; they are not mixed."""
    sample_weights: Float[Tensor, " batch"] | None
    """How much each query counts in the mean, which is divided by their sum, or in the sum."""


class Call(NamedTuple):
    """The same, with their defaults."""

    mix: bool = True
    generator: torch.Generator | DrawsByRow | None = None
    normalised: bool = False
    check: bool | None = None
    own_negatives: Tensor | None = None
    positives: Tensor | None = None
    sample_weights: Tensor | None = None


class TakesPart(NamedTuple):
    """Which negatives are in the loss, and which are mixed: leading slots, less those of a mask."""

    exclude: Tensor | None
    not_mixed: Tensor | None
    in_loss: int | None = None
    """Number of leading slots; None for all."""
    mixed: int | None = None

    def without(self, dropped: Tensor) -> "TakesPart":
        """Leave out further negatives, given for all slots, of both."""
        in_loss, mixed = dropped[:, : self.in_loss], dropped[:, : self.mixed]
        return self._replace(
            exclude=either(self.exclude, in_loss), not_mixed=either(self.not_mixed, mixed)
        )


def who_takes_part(
    query: Tensor,
    negatives: Tensor | MemoryQueue,
    exclude: Tensor | None,
    by_slots: bool,
    num_own: int = 0,
) -> TakesPart:
    """Unfilled slots are not mixed, and not in the loss either with start="empty".

    by_slots: leave them out by their number, which the host knows, else by a mask.
    """
    exclude = widened(exclude, len(query), len(negatives), num_own)
    if not isinstance(negatives, MemoryQueue):
        return TakesPart(exclude, exclude)
    if by_slots:
        filled = negatives.filled
        not_mixed = None if exclude is None else exclude[:, :filled]
        if negatives.start == "empty":
            return TakesPart(not_mixed, not_mixed, filled, filled)
        return TakesPart(exclude, not_mixed, None, filled)
    unfilled = negatives.unfilled()
    if unfilled is None:
        return TakesPart(exclude, exclude)
    slots = widened(unfilled.expand(len(query), -1), len(query), len(negatives), num_own)
    not_mixed = either(exclude, slots)
    return TakesPart(not_mixed if negatives.start == "empty" else exclude, not_mixed)


def widened(
    mask: Tensor | None, batch: int, num_shared: int, num_own: int, name: str = "exclude"
) -> Tensor | None:
    """Return a mask with columns for the query's own negatives, too: False if it has none."""
    if mask is None or num_own == 0 or mask.shape[-1] != num_shared:
        check_mask(mask, batch, num_shared + num_own, name)
        return mask
    check_mask(mask, batch, num_shared, name)
    return torch.cat([mask, mask.new_zeros(batch, num_own)], dim=1)


def unit_embeddings(
    query: Tensor,
    key: Tensor,
    negatives: Tensor | MemoryQueue,
    check: bool | None,
    own: Tensor | None = None,
    normalised: bool = False,
) -> Vectors:
    """Return all at unit length in one dtype, float32 or better."""
    check_not_transformed()
    vectors = negatives.keys if isinstance(negatives, MemoryQueue) else negatives
    check_own(own, query)
    check_shapes(query, key, vectors, may_be_empty=own is not None)
    dtype = torch.promote_types(torch.promote_types(query.dtype, vectors.dtype), torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        if normalised:
            unit_query, unit_key = query.to(dtype), key.to(dtype)
        else:
            unit_query = unit_vectors("query", query, dtype, check)
            unit_key = unit_vectors("key", key, dtype, check)
        if isinstance(negatives, MemoryQueue):
            vectors = vectors.to(dtype)
        else:
            in_batch = negatives is key
            vectors = unit_key if in_batch else unit_vectors("negatives", vectors, dtype, check)
        if own is not None:
            rows = unit_vectors("own_negatives", own.flatten(0, 1), dtype, check)
            own = rows.view_as(own)
    return Vectors(unit_query, unit_key, vectors, own)


def shared_and_own(
    query: Tensor, negatives: Tensor | MemoryQueue, own: Tensor | None
) -> tuple[Tensor | MemoryQueue, Tensor | None]:
    """Return the shared negatives, and those of each query's own: `negatives` may be either."""
    if isinstance(negatives, MemoryQueue) or negatives.ndim != 3:
        return negatives, own
    if own is not None:
        raise InputError(
            f"negatives of shape {tuple(negatives.shape)} are each query's own, and own_negatives"
            " are given as well: concatenate the two, or pass shared negatives of shape (K, dim)."
        )
    check_own(negatives, query, "negatives")
    return query.new_empty(0, query.shape[-1]), negatives


def positives_of(vectors: Vectors, call: Call) -> Tensor | None:
    """Return the mask of further positives, with columns for all negatives."""
    num_own = 0 if vectors.own is None else vectors.own.shape[1]
    shared = len(vectors.negatives)
    return widened(call.positives, len(vectors.query), shared, num_own, "positives")


def filtered(
    chosen: NegativeFilter | None,
    vectors: Vectors,
    similarity: Tensor,
    takes_part: TakesPart,
    positives: Tensor | None,
) -> TakesPart:
    """Leave out what the filter takes for false negatives; positives are not mixed."""
    if chosen is not None:
        false = chosen(similarity, positive=(vectors.query * vectors.key).sum(dim=1))
        takes_part = takes_part.without(false if positives is None else false & ~positives)
    if positives is not None:
        takes_part = takes_part._replace(not_mixed=either(takes_part.not_mixed, positives))
    return takes_part


def reduced(per_query: Tensor, reduction: str, sample_weights: Tensor | None) -> Tensor:
    """Return the mean or the sum of the queries' losses, or these themselves."""
    if sample_weights is not None:
        if tuple(sample_weights.shape) != tuple(per_query.shape):
            raise InputError(
                f"sample_weights have shape {tuple(sample_weights.shape)}: they must hold one"
                f" number for each of the {len(per_query)} queries."
            )
        per_query = per_query * sample_weights
    if reduction == "none":
        return per_query
    total = per_query.sum()
    if reduction == "sum":
        return total
    if sample_weights is None:
        return per_query.mean()
    return total / sample_weights.sum()


def either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the mask of both."""
    if first is None or second is None:
        return second if first is None else first
    return first | second
