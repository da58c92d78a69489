"""Reads named tensors from any weights file, without executing code in it."""

import json
import pickletools
import re
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hardmix.errors import InputError
from hardmix.runtime.files import check_file, most_weights, open_file

NESTED = ("state_dict", "model_state_dict", "model")
"""Names under which checkpoints store their weights."""
SAFE_TORCH = (2, 10)
"""The first version whose weights_only holds."""
MOST_GROWTH = 10_000_000
"""Bytes by which an archive may grow when unpacked: source code in TorchScript's is compressed."""
MOST_OPERATIONS = 2_000_000
"""Most operations of a pickle: each may take a hundred bytes of memory."""
LEGACY_PICKLES = 5
"""Pickles at the start of a file written by torch before 1.6; raw numbers follow."""


class SavedWeights(NamedTuple):
    """A file's tensors, the metadata of a safetensors file, and a checkpoint's epoch."""

    tensors: dict[str, Tensor]
    facts: dict[str, str]
    epoch: int | None


def read_weights(file: Path) -> SavedWeights:
    """Read the tensors of a safetensors or torch.save file; no code in it is executed."""
    try:
        with open_file(file, most_weights()) as opened:
            start = opened.read(40)
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror}; use a weights file (.pth, .pth.tar, .pt,"
            " .bin or .safetensors)."
        ) from error
    if start[8:9] == b"{":
        return read_safetensors(file)
    _check_torch(file)
    _check_sizes(file, zipped=start.startswith(b"PK\x03\x04"))
    try:
        with warnings.catch_warnings(action="ignore"):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are not a pickle raise nearly anything
        raise InputError(_why_not(file, start, str(error))) from error
    return _unwrap(file, content)


def _check_torch(file: Path) -> None:
    """Refuse pickles with versions of torch whose weights_only can be made to execute code."""
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < SAFE_TORCH:
        raise InputError(
            f"{file} is a file of torch.save, which torch {torch.__version__} does not read safely:"
            f" update to torch {'.'.join(map(str, SAFE_TORCH))} or newer, or convert the file to"
            " safetensors where it comes from."
        )


def _check_sizes(file: Path, zipped: bool) -> None:
    """Raise InputError if reading would fill the memory: torch.save does not compress."""
    if not zipped:
        with file.open("rb") as opened:
            _check_operations(file, _operations(opened, LEGACY_PICKLES))
        return
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError):
        return  # torch reports the problem
    with archive:
        records = archive.infolist()
        held, there = sum(each.file_size for each in records), file.stat().st_size
        if held > there + MOST_GROWTH:
            raise InputError(
                f"{file} has {there / 1e6:.1f} MB and expands to {held / 1e6:.1f} MB, which weights"
                " files do not: save it again with torch.save."
            )
        for record in records:
            if record.filename.endswith("data.pkl"):
                with archive.open(record) as opened:
                    _check_operations(file, _operations(opened, 1))


def _operations(opened: Any, pickles: int) -> int:
    """Return the number of operations, as far as readable, counted to one above the limit."""
    operations = chain.from_iterable(pickletools.genops(opened) for _ in range(pickles))
    number = 0
    with suppress(Exception):  # bytes that are not a pickle raise nearly anything
        for number, _ in enumerate(islice(operations, MOST_OPERATIONS + 1), start=1):  # noqa: B007
            pass
    return number


def _check_operations(file: Path, number: int) -> None:
    """Raise InputError if there are too many: weights need thousands, millions fill the memory."""
    if number > MOST_OPERATIONS:
        raise InputError(
            f"{file} needs more than {MOST_OPERATIONS} operations to be read, far more than names"
            " and shapes of tensors: save it again as plain tensors, with"
            " torch.save(model.state_dict())."
        )


def read_safetensors(file: Path) -> SavedWeights:
    """Read the tensors and metadata of a safetensors file."""
    try:
        check_file(file, most_weights())
        with safe_open(file, "pt") as opened:
            facts = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{file} is not an intact safetensors file: {error}; copy or download it again."
        ) from error
    return SavedWeights(tensors, facts, None)


def pack_safetensors(tensors: dict[str, Tensor], facts: dict[str, str]) -> bytes:
    """Return a safetensors file with its metadata in this order: equal bytes for equal content.

    The library writes metadata in an order that varies from call to call.
    """
    plain = save(tensors)
    start = 8 + int.from_bytes(plain[:8], "little")
    header = {"__metadata__": facts, **json.loads(plain[8:start])}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # as the library aligns it
    return len(text).to_bytes(8, "little") + text + plain[start:]


def _why_not(file: Path, start: bytes, error: str) -> str:
    needs = re.search(r"GLOBAL ([\w.]+)|(TorchScript)", error)
    if needs is None:
        return (
            f"{file} is not a weights file, or is incomplete"
            + (f" (it starts with {start[:20]!r})" if start else " (it is empty)")
            + ": copy or download it again, or use what torch.save(model.state_dict()) wrote."
        )
    return (
        f"{file} needs {needs[1] or needs[2]}, but hardmix executes no code from a file: save it"
        " again as plain tensors, with the program that wrote it and if you trust it:"
        " safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')."
    )


def _unwrap(file: Path, content: Any) -> SavedWeights:
    """Return the tensors of a part with a known name, or of the part with the most tensors."""
    whole: dict[Any, Any] = dict(content) if isinstance(content, Mapping) else {}
    known = [_named_tensors(whole.get(name)) for name in NESTED]
    others = [_named_tensors(part) for part in (whole, *whole.values())]
    tensors = next(filter(None, known), None) or max(others, key=len)
    if not tensors:
        names = [str(name) for name in whole]
        held = f"the names {first_names(names)}" if names else f"a {type(content).__name__}"
        raise InputError(
            f"{file} contains no named tensors, but {held}: use what torch.save(model.state_dict())"
            " wrote."
        )
    epoch = whole.get("epoch")
    return SavedWeights(tensors, {}, epoch if isinstance(epoch, int) else None)


def _named_tensors(part: Any) -> dict[str, Tensor]:
    pairs = part.items() if isinstance(part, Mapping) else ()
    return {str(name): each for name, each in pairs if isinstance(each, Tensor)}


def first_names(names: list[str]) -> str:
    """Return the first three names, for messages."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
