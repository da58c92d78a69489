"""Fig. 3: results over (N, s, s'), and runs in the plane of alignment and uniformity."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from hardmix.analysis.figures.fig3 import MochiSetting, Place, fig3a, fig3b, fig3c
from hardmix.analysis.figures.picture import Found
from hardmix.runs.labels import identity
from hardmix.runs.reading import RunRecord
from hardmix.settings.config import PretrainConfig
from hardmix.settings.saved import settings
from hardmix.settings.titles import accuracy_titles

BASELINE = "moco-v2"
ACCURACIES = accuracy_titles()
"""results/*.json with an accuracy, the paper's own first."""


class Scored(NamedTuple):
    """A run with one of its accuracies."""

    record: RunRecord
    config: PretrainConfig
    accuracy: float


def accuracies(record: RunRecord) -> dict[tuple[str, str, str], float]:
    """Return top-1 by (evaluation, protocol, data); only equal ones are compared."""
    found = {}
    for name in ACCURACIES:
        result = record.results.get(name, {})
        if isinstance(result.get("top1"), int | float):
            key = name, str(result.get("protocol", "")), str(result.get("data", ""))
            found[key] = float(result["top1"])
    return found


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
    cells = _cells([each for each in scored if _mixes(each.config)])
    baselines = _cells([each for each in scored if not _mixes(each.config)], plain=True)
    baseline = baselines[0] if baselines else None
    missing = _left_out(records, scored)
    if len(cells) < 2:
        return [], [*missing, "No Fig. 3a and 3b: they compare (N, s, s'), and only one was run."]
    pictures = [fig3a(cells, baseline, measure)]
    if baseline is None:
        missing.append("No Fig. 3b: no MoCo-v2 run with the MoCHi runs' settings has a result.")
        return pictures, missing
    size, _ = Counter(cell.num_hardest for cell in cells).most_common(1)[0]
    some = [cell for cell in cells if cell.num_hardest == size]
    if len(some) < 2:
        missing.append(f"No Fig. 3b: with N = {size}, only one (s, s') was run.")
        return pictures, missing
    return [*pictures, fig3b(some, baseline, measure)], missing


def embedding_space(records: Sequence[RunRecord]) -> Found:
    """Draw Fig. 3c, of the runs that have results/embedding.json."""
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
        cells = {_setting(each.config) for each in groups[key] if _mixes(each.config)}
        has_baseline = any(not _mixes(each.config) for each in groups[key])
        return len(cells), has_baseline, -list(ACCURACIES).index(key[0][0])

    best = max(groups, key=size, default=None)
    if best is None or size(best)[0] == 0:
        return None
    return ACCURACIES[best[0][0]], groups[best]


def _is_plain(config: PretrainConfig) -> bool:
    """Return whether it is MoCo-v2 or the paper's MoCHi, not a variant."""
    if config.method == "mochi":
        return config.mix.strategy == "mochi" and config.mix.real_negatives == "keep"
    return config.method == BASELINE


def _mixes(config: PretrainConfig) -> bool:
    return config.mixes


def _setting(config: PretrainConfig) -> tuple[int, int, int]:
    return config.mix.num_hardest, config.mix.num_pairs, config.mix.num_with_query


def _cells(scored: Sequence[Scored], *, plain: bool = False) -> list[MochiSetting]:
    """Return mean and deviation over the runs of each setting; MoCo-v2 (`plain`) has one."""
    by_setting: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for each in scored:
        by_setting[(0, 0, 0) if plain else _setting(each.config)].append(each.accuracy)
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
        if record.config is not None
        and _mixes(record.config)
        and str(record.run.path) not in inside
    ]
