"""What people see of a benchmark: its rows, and which limits are met."""

import statistics
from typing import Any

from hardmix.bench.claims import BUSY
from hardmix.bench.jobs import Row
from hardmix.console import say, table, warn

NAMES = {
    "plain_moco": "plain MoCo",
    "materialised": "MoCHi, materialised",
    "lightly": "lightly (MoCo)",
    "official": "official MoCo",
    "hardmix": "hardmix",
    "hardmix_moco": "hardmix, s = s' = 0",
    "mochi_fp32": "hardmix MoCHi, fp32",
    "moco_fp32": "hardmix MoCo-v2, fp32",
    "mochi_bf16": "hardmix MoCHi, bf16",
    "moco_bf16": "hardmix MoCo-v2, bf16",
}
"""Of the variants, for people."""


def show_rows(title: str, rows: list[Row]) -> None:
    """A table for each setting, with a line for each variant; of growth one for each subject."""
    if title == "growth":
        for subject in dict.fromkeys(_subject(row) for row in rows):
            _show_growth(subject, [row for row in rows if _subject(row) == subject])
        return
    for row in rows:
        if "peak_mb" in row:
            _show_memory(title, row)
        else:
            _show_times(title, row)


def _show_times(title: str, row: Row) -> None:
    first, alone = next(iter(row["milliseconds"])), len(row["milliseconds"]) == 1
    speed = ["images/s"] if "images" in row else []
    lines = []
    for name, median in row["median_ms"].items():
        shown = [f"{median:.1f}", f"{row['min_ms'][name]:.1f}"]
        shown += [f"{1000 * row['images'] / median:.0f}" for _ in speed]
        shown += [] if alone else [_ratio(row["ratio"][name][first])]
        lines.append([_name(name), *shown])
    ratio = [] if alone else ["/ first (quartiles)"]
    columns = ["variant", "median ms", "min ms", *speed, *ratio]
    table(f"{title}: {_setting(row)}", columns, lines)


def _show_memory(title: str, row: Row) -> None:
    first = next(iter(row["peak_mb"]))
    lines = [
        [_name(name), f"{mb:.0f}", f"{row['ratio'][name][first]['median']:.2f}"]
        for name, mb in row["peak_mb"].items()
    ]
    table(f"{title}: {row['setting']}", ["variant", "peak MB", "/ first"], lines)


def _show_growth(subject: str, rows: list[Row]) -> None:
    """A line for each setting, a column for each variant."""
    names = list(rows[0]["median_ms"])
    first = names[0]
    lines = []
    for row in rows:
        times = [f"{row['median_ms'][name]:.1f}" for name in names]
        ratios = [f"{row['ratio'][name][first]['median']:.2f}" for name in names[1:]]
        lines.append([row["setting"].partition(": ")[2], *times, *ratios])
    ratio_columns = [f"{_name(name)} / {_name(first)}" for name in names[1:]]
    columns = [subject, *(f"{_name(name)}, ms" for name in names), *ratio_columns]
    table(f"growth of the {subject}", columns, lines)


def _subject(row: Row) -> str:
    """What grows: the first word of the setting."""
    return str(row["setting"].partition(": ")[0])


def _setting(row: Row) -> str:
    """With the data, or the allocator and threads, where they differ from row to row."""
    if "data" in row:
        return f"{row['setting']}; {row['data']}"
    if "allocator" not in row:
        return str(row["setting"])
    return f"{row['setting']}; {row['allocator']}, {row['threads']} thr."


def _name(variant: str) -> str:
    return NAMES.get(variant, variant)


def _ratio(paired: dict[str, float]) -> str:
    return f"{paired['median']:.2f} ({paired['low']:.2f}-{paired['high']:.2f})"


def show_limits(judged: list[dict[str, Any]]) -> None:
    """What was measured beside what was asked for."""
    lines = []
    measured = [claim for claim in judged if claim["met"] is not None]
    for claim in judged if measured else ():
        what = f"{_name(claim['variant'])} / {_name(claim['against'])}"
        if claim["against"] is None:
            what = "seconds"
        number = "" if claim["measured"] is None else f"{claim['measured']:.2f}"
        bounds = [_bound(claim, claim["must"]), _bound(claim, claim["aim"])]
        lines.append([claim["setting"], what, number, *bounds, _verdict(claim)])
    if lines:
        table("Limits", ["setting", "what", "measured", "must", "aim", ""], lines)
    met = sum(claim["met"] for claim in measured)
    say(f"{met} of {len(measured)} limits met, {len(judged) - len(measured)} not measured.")


def _bound(claim: dict[str, Any], limit: float | None) -> str:
    return "" if limit is None else f"{'≥' if claim['at_least'] else '≤'} {limit:.2f}"


def _verdict(claim: dict[str, Any]) -> str:
    if claim["met"] is None:
        return f"not measured: {claim['note']}"
    words = "met" if claim["met"] else "MISSED"
    if claim["met"] and claim["aim"] is not None:
        words += ", aim too" if claim["aim_met"] else ", aim not"
    return f"{words} (busy machine)" if claim["busy"] else words


def say_how_busy(rows: list[Row]) -> None:
    """How much of the cores others took: what makes a run void."""
    shares = [row["others_share"] for row in rows if row.get("others_share") is not None]
    if not shares:
        return
    say(
        f"Other jobs took {statistics.median(shares):.0%} of the cores in the median setting,"
        f" {max(shares):.0%} in the worst."
    )
    if max(shares) > BUSY:
        warn("the machine was busy: parts of this say more about it than about us.")
