"""Fig. 3: results over (N, s, s'), and runs in the plane of alignment and uniformity."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from hardmix.analysis.picture import (
    INK,
    MARKERS,
    MOST_TOGETHER,
    Drawing,
    Found,
    Picture,
    canvas,
    colour,
    legend_below,
    line_style,
    shown,
)
from hardmix.runs.reading import RunRecord, identity
from hardmix.settings.config import PretrainConfig
from hardmix.settings.evaluations import accuracy_titles
from hardmix.settings.saved import settings

GAINS = "PuOr"
"""Gains in violet, losses in orange, which colour-blind people can distinguish."""
BASELINE = "moco-v2"
ACCURACIES = accuracy_titles()
"""Titles of results with an accuracy, the paper's own first."""


class MochiSetting(NamedTuple):
    """One setting of MoCHi, over its seeds."""

    num_hardest: int
    """N: hardest negatives that may be mixed."""
    num_pairs: int
    """s: pair points."""
    num_with_query: int
    """s': points mixed with the query."""
    accuracy: float
    """Mean accuracy, from 0 to 1."""
    deviation: float
    """Standard deviation over the runs; 0 for one."""
    runs: int
    """Number of runs."""


class Place(NamedTuple):
    """A run in Fig. 3c: Wang and Isola's losses, lower is better."""

    run: str
    """The run's label."""
    hue: int
    """The run's index, which sets its colour."""
    alignment: float
    """L_align (App. A)."""
    uniformity: float
    """L_uniform (App. A)."""


class Scored(NamedTuple):
    """A run with one of its accuracies."""

    record: RunRecord
    config: PretrainConfig
    accuracy: float


def accuracies(record: RunRecord) -> dict[tuple[str, str, str], float]:
    """Return top-1 by (evaluation, protocol, data); only equal ones are compared."""
    by_evaluation = {}
    for name in ACCURACIES:
        result = record.results.get(name, {})
        if isinstance(result.get("top1"), int | float):
            key = name, str(result.get("protocol", "")), str(result.get("data", ""))
            by_evaluation[key] = float(result["top1"])
    return by_evaluation


def comparable(config: PretrainConfig) -> str:
    """Return a key that is equal for runs that differ only in method, mixing and seed."""
    kept = identity(settings(config), pooled=("train.seed",))
    return repr({k: v for k, v in kept.items() if k != "method" and not k.startswith("mix.")})


def grid_pictures(records: Sequence[RunRecord]) -> Found:
    """Draw Fig. 3a and 3b over the largest set of comparable MoCHi runs."""
    chosen = _largest_grid(records)
    if chosen is None:
        return [], [
            "No Fig. 3a and 3b: no MoCHi run has a result (hardmix linear RUN or hardmix knn RUN)."
        ]
    measure, scored = chosen
    cells = _cells([each for each in scored if each.config.mixes])
    baselines = _cells([each for each in scored if not each.config.mixes], plain=True)
    baseline = baselines[0] if baselines else None
    missing = _left_out(records, scored)
    if len(cells) < 2:
        return [], [*missing, "No Fig. 3a and 3b: they compare (N, s, s'), and only one was run."]
    pictures = [fig3a(cells, baseline, measure)]
    if baseline is None:
        missing.append("No Fig. 3b: no MoCo-v2 run with the MoCHi runs' settings has a result.")
        return pictures, missing
    size, _ = Counter(cell.num_hardest for cell in cells).most_common(1)[0]
    of_size = [cell for cell in cells if cell.num_hardest == size]
    if len(of_size) < 2:
        missing.append(f"No Fig. 3b: with N = {size}, only one (s, s') was run.")
        return pictures, missing
    return [*pictures, fig3b(of_size, baseline, measure)], missing


def embedding_space(records: Sequence[RunRecord]) -> Found:
    """Draw Fig. 3c with the runs that have results/embedding.json."""
    places, without = [], []
    for record in records:
        result = record.results.get("embedding", {})
        align, uniform = result.get("alignment"), result.get("uniformity")
        if isinstance(align, int | float) and isinstance(uniform, int | float):
            places.append(Place(record.label, record.hue, float(align), float(uniform)))
        else:
            without.append(str(record.run.path))
    missing = [
        f"Fig. 3c omits {', '.join(without)}: hardmix analyze RUN measures alignment and"
        " uniformity if there are labels."
    ]
    if len(places) == 1:
        return [], ["No Fig. 3c: it compares runs, and only one has alignment and uniformity."]
    return [fig3c(places)] if places else [], missing if without else []


