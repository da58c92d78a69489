"""Tables of a benchmark and of the limits that are met, for the terminal and as Markdown."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.jobs import Row
from benchmarks.limits import BUSY
from hardmix.settings.methods import METHOD_FACTS

NAMES = {
    "plain_moco": "plain MoCo",
    "materialised": "MoCHi, materialised",
    "lightly": "lightly (MoCo)",
    "official": "official MoCo",
    "hardmix": "hardmix",
    "hardmix_tensor": "hardmix, negatives in a plain tensor",
    "memory": "hardmix, a set in memory",
    "files": "hardmix, the same as PNG files",
    "hardmix_moco": "hardmix, s = s' = 0",
    "mochi_fp32": "hardmix MoCHi, fp32",
    "moco_fp32": "hardmix MoCo-v2, fp32",
    "mochi_fp32_together": "hardmix MoCHi, fp32, keys in one group",
    "mochi_bf16": "hardmix MoCHi, bf16",
    "mochi_bf16_together": "hardmix MoCHi, bf16, keys in one group",
    "moco_bf16": "hardmix MoCo-v2, bf16",
    **{
        f"{name}_{precision}": f"hardmix {METHOD_FACTS[name].title}, {precision}"
        for name in ("simclr", "byol", "swav")
        for precision in ("fp32", "bf16")
    },
    **{
        f"lightly_{name}": f"lightly ({METHOD_FACTS[name].title})"
        for name in ("simclr", "byol", "swav")
    },
}
"""Titles of the variants."""


class Table(NamedTuple):
    """One subject."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]


def tables_of(part: str, rows: list[Row]) -> list[Table]:
    """Return a table per setting with a line per variant; for growth, one per subject."""
    if part == "growth":
        subjects = dict.fromkeys(_subject(row) for row in rows)
        return [_growth(name, [row for row in rows if _subject(row) == name]) for name in subjects]
    return [_memory(part, row) if "peak_mb" in row else _times(part, row) for row in rows]


def _times(part: str, row: Row) -> Table:
    first, alone = next(iter(row["milliseconds"])), len(row["milliseconds"]) == 1
    speed = ["images/s"] if "images" in row else []
    lines = []
    for name, median in row["median_ms"].items():
        shown = [f"{median:.1f}", f"{row['min_ms'][name]:.1f}"]
        shown += [f"{1000 * row['images'] / median:.0f}" for _ in speed]
        shown += [] if alone else [_ratio(row["ratio"][name][first])]
        lines.append([_name(name), *shown])
    ratio = [] if alone else ["/ first (quartiles)"]
    return Table(
        f"{part}: {_setting(row)}", ["variant", "median ms", "min ms", *speed, *ratio], lines
    )


def _memory(part: str, row: Row) -> Table:
    first = next(iter(row["peak_mb"]))
    lines = [
        [_name(name), f"{mb:.0f}", f"{row['ratio'][name][first]['median']:.2f}"]
        for name, mb in row["peak_mb"].items()
    ]
    return Table(f"{part}: {row['setting']}", ["variant", "peak MB", "/ first"], lines)


def _growth(subject: str, rows: list[Row]) -> Table:
    """Return a line for each setting, a column for each variant."""
    names = list(rows[0]["median_ms"])
    first = names[0]
    lines = []
    for row in rows:
        times = [f"{row['median_ms'][name]:.1f}" for name in names]
        ratios = [f"{row['ratio'][name][first]['median']:.2f}" for name in names[1:]]
        lines.append([row["setting"].partition(": ")[2], *times, *ratios])
    ratio_columns = [f"{_name(name)} / {_name(first)}" for name in names[1:]]
    columns = [subject, *(f"{_name(name)}, ms" for name in names), *ratio_columns]
    return Table(f"growth of the {subject}", columns, lines)


def _subject(row: Row) -> str:
    """Return what grows: the first word of the setting."""
    return str(row["setting"].partition(": ")[0])


