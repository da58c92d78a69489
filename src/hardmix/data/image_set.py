"""Images by number: held in memory, or in files that are decoded when they are needed."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import numpy as np
import torch
from jaxtyping import Int, Int64, UInt8
from numpy.typing import NDArray
from torch import Tensor

from hardmix.data.cache import ImageCache
from hardmix.data.image_files import MAX_PIXELS, printable, read_image
from hardmix.errors import InputError
from hardmix.runtime.random_numbers import seed_of

Split = Literal["train", "test"]

UNKNOWN = -1
"""The label of an image whose class is not known, in a set where others are."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images by number, with or without labels."""

    name: str
    """Name of the set in messages."""
    labels: Int[Tensor, " n"] | None
    """Class number of each image, -1 if unknown; None if no image has a label."""
    classes: tuple[str, ...] | None
    """Names of the classes."""
    tensor: UInt8[Tensor, "n channels height width"] | None = None
    """The images, if they are held in memory."""
    files: Sequence[str] | None = None
    """Paths of the images if they are on disk, or other names that `read` accepts."""
    channels: int = 3
    """Number of channels of every image."""
    max_pixels: int = MAX_PIXELS
    """Files with more pixels are refused."""
    read: Callable[[str, int, int], Tensor] = read_image
    """Function from a file, channels and max_pixels to uint8 pixels, called by workers."""
    cache: ImageCache | None = None
    """Decoded images of the set that these were selected from."""
    rows: Int[Tensor, " n"] | None = None
    """Numbers of these images in that set; None if they are all of it, in order."""
    state: str = ""
    """Other facts that the pixels depend on; when they change, decoded images are invalid."""

    def __post_init__(self) -> None:
        if self.files is not None and not isinstance(self.files, FileNames):
            object.__setattr__(self, "files", FileNames(self.files))

    def __len__(self) -> int:
        if self.tensor is not None:
            return len(self.tensor)
        return len(self.files or ())

    def image(self, index: int) -> UInt8[Tensor, "channels height width"]:
        """Return one image; raise `UnreadableImage` if its file cannot be decoded."""
        if self.tensor is not None:
            return self.tensor[index]
        assert self.files is not None
        if self.cache is not None:
            kept = self.cache.image(index if self.rows is None else int(self.rows[index]))
            if kept is not None:
                return kept
        return self.read(self.files[index], self.channels, self.max_pixels)

    def together(self, indices: list[int]) -> UInt8[Tensor, "m channels height width"] | None:
        """Return several images, or None unless all are decoded, small and of one size."""
        if self.cache is None or self.cache.kept is None:
            return None
        rows = indices if self.rows is None else self.rows[indices].tolist()
        return self.cache.kept.images(rows)

    def decode_once(self, epochs: bool = False) -> "ImageSet":
        """Decode the images now, and keep them if data.cache and the time it takes suggest so.

        A small part of a set is decoded only if `epochs` of it will be read, and then by itself.
        """
        cache = self.cache
        if cache is None or cache.find():
            return self
        if 2 * len(self) >= len(cache.files):
            cache.fill()
        elif epochs and self.rows is not None:
            cache = cache.only(self.files or (), self.rows)
            cache.fill()
            return replace(self, cache=cache, rows=None)
        return self

    def name_of(self, index: int) -> str:
        """Return the path of an image, or a name such as "cifar10[123]"."""
        return f"{self.name}[{index}]" if self.files is None else printable(self.files[index])

    def select(self, indices: Int[Tensor, " m"]) -> "ImageSet":
        """Return the images with these indices, in this order."""
        return replace(
            self,
            labels=None if self.labels is None else self.labels[indices],
            tensor=None if self.tensor is None else self.tensor[indices],
            files=self.files.select(indices) if isinstance(self.files, FileNames) else None,
            rows=indices if self.rows is None else self.rows[indices],
        )

    def subset(self, num_images: int | None, seed: int) -> "ImageSet":
        """Return at most `num_images` images, chosen at random by the seed, in order."""
        if num_images is None or num_images >= len(self):
            return self
        order = torch.randperm(
            len(self), generator=torch.Generator().manual_seed(seed_of("subset", seed))
        )
        return self.select(order[:num_images].sort().values)

    def labelled(self) -> "ImageSet":
        """Return the images whose class is known; raise InputError if there are none."""
        known = torch.zeros(0) if self.labels is None else self.labels != UNKNOWN
        if not bool(known.any()):
            raise InputError(
                f"{self.name} has no labels: this needs images in folders named by class."
            )
        return self if bool(known.all()) else self.select(known.nonzero().flatten())


class FileNames(Sequence[str]):
    """The names of a million files as two arrays; equal to any other sequence of the same names.

    A tuple of strings takes 120 bytes per name, and worker processes that only read it get a copy
    of their own, because every string counts its references. Arrays are shared.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        coded = [os.fsencode(name) for name in names]
        self.text: NDArray[np.uint8] = np.frombuffer(b"".join(coded), dtype=np.uint8)
        self.ends: NDArray[np.int64] = np.cumsum([len(each) for each in coded], dtype=np.int64)

    @classmethod
    def of_arrays(
        cls, text: UInt8[np.ndarray, " bytes"], ends: Int64[np.ndarray, " n"]
    ) -> "FileNames":
        """Build from the text of all names, and the place where each ends."""
        names = cls()
        names.text, names.ends = text, ends
        return names

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
            same_ends = np.array_equal(self.ends, other.ends)
            return same_ends and np.array_equal(self.text, other.text)
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # like other sequences that are not tuples

    def __repr__(self) -> str:
        return f"FileNames({list(self[:3])}{', ...' * (len(self) > 3)})"

    def select(self, indices: NDArray[Any] | Tensor) -> "FileNames":
        """Return the names with these indices, in this order."""
        chosen = np.asarray(indices)
        starts = np.append(np.int64(0), self.ends[:-1])[chosen] if len(self) else self.ends[:0]
        lengths = self.ends[chosen] - starts
        ends = np.cumsum(lengths, dtype=np.int64)
        # The place of each byte: the start of its name, and its distance from there.
        into = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        return FileNames.of_arrays(self.text[np.repeat(starts, lengths) + into], ends)
