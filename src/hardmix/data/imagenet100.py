"""ImageNet-100: the 100 classes of App. C.1.1, and how to make it from ImageNet without copying.

Imports no torch.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from hardmix.errors import InputError

SYNSETS: tuple[str, ...] = tuple(
    """
    n02869837 n01749939 n02488291 n02107142 n13037406 n02091831 n04517823 n04589890
    n03062245 n01773797 n01735189 n07831146 n07753275 n03085013 n04485082 n02105505
    n01983481 n02788148 n03530642 n04435653 n02086910 n02859443 n13040303 n03594734
    n02085620 n02099849 n01558993 n04493381 n02109047 n04111531 n02877765 n04429376
    n02009229 n01978455 n02106550 n01820546 n01692333 n07714571 n02974003 n02114855
    n03785016 n03764736 n03775546 n02087046 n07836838 n04099969 n04592741 n03891251
    n02701002 n03379051 n02259212 n07715103 n03947888 n04026417 n02326432 n03637318
    n01980166 n02113799 n02086240 n03903868 n02483362 n04127249 n02089973 n03017168
    n02093428 n02804414 n02396427 n04418357 n02172182 n01729322 n02113978 n03787032
    n02089867 n02119022 n03777754 n04238763 n02231487 n03032252 n02138441 n02104029
    n03837869 n03494278 n04136333 n03794056 n03492542 n02018207 n04067472 n03930630
    n03584829 n02123045 n04229816 n02100583 n03642806 n04336792 n03259280 n02116738
    n02108089 n03424325 n01855672 n02090622
    """.split()  # noqa: SIM905  (a list would take a line for each)
)
"""The 100 classes in the paper's order (App. C.1.1). Labels follow the sorted order."""

SPLITS = ("train", "val")


def link_imagenet100(imagenet: Path, out: Path) -> dict[str, int]:
    """Fill out/train and out/val with links to class folders of ImageNet in torchvision's layout.

    The links are absolute, so `out` may be moved. Links that exist are kept, so that a second call
    changes nothing. Return the number of classes linked in each split.
    """
    imagenet, out = Path(imagenet), Path(out)
    targets = {
        out / split / synset: (imagenet / split / synset).resolve()
        for split in SPLITS
        for synset in SYNSETS
    }
    _check_source(imagenet)
    _check_out(out, targets)
    try:
        for link, target in targets.items():
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(target, target_is_directory=True)
    except OSError as error:
        raise InputError(
            f"out={out}: links cannot be made here ({error.strerror}); choose another folder."
        ) from error
    return {split: len(SYNSETS) for split in SPLITS}


def _check_source(imagenet: Path) -> None:
    missing = [
        f"{split}/{synset}"
        for split in SPLITS
        for synset in SYNSETS
        if not (imagenet / split / synset).is_dir()
    ]
    if missing:
        raise InputError(
            f"imagenet={imagenet} lacks {len(missing)} of {len(SPLITS) * len(SYNSETS)} class"
            f" folders ({', '.join(missing[:3])}, ...): it must be ImageNet in torchvision's"
            " layout, train/SYNSET and val/SYNSET."
        )


def _check_out(out: Path, targets: Mapping[Path, Path]) -> None:
    """Raise InputError if `out` contains anything but our links."""
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise InputError(f"out={out} is a file: name a new or empty folder.")
    folders = [out / split for split in SPLITS]
    others = [path for path in out.iterdir() if path not in folders or path.is_symlink()]
    for folder in folders:
        others += [path for path in folder.glob("*") if not _leads_to(path, targets.get(path))]
    if others:
        raise InputError(
            f"out={out} already contains {len(others)} other files ({others[0]}, ...): name a new"
            " or empty folder."
        )


def _leads_to(path: Path, target: Path | None) -> bool:
    return target is not None and path.is_symlink() and path.resolve() == target