def _largest_grid(records: Sequence[RunRecord]) -> tuple[str, list[Scored]] | None:
    """Return the evaluation and settings that most MoCHi settings share, the paper's first."""
    groups: dict[Any, list[Scored]] = defaultdict(list)
    for record in records:
        if record.config is None or not _is_plain(record.config):
            continue
        for kind, accuracy in accuracies(record).items():
            scored = Scored(record, record.config, accuracy)
            groups[kind, comparable(record.config)].append(scored)

    def size(key: Any) -> tuple[int, bool, int]:
        cells = {_setting(each.config) for each in groups[key] if each.config.mixes}
        has_baseline = any(not each.config.mixes for each in groups[key])
        return len(cells), has_baseline, -list(ACCURACIES).index(key[0][0])

    best = max(groups, key=size, default=None)
    if best is None or size(best)[0] == 0:
        return None
    return ACCURACIES[best[0][0]], groups[best]


def _is_plain(config: PretrainConfig) -> bool:
    """Return whether a run is MoCo-v2 or the paper's MoCHi, not a variant."""
    if config.method == "mochi":
        return config.mix.strategy == "mochi" and config.mix.real_negatives == "keep"
    return config.method == BASELINE


def _setting(config: PretrainConfig) -> tuple[int, int, int]:
    return config.mix.num_hardest, config.mix.num_pairs, config.mix.num_with_query


def _cells(scored: Sequence[Scored], *, plain: bool = False) -> list[MochiSetting]:
    """Return mean and deviation over the runs of each setting; MoCo-v2 (`plain`) has one."""
    by_setting: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for run in scored:
        by_setting[(0, 0, 0) if plain else _setting(run.config)].append(run.accuracy)
    cells = []
    for setting, values in sorted(by_setting.items()):
        deviation = stdev(values) if len(values) > 1 else 0.0
        accuracy = round(mean(values), 6), round(deviation, 6)
        cells.append(MochiSetting(*setting, *accuracy, len(values)))
    return cells


def _left_out(records: Sequence[RunRecord], scored: Sequence[Scored]) -> list[str]:
    """Return sentences about MoCHi runs that Fig. 3a and 3b cannot show with the others."""
    inside = {str(each.record.run.path) for each in scored}
    return [
        f"{record.run.path} is omitted from Fig. 3a and 3b: its settings differ from those of the"
        " other runs, or it lacks their result."
        for record in records
        if record.config is not None and record.config.mixes and str(record.run.path) not in inside
    ]


def fig3a(cells: Sequence[MochiSetting], baseline: MochiSetting | None, measure: str) -> Picture:
    """Fig. 3a: accuracy over N, for each (s, s'); MoCo-v2 is the dashed line."""
    from matplotlib.lines import Line2D

    title = "Accuracy over N and s (Fig. 3a)"
    kinds = sorted({(cell.num_pairs, cell.num_with_query) for cell in cells})
    sizes = sorted({cell.num_hardest for cell in cells})
    with canvas(title, 3.5) as figure:
        axes = figure.subplots()
        handles = []
        for number, kind in enumerate(kinds):
            line = sorted(c for c in cells if (c.num_pairs, c.num_with_query) == kind)
            look: dict[str, Any] = {
                "color": colour(number),
                "marker": MARKERS[number % len(MARKERS)],
                "linestyle": line_style(number),
                "linewidth": 1,
            }
            x, y = [c.num_hardest for c in line], [100 * c.accuracy for c in line]
            axes.errorbar(x, y, yerr=[100 * c.deviation for c in line], capsize=3, **look)
            handles.append(Line2D([], [], label=f"s = {kind[0]}, s' = {kind[1]}", **look))
        if baseline is not None:
            axes.axhline(100 * baseline.accuracy, color=INK, linestyle="--", linewidth=1)
            handles.append(Line2D([], [], color=INK, linestyle="--", label="MoCo-v2"))
        axes.set(xlabel="N, hardest negatives that may be mixed", ylabel=f"{measure} (%)")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid()
        legend_below(figure, handles, columns=3)
    numbers = {
        "measure": measure,
        "cells": [cell._asdict() for cell in cells],
        "baseline": None if baseline is None else baseline._asdict(),
    }
    caption = (
        "Accuracy of MoCHi runs over N, one line for each s (pair points) and s' (points with the"
        " query); bars are the standard deviation over seeds, the dashed line is MoCo-v2."
    )
    return Picture("fig3a", title, caption, numbers, figure)


