"""What `benchmarks/loss.py` makes of its times: ratios, tables, and which limits are met.

A shape is written as batch x K (N, s, s').
"""

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

NAMES = {
    "plain_moco": "plain MoCo",
    "materialised": "materialised",
    "lightly": "lightly MoCo",
    "hardmix": "hardmix",
    "hardmix_moco": "hardmix MoCo",
}
TIME_LIMITS = [
    {"over_moco": 2.2, "aim_over_moco": 1.5, "faster_than_materialised": 3.0},
    {"over_moco": 1.4, "aim_over_moco": 1.0, "faster_than_materialised": 2.5},
]
"""Of the first and the second shape."""


BUSY = 0.1
"""Share of the cores taken by others above which threads wait for each other's turn."""


@dataclass(frozen=True)
class Limit:
    """A number that was measured, and what it must be."""

    what: str
    shape: list[int]
    measured: float
    must: float
    aim: float | None = None
    at_least: bool = False
    machine_busy: bool = False

    def met(self, limit: float) -> bool:
        """Whether the measured number is on the right side."""
        return self.measured >= limit if self.at_least else self.measured <= limit

    def bound(self, limit: float | None) -> str:
        """The limit as a reader knows it."""
        return "" if limit is None else f"{'≥' if self.at_least else '≤'} {limit:.2f}"

    def verdict(self) -> str:
        """In words."""
        words = "[green]met[/]" if self.met(self.must) else "[red]missed[/]"
        if self.aim is not None and self.met(self.must):
            words += ", aim too" if self.met(self.aim) else ", aim not"
        return f"{words} [yellow](busy machine)[/]" if self.machine_busy else words


def summary(timed: dict[str, Any]) -> dict[str, Any]:
    """Medians, minima, and each variant's paired ratio to each, beside the single times."""
    times: dict[str, list[float]] = timed["milliseconds"]
    return {
        **timed,
        "median_ms": {name: statistics.median(values) for name, values in times.items()},
        "min_ms": {name: min(values) for name, values in times.items()},
        "ratio": {
            name: {other: paired_ratio(values, times[other]) for other in times}
            for name, values in times.items()
        },
    }


def paired_ratio(values: list[float], others: list[float]) -> dict[str, float]:
    """How many times as long as another variant in the same round: median and quartiles."""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"low": low, "median": middle, "high": high}


def show(report: dict[str, Any], console: Console) -> list[dict[str, Any]]:
    """Print every table; the limits, with what was measured, for the report."""
    for allocator in dict.fromkeys(timed["allocator"] for timed in report["times"]):
        for shape in _shapes(report):
            console.print(time_table(report, allocator, shape))
    if report["memory"]:
        console.print(memory_table(report))
    if report["growth"]:
        console.print(growth_table(report))
    limits = [*time_limits(report), *memory_limits(report)]
    console.print(limit_table(limits, _judged(report)[0]))
    missed = [
        f"{limit.what} at {_label(limit.shape)}" for limit in limits if not limit.met(limit.must)
    ]
    console.print(f"{len(limits) - len(missed)} of {len(limits)} limits met.")
    for line in missed:
        console.print(f"Missed: {line}")
    _say_how_busy(report["times"] + report["growth"], console)
    return [{**asdict(limit), "met": limit.met(limit.must)} for limit in limits]


def _say_how_busy(times: list[dict[str, Any]], console: Console) -> None:
    shares = [timed["others_share"] for timed in times if timed["others_share"] is not None]
    if not shares:
        return
    console.print(
        f"Other jobs took {statistics.median(shares):.0%} of the cores in the median part,"
        f" {max(shares):.0%} in the worst."
    )
    if max(shares) > BUSY:
        console.print("[yellow]The machine was busy: parts of this say more about it than us.[/]")


def time_table(report: dict[str, Any], allocator: str, shape: list[int]) -> Table:
    """One shape with one allocator: for each thread count a row for each variant."""
    title = f"Forward + backward, ms, and ratios (quartiles); {_label(shape)}; {allocator}"
    table = _table(title, ["variant", "thr.", "median", "min", "/ plain MoCo", "/ materialised"])
    for timed in report["times"]:
        if (timed["allocator"], timed["shape"]) != (allocator, shape):
            continue
        for name in timed["milliseconds"]:
            times = (f"{timed[which][name]:.1f}" for which in ("median_ms", "min_ms"))
            ratios = (_ratio(timed["ratio"][name][of]) for of in ("plain_moco", "materialised"))
            table.add_row(NAMES[name], str(timed["threads"]), *times, *ratios)
        table.add_section()
    return table


