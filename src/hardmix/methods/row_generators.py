"""Generators for mixing whose numbers do not depend on how many processes share a batch."""

import torch
from jaxtyping import Float
from torch import Tensor

from hardmix.mixing.random_draws import uniform_rows
from hardmix.runtime.random_numbers import seed_of


class RowsGenerator(torch.Generator):
    """Numbers that depend on the seed, the call, and a row's place in the batch of all processes.

    Nothing is drawn for other processes, and a row's numbers do not depend on how many there are.
    For whoever draws from it as from any generator, it is one, and the same on every process.
    """

    part: int = 0
    """Which of the equal parts of the batch, counted by rank, the rows are."""
    calls: int = 0
    """How often it was asked: every call is a purpose of its own."""

    def uniform_rows(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
    ) -> Float[Tensor, "rows columns"]:
        """Uniform numbers in [0, 1), made on the device."""
        seed = seed_of("rows", self.initial_seed(), self.calls)
        self.calls += 1
        return uniform_rows(seed, self.part * rows, rows, columns, dtype, device)


class RowDraws:
    """The numbers of a `RowsGenerator`, by an object that `torch.compile` takes into its graph.

    The seeds are an input of that graph: it serves every step.
    """

    MOST_CALLS = 8

    def __init__(self, seed: int, part: int = 0) -> None:
        self.part, self.calls = part, 0
        self.seeds = torch.tensor([seed_of("rows", seed, call) for call in range(self.MOST_CALLS)])

    def uniform_rows(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
    ) -> Float[Tensor, "rows columns"]:
        """Uniform numbers in [0, 1), made on the device."""
        seed = self.seeds[self.calls]
        self.calls += 1
        known = seed if torch.compiler.is_compiling() else int(seed)
        return uniform_rows(known, self.part * rows, rows, columns, dtype, device)