def fig3b(cells: Sequence[MochiSetting], baseline: MochiSetting, measure: str) -> Picture:
    """Fig. 3b: gains over MoCo-v2 for one N, s in rows and s' in columns."""
    size = cells[0].num_hardest
    title = f"Gains over MoCo-v2, N = {size} (Fig. 3b)"
    rows = sorted({0} | {cell.num_pairs for cell in cells})
    columns = sorted({0} | {cell.num_with_query for cell in cells})
    gains = {
        (c.num_pairs, c.num_with_query): round(100 * (c.accuracy - baseline.accuracy), 4)
        for c in cells
    } | {(0, 0): 0.0}
    reach = max(1.0, max(abs(gain) for gain in gains.values()))
    with canvas(title, 1.0 + 0.5 * len(rows)) as figure:
        axes = figure.subplots()
        image = axes.imshow(
            [[gains.get((s, q), float("nan")) for q in columns] for s in rows],
            cmap=GAINS,
            vmin=-reach,
            vmax=reach,
            aspect="auto",
        )
        _write_gains(axes, image, gains, rows, columns)
        axes.set_xticks(range(len(columns)), [str(q) for q in columns])
        axes.set_yticks(range(len(rows)), [str(s) for s in rows])
        axes.set(xlabel="s', points mixed with the query", ylabel="s, pair points")
        axes.tick_params(length=0)
    numbers = {
        "measure": measure,
        "num_hardest": size,
        "baseline": baseline._asdict(),
        "cells": [
            {"num_pairs": s, "num_with_query": q, "gain": gain}
            for (s, q), gain in sorted(gains.items())
        ],
    }
    caption = (
        f"Gain over MoCo-v2 ({100 * baseline.accuracy:.1f} %, top left) in points of {measure}, for"
        " every s and s' that was run (violet: better, orange: worse); empty cells were not run."
    )
    return Picture("fig3b", title, caption, numbers, figure)


def fig3c(places: Sequence[Place]) -> Picture:
    """Fig. 3c: alignment against uniformity, both negated: up and right is better."""
    from matplotlib.lines import Line2D

    title = "Alignment and uniformity (Fig. 3c)"
    with canvas(title, 3.6) as figure:
        axes = figure.subplots()
        handles = []
        for place in places:
            look: dict[str, Any] = {
                "color": colour(place.hue),
                "marker": MARKERS[place.hue % len(MARKERS)],
                "markersize": 8,
                "linestyle": "none",
            }
            axes.plot([-place.uniformity], [-place.alignment], **look)
            handles.append(Line2D([], [], label=shown(place.run), **look))
        axes.set(xlabel="uniformity (minus L uniform)", ylabel="alignment (minus L align)")
        axes.margins(0.15)
        axes.grid()
        if len(places) > MOST_TOGETHER:
            _label_directly(axes, places)
        else:
            legend_below(figure, handles)
    numbers = {"places": [place._asdict() for place in places]}
    caption = (
        "Each point is a run's features of the evaluation images. Further up, images of one class"
        " are closer together; further right, all images fill the sphere more evenly. The axes show"
        " the negated losses."
    )
    return Picture("fig3c", title, caption, numbers, figure)


def _label_directly(axes: Drawing, places: Sequence[Place]) -> None:
    """Write the names of the points beside the axes, in their order from top to bottom."""
    ordered = sorted(places, key=lambda place: place.alignment)
    for number, place in enumerate(ordered):
        axes.annotate(
            shown(place.run),
            (-place.uniformity, -place.alignment),
            xytext=(1.03, 1 - (number + 0.5) / len(ordered)),
            textcoords="axes fraction",
            va="center",
            size="x-small",
            color=INK,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour(place.hue), "linewidth": 0.6},
        )


def _write_gains(
    axes: Drawing,
    image: Drawing,
    gains: dict[tuple[int, int], float],
    rows: list[int],
    columns: list[int],
) -> None:
    for (s, q), gain in gains.items():
        red, green, blue, _ = image.cmap(image.norm(gain))
        bright = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.45
        place = columns.index(q), rows.index(s)
        text = f"{gain:+.1f}" if (s, q) != (0, 0) else "0.0"
        axes.text(*place, text, ha="center", va="center", color="black" if bright else "white")
