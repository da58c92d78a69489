"""Set a fifth of the training images of each class aside, so that settings need no test image.

    python experiments/validation_split.py CIFAR100 OUT

makes OUT/train and OUT/val as links to the files of CIFAR100/train: of the sorted names of a class
every fifth is for validation. CIFAR100/test is not opened.
"""

import sys
from pathlib import Path

EVERY = 5


def main(source: Path, out: Path) -> None:
    """Make a link for every image."""
    for folder in sorted((source / "train").iterdir()):
        for number, file in enumerate(sorted(folder.iterdir())):
            split = "val" if number % EVERY == EVERY - 1 else "train"
            link = out / split / folder.name / file.name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
