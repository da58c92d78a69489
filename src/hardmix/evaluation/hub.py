"""Encoders on the Hugging Face Hub: folders as `hardmix export --format hf` writes them.

huggingface_hub is imported only if a name begins with "hf:" or a folder is uploaded. Only weights,
config and model card are downloaded; no code in them is executed.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from hardmix.errors import InputError
from hardmix.runs.folder import Run

WEIGHTS, CONFIG, CARD, PREPROCESSING = (
    "model.safetensors",
    "config.json",
    "README.md",
    "preprocessor_config.json",
)
"""The files of such a folder, under the names that the Hub knows."""
NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
"""hf:owner/name, or hf:owner/name@revision."""


def is_shared(folder: Path) -> bool:
    """Return whether a folder is one for the Hub, and not a run."""
    return (folder / WEIGHTS).exists() and not Run(folder).encoder_file.exists()


def encoder_file(place: Path) -> Path:
    """Return the encoder's file in a run or in a folder for the Hub; a file is itself."""
    if not place.is_dir():
        return place
    return place / WEIGHTS if is_shared(place) else Run.open(place).encoder_file


def located(name: Path | str, **options: Any) -> Path:
    """Return a path as it is, and "hf:owner/name" as the folder that it is downloaded to.

    `options` are those of huggingface_hub's `snapshot_download`, such as `cache_dir`.
    """
    if not str(name).startswith("hf:"):
        return Path(name)
    found = NAME.fullmatch(str(name))
    if found is None:
        raise InputError(f"{name} must have the form hf:owner/name, or hf:owner/name@revision.")
    hub = _import_hub(str(name))
    options.setdefault("revision", found[2])
    files = [WEIGHTS, CONFIG, CARD, PREPROCESSING]
    try:
        folder = Path(hub.snapshot_download(found[1], allow_patterns=files, **options))
    except Exception as error:  # whatever a download raises
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{name} could not be downloaded ({type(error).__name__}: {reason}); check the name, or"
            " download the folder elsewhere and name it instead."
        ) from error
    if not (folder / WEIGHTS).exists():
        raise InputError(f"{name} has no {WEIGHTS}: choose one that hardmix export wrote.")
    return folder


def upload(
    folder: Path | None, name: str, *, private: bool | None, token: str | None, message: str
) -> str:
    """Upload a folder that `hardmix export --format hf` wrote; return the address of the commit."""
    if folder is None or not is_shared(folder):
        raise InputError(
            "only a folder with a model card can be uploaded: write it with hardmix export RUN"
            " --format hf --out DIR, read DIR/README.md, and call"
            ' hardmix.load_encoder("DIR").push_to_hub("owner/name").'
        )
    api = _import_hub("push_to_hub").HfApi(token=token)
    name = api.create_repo(repo_id=name, private=private, exist_ok=True).repo_id
    return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message=message))


def _import_hub(wanted_by: str) -> Any:
    try:
        return import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        raise InputError(
            f"{wanted_by} needs {error.name}, which is not installed: pip install 'hardmix[hf]'."
        ) from error
