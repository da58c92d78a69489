"""Checkpoints: everything a run needs to resume, either complete or absent.

A checkpoint is a safetensors file and a JSON manifest with its sha256, written in that order, each
to a temporary file that is synced and renamed. The tensors are named by their content, because a
step may be saved twice with different tensors (PCL clusters between two steps): the first ones stay
until the manifest names the second. The two newest are kept, and so are those marked to be kept and
the best by k-NN, which best.json names. One that does not match its checksum is skipped.
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
from hardmix.runtime.distributed import broadcast, broadcast_object, is_main
from hardmix.runtime.files import most_weights, read_file, read_json, sync_folder, write_atomically

FORMAT = 3
"""1 has no checksum of the manifest; since 3, tensors are named by their content."""
BITS = 4
"""Raised by one when the same settings give other bits, for example because random numbers are
drawn in another way; CHANGELOG names the causes. Older runs can be resumed, with a notice."""
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
    digest = hashlib.sha256(data).hexdigest()
    weights = folder / f"step-{step:08d}-{digest[:12]}.safetensors"
    manifest = {
        "format": FORMAT,
        "step": step,
        "file": weights.name,
        "sha256": digest,
        "versions": versions,
        **facts,
    }
    manifest["checksum"] = _checksum(manifest)
    # The same step may be saved twice, before and after its k-NN: an intact file is not rewritten.
    if _sha256(weights) != digest:
        write_atomically(weights, data)
    write_atomically(folder / f"step-{step:08d}.json", json.dumps(manifest, indent=2).encode())
    _complete(folder, facts.get("best"))
    return weights


def _complete(folder: Path, best: dict[str, Any] | None) -> None:
    """Name the best checkpoint, and delete those not to be kept."""
    if best is not None and _read(folder / BEST) != best:
        write_atomically(folder / BEST, json.dumps(best, indent=2).encode())
    _rotate(folder)


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
        tensors = _tensors(folder, manifest) if _is_of(file, manifest) else None
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


def step_named(folder: Path, name: str) -> str:
    """Return the name of a step's checkpoint, given that name or the number of an epoch."""
    steps = {file.stem: _read(file) or {} for file in sorted(folder.glob("step-*.json"))}
    ends = {
        str(each.get("epoch")): step for step, each in steps.items() if not each.get("position")
    }
    step = ends.get(name, name)
    if step not in steps:
        known = ", ".join(f"{each} (epoch {epoch})" for epoch, each in ends.items()) or "none"
        raise InputError(
            f"checkpoint={name}: {folder} has no such checkpoint, but {known}. Name a step or the"
            " number of an epoch; --train.keep-every keeps checkpoints for good."
        )
    return step


def load_named(folder: Path, name: str) -> Checkpoint:
    """Load a checkpoint by its step ("step-00000012") or by the epoch that it ends ("100")."""
    file = folder / f"{step_named(folder, name)}.json"
    manifest = _read(file) or {}
    _check_format(file, manifest)
    tensors = _tensors(folder, manifest) if _is_of(file, manifest) else None
    if tensors is None:
        raise InputError(f"checkpoint={name}: {file} does not match its checksums; use another.")
    return Checkpoint(tensors, manifest, [])


def load_to_resume(folder: Path) -> Checkpoint | None:
    """Load the newest intact checkpoint, and complete its save, which may have been killed."""
    found = load_newest(folder)
    if found is not None:
        best = found.manifest.get("best")
        _complete(folder, best if isinstance(best, dict) else None)
    return found


def _rotate(folder: Path) -> None:
    best = (_read(folder / BEST) or {}).get("checkpoint")
    for old in sorted(folder.glob("step-*.json"))[:-KEPT]:
        if old.stem != best and not (_read(old) or {}).get("keep"):
            old.unlink()
    _delete_unnamed(folder)
    sync_folder(folder)


def _delete_unnamed(folder: Path) -> None:
    """Delete tensors without a manifest, as a deleted, repeated or killed save leaves them.

    While the manifest of a step is damaged, all tensors of the step are kept.
    """
    manifests = {file: _read(file) or {} for file in folder.glob("step-*.json*")}
    named = {str(each.get("file")) for each in manifests.values() if _is_whole(each)}
    unclear = {file.name.split(".")[0] for file, each in manifests.items() if not _is_whole(each)}
    for weights in folder.glob("step-*.safetensors"):
        step = "-".join(weights.stem.split("-")[:2])
        if weights.name not in named and step not in unclear:
            weights.unlink()


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _tensors(folder: Path, manifest: dict[str, Any]) -> dict[str, Tensor] | None:
    """Return the tensors, read once and verified; None if they are not what was written."""
    if not _is_whole(manifest):
        return None
    try:
        # Only the name, so that somebody else's manifest cannot lead out of the folder.
        data = read_file(folder / Path(str(manifest["file"])).name, most_weights())
        if hashlib.sha256(data).hexdigest() != manifest.get("sha256"):
            return None
        return load(data)
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def _is_of(file: Path, manifest: dict[str, Any]) -> bool:
    """Return whether a manifest is of the step in its name."""
    step = manifest.get("step")
    return type(step) is int and file.stem == f"step-{step:08d}"


def _is_whole(manifest: dict[str, Any]) -> bool:
    return manifest.get("checksum") == _checksum(manifest) or manifest.get("format") == 1


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
    shapes = broadcast_object({k: list(v.shape) for k, v in tensors.items()})
    if not is_main():
        tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    restore_optimizer(optimizer, tensors)
    for value in optimizer_tensors(optimizer).values():
        broadcast(value)
