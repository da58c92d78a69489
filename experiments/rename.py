"""Files records of runs under their right names.

    python experiments/rename.py FILE... [--to FOLDER]

Runs on CIFAR-100 were called cifar10-*, after their recipe. Each record is written to FOLDER, or
beside itself, as cifar100-*, with that name inside; nothing else in it changes. A file under its
old name in the same folder is deleted. Measures are neither read nor printed.
"""

import argparse
import json
from pathlib import Path

RECIPE, IMAGES = "cifar10", "cifar100"


def main() -> None:
    """Rename every record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--to", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    for file in options.files:
        print(take_in(file, options.to or file.parent))


def take_in(file: Path, folder: Path) -> Path:
    """Write a record to a folder under its right name; returns its path."""
    text = file.read_text()
    name = json.loads(text)["name"]
    new = right_name(name, json.loads(text)["config"])
    old_line, new_line = f'"name": {json.dumps(name)}', f'"name": {json.dumps(new)}'
    if text.count(old_line) != 1:
        raise SystemExit(f"{file}: {old_line} must be in it once")
    renamed = folder / f"{new}.json"
    renamed.write_text(text.replace(old_line, new_line))
    if file != renamed and file.parent == folder:
        file.unlink()
    return renamed


def right_name(name: str, config: dict[str, dict[str, object]]) -> str:
    """Return the name of a run; the images of CIFAR-10 itself have it as data.name."""
    if name.startswith(f"{RECIPE}-") and config["data"]["name"] != RECIPE:
        return IMAGES + name.removeprefix(RECIPE)
    return name


if __name__ == "__main__":
    main()