def _setting(row: Row) -> str:
    """Return the setting, with data, or allocator and threads if they vary."""
    if "data" in row:
        return f"{row['setting']}; {row['data']}"
    if "allocator" not in row:
        return str(row["setting"])
    return f"{row['setting']}; {row['allocator']}, {row['threads']} thr."


def _name(variant: str) -> str:
    return NAMES.get(variant, variant)


def _ratio(paired: dict[str, float]) -> str:
    return f"{paired['median']:.2f} ({paired['low']:.2f}-{paired['high']:.2f})"


def limits_of(judged: list[dict[str, Any]]) -> Table:
    """Return a table of the measurements and their limits."""
    lines = []
    for claim in judged if any(claim["met"] is not None for claim in judged) else ():
        what = f"{_name(claim['variant'])} / {_name(claim['against'])}"
        if claim["against"] is None:
            what = "seconds"
        number = "" if claim["measured"] is None else f"{claim['measured']:.2f}"
        bounds = [_bound(claim, claim["must"]), _bound(claim, claim["aim"])]
        lines.append([claim["setting"], what, number, *bounds, _verdict(claim)])
    return Table("Limits", ["setting", "what", "measured", "must", "aim", ""], lines)


def checks_of(checks: list[dict[str, Any]]) -> Table:
    """Return a table of the checks of a GPU, and what each found."""
    lines = [
        [each["check"], each["claim"], each["result"].replace("failed", "FAILED"), each["words"]]
        for each in checks
    ]
    return Table("Checks", ["check", "claim", "result", "found"], lines)


def how_many_met(judged: list[dict[str, Any]]) -> str:
    """Return in a sentence how many limits are met."""
    measured = [claim for claim in judged if claim["met"] is not None]
    met = sum(claim["met"] for claim in measured)
    return f"{met} of {len(measured)} limits met, {len(judged) - len(measured)} not measured."


def _bound(claim: dict[str, Any], limit: float | None) -> str:
    return "" if limit is None else f"{'≥' if claim['at_least'] else '≤'} {limit:.2f}"


def _verdict(claim: dict[str, Any]) -> str:
    if claim["met"] is None:
        return f"not measured: {claim['note']}"
    words = "met" if claim["met"] else "MISSED"
    if claim["met"] and claim["aim"] is not None:
        words += ", aim too" if claim["aim_met"] else ", aim not"
    return f"{words} (busy machine)" if claim["busy"] else words


def how_busy(rows: Iterable[Row]) -> str:
    """Return in a sentence how much of the cores other jobs used, which may invalidate it."""
    shares = [row["others_share"] for row in rows if row.get("others_share") is not None]
    if not shares:
        return ""
    words = (
        f"Other jobs used {statistics.median(shares):.0%} of the cores in the median setting,"
        f" {max(shares):.0%} in the worst."
    )
    if max(shares) > BUSY:
        words += " The machine was busy: parts of this say more about it than about us."
    return words


def sections_of(report: dict[str, Any]) -> dict[str, str]:
    """Return a report as Markdown: circumstances, limits, and each part that was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    machine = f"{report['cpu']}, {report['cores']} cores, {report['gpu'] or 'no GPU'}"
    facts = [
        f"`{report['command']}`, {report['date'][:10]}, {report['seconds']} s.",
        f"Machine: {machine}; {versions}; seed {report['seed']}.",
        how_busy(row for rows in report["parts"].values() for row in rows),
        *report["notes"],
    ]
    limits = [how_many_met(report["limits"]), _markdown([limits_of(report["limits"])])]
    limits = limits if report["limits"] else []
    checks = {"checks": _markdown([checks_of(report["checks"])])} if "checks" in report else {}
    return {
        "circumstances": "\n".join(fact for fact in facts if fact),
        **checks,
        "limits": "\n\n".join(limits).strip(),
        **{name: _markdown(tables_of(name, rows)) for name, rows in report["parts"].items()},
    }


def _markdown(tables: list[Table]) -> str:
    blocks = []
    for title, columns, lines in tables:
        rows = [columns, ["---"] * len(columns), *lines]
        body = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        blocks += [f"**{title}**\n\n{body}"] if lines else []
    return "\n\n".join(blocks)
