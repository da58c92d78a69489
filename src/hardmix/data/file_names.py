"""The names of a million files as two arrays.

A tuple of strings takes 120 bytes a name, and a worker process that only looks at them gets a copy
of its own, as every string counts its users. Arrays are shared by all.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from jaxtyping import Int64, UInt8
from numpy.typing import NDArray
from torch import Tensor


class FileNames(Sequence[str]):
    """A sequence of names; equal to any other sequence of the same ones."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        coded = [os.fsencode(name) for name in names]
        self._set(_joined(coded), np.cumsum([len(each) for each in coded], dtype=np.int64))

    @classmethod
    def of_arrays(
        cls, text: UInt8[np.ndarray, " bytes"], ends: Int64[np.ndarray, " n"]
    ) -> "FileNames":
        """Names one after another, and where each ends."""
        made = cls.__new__(cls)
        made._set(text, ends)
        return made

    def _set(self, text: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.text, self.ends = text, ends

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "FileNames": ...
    def __getitem__(self, index: int | slice) -> "str | FileNames":
        if isinstance(index, slice):
            return self.select(np.arange(*index.indices(len(self))))
        place = range(len(self))[index]
        start = self.ends[place - 1] if place else 0
        return os.fsdecode(self.text[start : self.ends[place]].tobytes())

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self.ends.tolist():
            yield os.fsdecode(self.text[start:end].tobytes())
            start = end

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FileNames):
            same = np.array_equal(self.ends, other.ends)
            return same and np.array_equal(self.text, other.text)
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # as of other sequences that are not tuples

    def __repr__(self) -> str:
        return f"FileNames({list(self[:3])}{', ...' * (len(self) > 3)})"

    def select(self, indices: NDArray[Any] | Tensor) -> "FileNames":
        """Return the names with these indices, in this order."""
        chosen = np.asarray(indices)
        starts = np.append(np.int64(0), self.ends[:-1])[chosen] if len(self) else self.ends[:0]
        lengths = self.ends[chosen] - starts
        ends = np.cumsum(lengths, dtype=np.int64)
        # Each byte's place: the start of its name, and how far it is into it.
        into = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        return FileNames.of_arrays(self.text[np.repeat(starts, lengths) + into], ends)


def _joined(coded: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(coded), dtype=np.uint8)
