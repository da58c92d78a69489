"""Rows of methods whose numbers the paper copied from others, so that they can be trained, too.

SeLa, DeeperCluster and InterCLR stay numbers only. Imports no torch.
"""

from typing import Any

from hardmix.settings.methods import MethodName
from hardmix.sweep.grid_rows import Evaluation, Row, make_row

V1_TEMPERATURE, V2_TEMPERATURE = 0.07, 0.2
"""Of MoCo's two versions."""

COST: tuple[Evaluation, ...] = ("linear", "knn", "embedding", "cost")
ON_IMAGENET1K: tuple[Evaluation, ...] = ("linear", "voc", "knn", "embedding", "cost")
"""What is measured of a row; VOC is left out at small scales."""

LIKE_V1 = (
    ("data.augmentation", "moco-v1"),
    ("model.head", "linear"),
    ("optimizer.schedule", "step"),
)
"""What MoCo's first version has of its own besides its temperature."""

NOTE = "copied by the paper; here with its authors' settings, as far as they are known"


def copied_on_imagenet100(source: str) -> tuple[Row, ...]:
    """MoCo + iMix, CMC and CMC + iMix of Table 1."""
    return (
        _row("unmix", "MoCo+iMix", source, temperature=V1_TEMPERATURE, changes=LIKE_V1),
        _row("cmc", "CMC", source),
        _row("cmc", "CMC+iMix", source, changes=(("cmc.unmix", True),)),
    )


def copied_on_imagenet1k(source: str, supplement: bool = False) -> tuple[Row, ...]:
    """The other methods of Table 2, and those that only the supplement has."""
    common: dict[str, Any] = {"recipe": "imagenet1k", "evaluations": ON_IMAGENET1K}
    like_v1 = {"temperature": V1_TEMPERATURE, "changes": LIKE_V1}
    large = f"{NOTE}; the paper's number is for batches of 8192, the preset has 4096"
    rows = (
        _row("simclr", "SimCLR", source, **common, note=large),
        _row("unmix", "MoCo+Image Mixture", source, **common, **like_v1),
        _row("instdis", "InstDis", source, **common),
        _row("pirl", "PIRL", source, **common),
        infomin(source, *ON_IMAGENET1K),
        _row("swav", "SvAV", source, **common, epochs=800, label="SwAV, 800 epochs"),
    )
    if not supplement:
        return rows
    return (
        *rows,
        _row("pcl", "PCL", source, **common, changes=LIKE_V1),
        _row("pcl", "PCL v2", source, **common),
        _row("co2", "MoCo-v2+CO2", source, **common),
    )


def infomin(source: str, *evaluations: Evaluation) -> Row:
    """MoCo-v2 with InfoMin's views and jigsaw, as PyContrast trained the printed 70.1."""
    return _row(
        "moco-v2",
        "InfoMin Aug.",
        source,
        recipe="imagenet1k",
        temperature=0.15,
        changes=(("data.augmentation", "infomin"), ("loss.jigsaw", 0.5)),
        evaluations=evaluations,
    )


def _row(method: MethodName, printed: str, source: str, **fields: Any) -> Row:
    usual = {"label": printed, "note": NOTE, "evaluations": COST}
    return make_row(method, printed=printed, source=source, **usual | fields)