def _ratio(paired: dict[str, float]) -> str:
    return f"{paired['median']:.2f} ({paired['low']:.2f}-{paired['high']:.2f})"


def memory_table(report: dict[str, Any]) -> Table:
    """A row for each variant, a column for each shape."""
    shapes = _shapes(report)
    table = _table("Peak extra memory, MB", ["variant", *(_label(shape) for shape in shapes)])
    for name in dict.fromkeys(row["variant"] for row in report["memory"]):
        table.add_row(NAMES[name], *(f"{_memory(report, name, shape):.1f}" for shape in shapes))
    return table


def growth_table(report: dict[str, Any]) -> Table:
    """A row for each value of each factor."""
    base, factors = report["growth_base"], report["growth_factors"]
    one = report["growth"][0]
    title = f"Growth from {base}; ms; {one['allocator']}, {one['threads']} thr."
    columns = ["factor", "value", "plain MoCo", "min", "hardmix", "min", "ratio"]
    table = _table(title, columns)
    by_shape = {tuple(row["shape"]): row for row in report["growth"]}
    for factor, values in factors.items():
        for value in values:
            row = by_shape[tuple({**base, factor: value}.values())]
            cells = [
                f"{row[m][n]:.1f}" for n in row["milliseconds"] for m in ("median_ms", "min_ms")
            ]
            ratio = row["ratio"]["hardmix"]["plain_moco"]["median"]
            table.add_row(factor, str(value), *cells, f"{ratio:.2f}")
        table.add_section()
    return table


def limit_table(limits: list[Limit], judged: dict[str, Any]) -> Table:
    """What was measured beside what was asked for."""
    title = f"Limits; times: allocator {judged['allocator']}, {judged['threads']} thr."
    table = _table(title, ["limit", "shape", "measured", "must", "aim", "verdict"])
    for limit in limits:
        bounds = limit.bound(limit.must), limit.bound(limit.aim)
        table.add_row(
            limit.what, _label(limit.shape[:2]), f"{limit.measured:.2f}", *bounds, limit.verdict()
        )
    return table


def time_limits(report: dict[str, Any]) -> list[Limit]:
    """Paired medians, judged with the first allocator and the highest number of threads."""
    limits = []
    for timed, asked in zip(_judged(report), TIME_LIMITS, strict=False):
        shape, ratio, busy = timed["shape"], timed["ratio"], (timed["others_share"] or 0) > BUSY
        over, aim = asked["over_moco"], asked["aim_over_moco"]
        measured = ratio["hardmix"]["plain_moco"]["median"]
        limits.append(Limit("time / plain MoCo", shape, measured, over, aim, machine_busy=busy))
        faster = asked["faster_than_materialised"]
        measured = ratio["materialised"]["hardmix"]["median"]
        limits.append(
            Limit("materialised / time", shape, measured, faster, at_least=True, machine_busy=busy)
        )
    return limits


def memory_limits(report: dict[str, Any]) -> list[Limit]:
    """Less than plain MoCo, and a sixth of the materialised one."""
    limits = []
    for shape in _shapes(report) if report["memory"] else []:
        ours = _memory(report, "hardmix", shape)
        for other, must in [("plain_moco", 1.0), ("materialised", 1 / 6)]:
            ratio = ours / _memory(report, other, shape)
            limits.append(Limit(f"memory / {NAMES[other]}", shape, ratio, must))
    return limits


def _judged(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The times that limits are about, one for each shape."""
    allocator = report["times"][0]["allocator"]
    threads = max(timed["threads"] for timed in report["times"])
    setting = (allocator, threads)
    return [t for t in report["times"] if (t["allocator"], t["threads"]) == setting]


def _memory(report: dict[str, Any], name: str, shape: list[int]) -> float:
    rows = report["memory"]
    found = (r["peak_extra_mb"] for r in rows if (r["variant"], r["shape"]) == (name, shape))
    return float(next(found))


def _shapes(report: dict[str, Any]) -> list[list[int]]:
    shapes: list[list[int]] = []
    for timed in report["times"]:
        if timed["shape"] not in shapes:
            shapes.append(timed["shape"])
    return shapes


def _label(shape: list[int]) -> str:
    batch, negatives, *mochi = shape
    return f"{batch} x {negatives}" + (f" ({', '.join(map(str, mochi))})" if mochi else "")


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right")
    return table
