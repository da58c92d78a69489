"""log of a sum of exponentials over each row, in about one pass, and weights that take none.

Axes: batch, columns (negatives).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hardmix.mixing.checks import as_number
from hardmix.mixing.ranking import CACHE_ELEMENTS, in_one_piece, row_chunks

LOWEST = -1e30
"""Stands for the highest logit of a query that has no negative."""


class WeightLine(NamedTuple):
    """Logs of weights that are a line of the similarity: slope * q.n + offset.

    They are part of the logit's own factor, and no (batch, columns) tensor is made of them.
    """

    slope: float | Float[Tensor, "..."]
    """At least 0."""
    offset: Float[Tensor, "batch 1"] | None = None
    """Of each query; None: 0."""

    def weights(self, similarity: Float[Tensor, "batch columns"]) -> Tensor:
        """Return the log of each negative's weight."""
        logs = similarity * self.slope
        return logs if self.offset is None else logs.add_(self.offset)


class Exponentials(NamedTuple):
    """Terms of a sum over each row, each over the exponential of `highest`."""

    terms: Float[Tensor, "batch columns"]
    sums: Float[Tensor, "batch 1"]
    highest: Float[Tensor, "batch 1"]


def exponentials(
    values: Float[Tensor, "batch columns"],
    factor: float | Float[Tensor, "..."],
    exclude: Bool[Tensor, "batch columns"] | None = None,
    added: Float[Tensor, "batch columns"] | None = None,
    at_least: Float[Tensor, "batch 1"] | None = None,
    keep_terms: bool = True,
    overwrite: bool = False,
) -> Exponentials:
    """Return exp(factor * value + added - highest) and its sums; excluded ones are 0.

    `highest` is the highest of the row, but not below `at_least`. On a CPU in parts that stay in
    the cache, so that memory is read once; without `keep_terms` no terms are returned. `overwrite`:
    the terms may take the place of the values. New memory costs as much as a pass.
    """
    if in_one_piece(values):
        logits = values * factor
        logits = logits if added is None else logits + added
        logits = logits if exclude is None else logits.masked_fill(exclude, -torch.inf)
        highest = _highest(logits, 1.0, at_least)
        terms = (logits - highest).exp_()
        return Exponentials(terms, terms.sum(dim=1, keepdim=True), highest)
    number, width = as_number(factor), values.shape[1]
    chunks = row_chunks(len(values), width, elements=CACHE_ELEMENTS)
    at_once = len(values) if keep_terms else max((each.stop for each in chunks[:1]), default=0)
    space = values if keep_terms and overwrite else values.new_empty(at_once, width)
    sums, highest = values.new_empty(len(values), 1), values.new_empty(len(values), 1)
    for rows in chunks:
        terms = space[rows] if keep_terms else space[: rows.stop - rows.start]
        hidden, more, floor = (
            None if each is None else each[rows] for each in (exclude, added, at_least)
        )
        highest[rows] = _exponentials(values[rows], number, hidden, more, floor, terms)
        torch.sum(terms, dim=1, keepdim=True, out=sums[rows])
    return Exponentials(space if keep_terms else values[:, :0], sums, highest)


def log_sum(
    values: Float[Tensor, "batch columns"],
    factor: float | Float[Tensor, "..."],
    exclude: Bool[Tensor, "batch columns"] | None = None,
    added: Float[Tensor, "batch columns"] | None = None,
) -> Float[Tensor, "batch 1"]:
    """Return log of the sum of exp(factor * value + added) over each row; -inf if it is empty."""
    _, sums, highest = exponentials(values, factor, exclude, added, keep_terms=False)
    return sums.log_().add_(highest)


def _exponentials(
    values: Tensor,
    factor: float,
    exclude: Tensor | None,
    added: Tensor | None,
    at_least: Tensor | None,
    terms: Tensor,
) -> Tensor:
    """Write the terms of some rows, and return their highest logits."""
    if added is not None:
        values, factor = torch.add(added, values, alpha=factor, out=terms), 1.0
    if exclude is not None:
        values = terms.copy_(values).masked_fill_(exclude, -torch.inf)
    highest = _highest(values, factor, at_least)
    torch.add(-highest, values, alpha=factor, out=terms).exp_()
    return highest


def _highest(values: Tensor, factor: float, at_least: Tensor | None) -> Tensor:
    highest = (values.amax(dim=1, keepdim=True) * factor).clamp_(min=LOWEST)
    return highest if at_least is None else torch.maximum(highest, at_least)
