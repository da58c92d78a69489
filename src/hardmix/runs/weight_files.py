"""Tensors by name from any weights file, without ever running code that is in it."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hardmix.errors import InputError

NESTED = ("state_dict", "model_state_dict", "model")
"""Where checkpoints keep their weights."""


class Source(NamedTuple):
    """A file's tensors, what a safetensors file says of itself, and a checkpoint's epoch."""

    tensors: dict[str, Tensor]
    facts: dict[str, str]
    epoch: int | None


def read_weights(file: Path) -> Source:
    """Tensors of a safetensors file, or of what torch.save wrote; no code in it is run."""
    try:
        with file.open("rb") as opened:
            start = opened.read(40)
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror}; give a weights file (.pth, .pth.tar, .pt,"
            " .bin or .safetensors)."
        ) from error
    if start[8:9] == b"{":
        return read_safetensors(file)
    try:
        with warnings.catch_warnings(action="ignore"):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are no pickle raise nearly anything
        raise InputError(_why_not(file, start, str(error))) from error
    return _unwrap(file, content)


def read_safetensors(file: Path) -> Source:
    """Tensors of a safetensors file, and what it says of itself."""
    try:
        with safe_open(file, "pt") as opened:
            facts = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{file} is no whole safetensors file: {error}; copy or download it again."
        ) from error
    return Source(tensors, facts, None)


def _why_not(file: Path, start: bytes, error: str) -> str:
    needs = re.search(r"GLOBAL ([\w.]+)|(TorchScript)", error)
    if needs is None:
        return (
            f"{file} is not a weights file, or not a whole one"
            + (f" (it starts with {start[:20]!r})" if start else " (it is empty)")
            + ": copy or download it again, or give what torch.save(model.state_dict()) wrote."
        )
    return (
        f"{file} needs {needs[1] or needs[2]}, and hardmix runs no code from a file: save it again"
        " as plain tensors, with the program that wrote it and where you trust it:"
        " safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')."
    )


def _unwrap(file: Path, content: Any) -> Source:
    """Tensors of a part with a known name, else of what holds most: the whole, or another part."""
    whole: dict[Any, Any] = dict(content) if isinstance(content, Mapping) else {}
    known = [_named_tensors(whole.get(name)) for name in NESTED]
    others = [_named_tensors(part) for part in (whole, *whole.values())]
    tensors = next(filter(None, known), None) or max(others, key=len)
    if not tensors:
        names = [str(name) for name in whole]
        held = f"the names {first_names(names)}" if names else f"a {type(content).__name__}"
        raise InputError(
            f"{file} holds no tensors by name, but {held}: give what torch.save(model.state_dict())"
            " wrote."
        )
    epoch = whole.get("epoch")
    return Source(tensors, {}, epoch if isinstance(epoch, int) else None)


def _named_tensors(part: Any) -> dict[str, Tensor]:
    pairs = part.items() if isinstance(part, Mapping) else ()
    return {str(name): each for name, each in pairs if isinstance(each, Tensor)}


def first_names(names: list[str]) -> str:
    """Three of them, for messages."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
