"""hardmix's performance limits, and whether they are met here."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import end_to_end, loader, loss, methods, start, steps
from benchmarks.jobs import Row, Setup

BUSY = 0.1
"""Fraction of the cores used by other jobs above which results are unreliable."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A number of a variant at a setting, and what it must be."""

    part: str
    setting: str
    variant: str
    against: str | None
    """The variant it is divided by, round by round; None for seconds."""
    must: float
    aim: float | None = None
    at_least: bool = False
    """Whether the limit is a minimum; otherwise a maximum."""

    def met(self, measured: float, limit: float) -> bool:
        """Return whether a number meets the limit."""
        return measured >= limit if self.at_least else measured <= limit


def faster(part: str, setting: str, than: str, ours: str, must: float, **more: Any) -> Limit:
    """Return the claim that another variant takes at least this many times as long."""
    return Limit(
        part=part, setting=setting, variant=than, against=ours, must=must, at_least=True, **more
    )


def at_most(
    part: str, setting: str, ours: str, than: str | None, must: float, **more: Any
) -> Limit:
    """Return the claim that a variant takes at most this many times as much as another."""
    return Limit(part=part, setting=setting, variant=ours, against=than, must=must, **more)


_SMALL, _LARGE = loss.label(loss.SMALL), loss.label(loss.LARGE)
_RESNET18, _RESNET50 = steps.label(steps.RESNET18), steps.label(steps.RESNET50)
_EXAMPLE = end_to_end.label(end_to_end.EXAMPLE)

LIMITS: tuple[Limit, ...] = (
    *(
        at_most("loss", shape, ours, "plain_moco", must, aim=aim)
        for shape, must, aim in [(_SMALL, 2.2, 1.8), (_LARGE, 1.4, 1.2)]
        for ours in ("hardmix", "hardmix_tensor")
    ),
    faster("loss", _SMALL, "materialised", "hardmix", 3.0),
    faster("loss", _LARGE, "materialised", "hardmix", 2.5),
    *(
        faster("step", setting, theirs, ours, must)
        for setting, ours, must in [
            (_RESNET18, "mochi_bf16_together", 1.8),
            (_RESNET50, "mochi_bf16_together", 1.7),
            (_RESNET18, "mochi_fp32_together", 1.05),
            (_RESNET50, "mochi_fp32_together", 1.1),
        ]
        for theirs in ("official", "lightly")
    ),
    *(
        at_most("step", setting, f"mochi_{precision}", f"moco_{precision}", 1.05)
        for setting in (_RESNET18, _RESNET50)
        for precision in ("bf16", "fp32")
    ),
    *(
        faster(
            "methods",
            methods.setting(method, steps.RESNET18),
            f"lightly_{method}",
            f"{method}_fp32",
            1.0,
        )
        for method in methods.COMPARED
    ),
    faster("loader", loader.SMALL_IMAGES, "official", "hardmix", 5.0),
    at_most("loader", loader.SMALL_FILES, "files", "memory", 1 / 0.9),
    faster("loader", loader.PHOTOGRAPHS, "official", "hardmix", 1.3, aim=2.0),
    faster("end-to-end", _EXAMPLE, "lightly", "mochi_bf16", 1.6),
    faster("end-to-end", _EXAMPLE, "lightly", "mochi_fp32", 1.35),
    at_most("start", start.FIRST_STEP, "hardmix", None, 8.0),
    at_most("start", start.HELP, "hardmix", None, 0.5),
    *(
        at_most("memory", f"loss {shape}", "hardmix", other, must)
        for shape in (_SMALL, _LARGE)
        for other, must in [("plain_moco", 1.0), ("materialised", 1 / 6)]
    ),
)


def judge(
    parts: Mapping[str, list[Row]], setup: Setup, limits: Sequence[Limit] = LIMITS
) -> list[dict[str, Any]]:
    """Return every claim of the parts that were run, with the measurement or why there is none."""
    judged = []
    for claim in limits:
        if claim.part not in parts:
            continue
        row = None if setup.quick else _row(claim, parts[claim.part])
        entry = {**asdict(claim), "measured": None, "met": None, "busy": False, "note": ""}
        if row is None:
            entry["note"] = _reason(claim, setup)
        else:
            measured = _measured(claim, row)
            entry |= {
                "measured": measured,
                "met": claim.met(measured, claim.must),
                "aim_met": None if claim.aim is None else claim.met(measured, claim.aim),
                "busy": (row.get("others_share") or 0) > BUSY,
            }
        judged.append(entry)
    return judged


def _row(claim: Limit, rows: list[Row]) -> Row | None:
    wanted = {claim.variant, claim.against or claim.variant}
    for row in rows:
        if row["setting"] == claim.setting and row["judged"] and wanted <= row["ratio"].keys():
            return row
    return None


def _measured(claim: Limit, row: Row) -> float:
    if claim.against is None:
        return float(row["median_ms"][claim.variant]) / 1000
    return float(row["ratio"][claim.variant][claim.against]["median"])


def _reason(claim: Limit, setup: Setup) -> str:
    """Return why a claim was not measured."""
    names = f"{claim.variant} {claim.against}"
    if setup.quick:
        return "sizes of --quick"
    if "bf16" in names and "bf16" not in setup.precisions:
        return setup.precision_reason
    if "lightly" in names and not setup.lightly:
        return "lightly is not installed"
    return "cannot be measured here"
