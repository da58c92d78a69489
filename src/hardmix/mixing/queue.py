"""The queue Q of Sec. 3.1: the last K keys, with the labels and ids of their images.

The state_dict holds keys, labels and ids, and the position and fill as extra state.
"""

from collections.abc import Callable
from typing import Any, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize

from hardmix.errors import InputError
from hardmix.mixing.checks import (
    check_labels,
    check_whole,
)
from hardmix.mixing.unit_length import unit_vectors
from hardmix.settings.facts import check_choice
from hardmix.settings.named_choices import QueueStart

UNKNOWN = -1
"""Label and id of a slot without one. Negative labels and ids never match."""

HALF = (torch.float16, torch.bfloat16)
"""Too coarse for keys: the length of a 3-dimensional vector would be off by 0.002."""


class MemoryQueue(nn.Module):
    """Sec. 3.1: a ring buffer of the last `size` keys, all of unit length.

    With `start="random"`, as in official MoCo, unfilled slots hold random unit vectors that count
    as negatives (`MochiLoss` never mixes them). With "empty", unfilled slots are ignored.
    `.half()` and `.bfloat16()` leave the keys in float32: rounded, their length would not be 1.
    """

    keys: Float[Tensor, "K dim"]
    """The negatives n, in slot order, of unit length."""
    labels: Int[Tensor, " K"]
    """Class of each key's image, -1 if unknown."""
    ids: Int[Tensor, " K"]
    """Index of each key's image in its data set, -1 if unknown."""

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        start: QueueStart = "random",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_whole(size=size, dim=dim)
        for name, value in [("size", size), ("dim", dim)]:
            if value < 1:
                raise InputError(
                    f"{name}={value} is below 1: a queue needs at least one slot and one dimension."
                )
        check_choice("start", start, get_args(QueueStart))
        self.start: QueueStart = start
        self.register_buffer("keys", normalize(torch.randn(size, dim, generator=generator), dim=1))
        self.register_buffer("labels", torch.full((size,), UNKNOWN))
        self.register_buffer("ids", torch.full((size,), UNKNOWN))
        # Position and fill. This is not a buffer, so that it stays on the CPU: nothing moves it to
        # a GPU, where reading it would have to wait, or broadcasts it.
        self._counters = torch.zeros(2, dtype=torch.int64, device="cpu")

    @classmethod
    def prefilled(
        cls,
        keys: Float[Tensor, "K dim"],
        labels: Int[Tensor, " K"] | None = None,
        ids: Int[Tensor, " K"] | None = None,
    ) -> "MemoryQueue":
        """Return a full queue that holds these keys."""
        _check_keys(keys)
        queue = cls(*keys.shape).to(keys.device)
        queue.enqueue(keys, labels, ids)
        return queue

    @property
    def position(self) -> int:
        """The slot that is written next."""
        return int(self._counters[0])

    @property
    def filled(self) -> int:
        """The number of slots that hold keys: slots 0 to filled - 1."""
        return int(self._counters[1])

    def __len__(self) -> int:
        """Return K, the number of slots."""
        return len(self.keys)

    @torch.no_grad()
    def enqueue(
        self,
        keys: Float[Tensor, "batch dim"],
        labels: Int[Tensor, " batch"] | None = None,
        ids: Int[Tensor, " batch"] | None = None,
        *,
        normalised: bool = False,
        check: bool | None = None,
    ) -> None:
        """Overwrite the oldest keys with these, in order; of more than K keys the last K are kept.

        Keys are normalised unless `normalised` says that they are already. One NaN would spoil
        every later loss: keys that are zero, NaN or infinite are refused on a CPU, and on a GPU
        only with check=True, as checking synchronises it.
        """
        _check_keys(keys, self.keys.shape[1])
        for name, values in [("labels", labels), ("ids", ids)]:
            if values is not None:
                check_labels(name, values, len(keys), "keys")
        if normalised:
            keys = keys.to(self.keys.dtype)
        else:
            keys = unit_vectors("keys", keys, self.keys.dtype, check)
        size, batch = len(self), len(keys)
        kept = min(batch, size)
        first = (self.position + batch - kept) % size
        before_wrap = min(kept, size - first)
        self._write(
            slice(first, first + before_wrap),
            slice(batch - kept, batch - kept + before_wrap),
            keys,
            labels,
            ids,
        )
        self._write(
            slice(0, kept - before_wrap),
            slice(batch - kept + before_wrap, batch),
            keys,
            labels,
            ids,
        )
        self._counters[0] = (self.position + batch) % size
        self._counters[1] = min(self.filled + batch, size)

    def _write(
        self, slots: slice, rows: slice, keys: Tensor, labels: Tensor | None, ids: Tensor | None
    ) -> None:
        if slots.start == slots.stop:
            return
        self.keys[slots].copy_(keys[rows])
        for stored, values in [(self.labels, labels), (self.ids, ids)]:
            if values is None:
                stored[slots].fill_(UNKNOWN)
            else:
                stored[slots].copy_(values[rows])

    def unfilled(self) -> Bool[Tensor, " K"] | None:
        """Return the mask of slots without a key; None once the queue is full."""
        # A tensor in torch.compile, so that one graph serves every fill.
        filled = self._counters[1] if torch.compiler.is_compiling() else self.filled
        if isinstance(filled, int) and filled == len(self):
            return None
        return torch.arange(len(self), device=self.keys.device) >= filled

    def same_class(self, labels: Int[Tensor, " batch"]) -> Bool[Tensor, "batch K"]:
        """Return the mask of each query's false negatives, the class oracle of Sec. 3.3."""
        check_labels("labels", labels)
        return equal_and_known(labels, self.labels)

    def same_id(self, ids: Int[Tensor, " batch"]) -> Bool[Tensor, "batch K"]:
        """Return the mask of older keys with each query's id: of its image, item or document."""
        check_labels("ids", ids)
        return equal_and_known(ids, self.ids)

    def same_image(self, ids: Int[Tensor, " batch"]) -> Bool[Tensor, "batch K"]:
        """Return `same_id`, by its older name."""
        return self.same_id(ids)

    def get_extra_state(self) -> Int[Tensor, "2"]:
        """Return position and fill as a tensor, which every format can store."""
        return self._counters

    def set_extra_state(self, state: Int[Tensor, "2"]) -> None:
        """Restore position and fill."""
        self._counters.copy_(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept state of older versions: position and fill as buffers, keys in half precision."""
        keys = state_dict.get(f"{prefix}keys")
        if isinstance(keys, Tensor) and keys.dtype in HALF:
            state_dict[f"{prefix}keys"] = unit_vectors("keys", keys, check=False)
        if f"{prefix}position" in state_dict and f"{prefix}filled" in state_dict:
            counters = [state_dict.pop(f"{prefix}{name}") for name in ("position", "filled")]
            state_dict[f"{prefix}_extra_state"] = torch.tensor([int(each) for each in counters])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MemoryQueue":
        keys = self.keys
        super()._apply(fn, recurse)
        if self.keys.dtype in HALF and keys.dtype not in HALF:
            self.keys = keys.to(self.keys.device)
        return self

    def extra_repr(self) -> str:
        """Return the text that print() shows."""
        size, dim = self.keys.shape
        return f"size={size}, dim={dim}, filled={self.filled}, start={self.start!r}"


def equal_and_known(
    values: Int[Tensor, " batch"], stored: Int[Tensor, " K"]
) -> Bool[Tensor, "batch K"]:
    """Return where stored labels or ids equal each sample's; unknown ones never match."""
    column = values.to(stored).unsqueeze(1)
    return (column == stored) & (column >= 0)


def _check_keys(keys: Tensor, dim: int | None = None) -> None:
    fits = keys.ndim == 2 and (dim is None or keys.shape[1] == dim)
    if not fits or not keys.is_floating_point():
        raise InputError(
            f"keys have shape {tuple(keys.shape)} and dtype {keys.dtype}: this queue takes"
            f" (batch, {dim or 'dim'}) floating-point vectors."
        )
