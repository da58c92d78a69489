"""Checkpoints: everything a run needs to resume, either complete or absent.

A checkpoint is a safetensors file and a JSON manifest with its sha256, written in that order, each
to a temporary file that is synced and renamed. Kept are the two newest, those marked to be kept,
and the best by k-NN, named in best.json. One that does not match its checksum is skipped.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from hardmix.errors import InputError
from hardmix.runtime.atomic_files import sync_folder, write_atomically
from hardmix.runtime.distributed import broadcast, broadcast_text, is_main
from hardmix.settings.saved import read_json

FORMAT = 2
BITS = 4
"""Raised when the same settings give other bits, as random numbers drawn in another way do; the
causes stand in CHANGELOG. Runs of older versions go on, and say that they do so with other bits."""
KEPT = 2
BEST = "best.json"


class Checkpoint(NamedTuple):
    """A checkpoint, and the names of newer ones that are damaged."""

    tensors: dict[str, Tensor]
    manifest: dict[str, Any]
    broken: list[str]


def write_checkpoint(
    folder: Path, step: int, data: bytes, facts: dict[str, Any], versions: dict[str, str]
) -> Path:
    """Write a checkpoint of these bytes (see `pack`), then delete those not to be kept.

    facts["keep"] protects it from deletion, facts["best"] is the step of the best checkpoint.
    """
    folder.mkdir(exist_ok=True)
    weights = folder / f"step-{step:08d}.safetensors"
    manifest = {
        "format": FORMAT,
        "step": step,
        "file": weights.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "versions": versions,
        **facts,
    }
    manifest["checksum"] = _checksum(manifest)
    # The same step may be saved twice, before and after its k-NN: an intact file is not rewritten.
    if _sha256(weights) != manifest["sha256"]:
        write_atomically(weights, data)
    write_atomically(weights.with_suffix(".json"), json.dumps(manifest, indent=2).encode())
    best = facts.get("best")
    if best is not None and _read(folder / BEST) != best:
        write_atomically(folder / BEST, json.dumps(best, indent=2).encode())
    _rotate(folder)
    return weights


def pack(tensors: dict[str, Tensor]) -> bytes:
    """Return the bytes of a safetensors file."""
    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})


def load_newest(folder: Path, *, set_aside: bool = True) -> Checkpoint | None:
    """Load the newest intact checkpoint; None if there are no checkpoints.

    Newer ones that are damaged are renamed, so that they are not tried again, unless `set_aside`
    is False, for readers of a folder that another process may be writing to.
    """
    broken: list[str] = []
    for file in sorted(folder.glob("step-*.json"), reverse=True):
        manifest = _read(file) or {}
        _check_format(file, manifest)
        tensors = _tensors(folder, manifest)
        if tensors is not None:
            for name in broken if is_main() and set_aside else []:
                (folder / name).replace(folder / f"{name}.broken")
            return Checkpoint(tensors, manifest, broken)
        broken.append(file.name)
    if broken:
        raise InputError(
            f"{folder} has no intact checkpoint: {', '.join(broken)} do not match their checksums;"
            " start again in another folder."
        )
    return None


def _rotate(folder: Path) -> None:
    files = sorted(folder.glob("step-*.json"))
    best = (_read(folder / BEST) or {}).get("checkpoint")
    for old in files[:-KEPT]:
        if old.stem == best or (_read(old) or {}).get("keep"):
            continue
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)
    # Left by a save that was killed between its two files.
    named = {file.name.split(".")[0] for file in folder.glob("step-*.json*")}
    for weights in folder.glob("step-*.safetensors"):
        if weights.stem not in named:
            weights.unlink()
    sync_folder(folder)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _tensors(folder: Path, manifest: dict[str, Any]) -> dict[str, Tensor] | None:
    """Return the tensors, read once and verified; None if they are not what was written."""
    if manifest.get("checksum") != _checksum(manifest) and manifest.get("format") != 1:
        return None
    try:
        data = (folder / str(manifest["file"])).read_bytes()
        if hashlib.sha256(data).hexdigest() != manifest.get("sha256"):
            return None
        return load(data)
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def _checksum(manifest: dict[str, Any]) -> str:
    """Return the checksum of the manifest itself, so that damage to it is noticed too."""
    facts = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None


def _check_format(file: Path, manifest: dict[str, Any]) -> None:
    found = manifest.get("format", FORMAT)
    whole = manifest.get("checksum") == _checksum(manifest)
    if whole and isinstance(found, int) and found > FORMAT:
        version = (manifest.get("versions") or {}).get("hardmix", "a newer version")
        raise InputError(
            f"{file} has format {found}, but this version of hardmix reads up to {FORMAT}: resume"
            f" with hardmix {version}, which wrote it."
        )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's state; "3.momentum_buffer" belongs to the fourth parameter."""
    return {
        f"{number}.{name}": value
        for number, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load what `optimizer_tensors` returned; a bare number is SGD's momentum (old versions).

    State of a parameter's shape gets its memory format, as fused optimizers require.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    values: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        parameter = parameters[int(number)]
        if tensor.shape == parameter.shape:
            tensor = torch.empty_like(parameter).copy_(tensor)
        values.setdefault(int(number), {})[name or "momentum_buffer"] = tensor
    state = optimizer.state_dict()
    state["state"] = values
    optimizer.load_state_dict(state)


def share_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Run `restore_optimizer` on every rank, with the tensors that rank 0 has read."""
    shapes = json.loads(broadcast_text(json.dumps({k: list(v.shape) for k, v in tensors.items()})))
    if not is_main():
        tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    restore_optimizer(optimizer, tensors)
    for value in optimizer_tensors(optimizer).values():
        broadcast(value)
