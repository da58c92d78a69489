"""The user's own grid, from a small TOML file; see docs/sweeps.md. Imports no torch.

Rows start from a recipe and change settings by their names in config.json. Everything is checked
when the file is read, before anything is trained.
"""

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

from hardmix.errors import InputError
from hardmix.runtime.files import MOST_JSON, read_file
from hardmix.settings.config import PretrainConfig
from hardmix.settings.evaluations import LINEAR_PRESETS
from hardmix.settings.facts import nearest_first
from hardmix.settings.methods import METHOD_FACTS
from hardmix.settings.recipes import RECIPES, for_backbone
from hardmix.settings.saved import build_config
from hardmix.sweep.grid_rows import Evaluation, Grid, Row, Trend

ENDING = ".toml"

GRID_KEYS: dict[str, type] = {
    "title": str,
    "recipe": str,
    "images": str,
    "evaluations": list,
    "labelled_images": int,
    "probe_images": int,
    "probe_penalty": float,
    "seeds": int,
    "first_seed": int,
    "settings": dict,
    "row": list,
    "trend": list,
}
ROW_KEYS: dict[str, type] = {
    "id": str,
    "label": str,
    "like": str,
    "baseline": str,
    "recipe": str,
    "method": str,
    "oracle": bool,
    "settings": dict,
    "note": str,
}
TREND_KEYS: dict[str, type] = {"over": str, "rows": list}
TREND_OVER = (
    "proxy_accuracy",
    "proxy_accuracy_mixed",
    "synthetic_mass",
    "synthetic_one_false",
    "linear-cached",
    "knn",
    "uniformity",
    "queue-uniformity",
)
"""Measures that a trend may be over."""
USUAL_EVALUATIONS = ["linear-cached", "knn", "embedding", "proxy"]
FROM_THE_COMMAND = {"root": "--data.root", "seed": "--seeds and --first-seed"}
"""Settings that a grid must not set."""


@cache  # a sweep uses the file as it was when the sweep started
def read_grid(name: str) -> Grid:
    """Read a grid from a file, every row with its complete config."""
    file = Path(name)
    values = _parse(file)
    _check_keys(values, GRID_KEYS, name)
    shared = {"recipe": values.get("recipe"), "settings": _plain(values.get("settings", {}))}
    rows: dict[str, dict[str, Any]] = {}
    for number, each in enumerate(values.get("row", []), start=1):
        where = f"{name}: row {number}"
        _check_keys(each, ROW_KEYS, where)
        if not each.get("id") or each["id"] in rows:
            raise InputError(f"{where} needs a unique id: it has {each.get('id')!r}.")
        start = _known(each["like"], rows, f"{where}: like") if "like" in each else shared
        rows[each["id"]] = _inherit(start, each)
    if not rows:
        raise InputError(f"{name} has no row: add [[row]] with an id and a method.")
    evaluations = _evaluations(values.get("evaluations", USUAL_EVALUATIONS), name)
    made = tuple(_make_row(row, rows, evaluations, name) for row in rows.values())
    _check_labels(made, name)
    trends = tuple(_trend(each, rows, name) for each in values.get("trend", []))
    return Grid(
        values.get("title", file.stem),
        made,
        own=True,
        images=_images(values.get("images", ""), name),
        trends=trends,
        **_counts(values, name),
    )


def _parse(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_file(file, MOST_JSON).decode("utf-8"))
    except OSError as error:
        raise InputError(f"the grid {file} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the grid {file} is not TOML: {error}.") from error


def _check_keys(values: Any, known: Mapping[str, type], where: str) -> None:
    if not isinstance(values, dict):
        raise InputError(f"{where} is {values!r}, but must be a table.")
    for key, value in values.items():
        if key not in known:
            near = ", ".join(nearest_first(key, known))
            raise InputError(f"{where} has an unknown key {key!r}: the known ones are {near}.")
        kind = known[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InputError(f"{where}: {key} = {value!r} must be of type {kind.__name__}.")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return names as in config.json, whether written with - or _."""
    return {
        key.replace("-", "_"): _plain(value) if isinstance(value, dict) else value
        for key, value in settings.items()
    }


def _inherit(start: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row that starts from another one, or from what all share, except its label."""
    kept = {key: start[key] for key in ("recipe", "method", "oracle") if start.get(key) is not None}
    settings = _merge(start.get("settings", {}), _plain(row.get("settings", {})))
    return {**kept, **row, "settings": settings}


def _merge(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(settings)
    for key, value in changes.items():
        inside = merged.get(key)
        both = isinstance(inside, dict) and isinstance(value, dict)
        merged[key] = _merge(inside, value) if both and isinstance(inside, dict) else value
    return merged


def _make_row(
    row: Mapping[str, Any],
    rows: Mapping[str, Any],
    evaluations: tuple[Evaluation, ...],
    name: str,
) -> Row:
    where = f"{name}: row {row['id']!r}"
    config = _config(row, where)
    if "baseline" in row:
        _known(row["baseline"], rows, f"{where}: baseline")
    if "linear" in evaluations and config.recipe not in LINEAR_PRESETS:
        raise InputError(
            f"{where}: the evaluation linear has no preset for the recipe {config.recipe}: use"
            " linear-cached."
        )
    mix = config.mix
    return Row(
        label=row.get("label", row["id"]),
        method=config.method,
        recipe=config.recipe,
        queue_size=config.train.queue_size,
        mix=(mix.num_hardest, mix.num_pairs, mix.num_with_query) if config.mixes else None,
        epochs=config.train.last_epoch,
        oracle=config.oracle,
        evaluations=evaluations,
        note=row.get("note", ""),
        id=row["id"],
        baseline=row.get("baseline", ""),
        own=config,
    )


def _config(row: Mapping[str, Any], where: str) -> PretrainConfig:
    """Return the recipe's config with the row's settings, checked like a saved config."""
    if "recipe" not in row or "method" not in row:
        raise InputError(
            f"{where} needs a recipe and a method: set them in the row, in the row named by like,"
            " or, for the recipe, at the top of the file."
        )
    _known(row["recipe"], RECIPES, f"{where}: recipe")
    _known(row["method"], METHOD_FACTS, f"{where}: method")
    for group in row["settings"].values():
        for setting, option in FROM_THE_COMMAND.items():
            if isinstance(group, dict) and setting in group:
                raise InputError(f"{where} sets {setting}: use {option} instead.")
    base = RECIPES[row["recipe"]].build(row["method"], row.get("oracle", False))
    backbone = row["settings"].get("model", {}).get("backbone")
    base = for_backbone(base, backbone) if isinstance(backbone, str) else base
    own = {"options" if name == base.method else name: of for name, of in row["settings"].items()}
    return build_config(_merge(dataclasses.asdict(base), own), where)


def _known(name: str, known: Mapping[str, Any], where: str) -> Any:
    if name not in known:
        near = ", ".join(nearest_first(name, known))
        raise InputError(
            f"{where} = {name!r} is unknown: choose one of {near or 'the rows above it'}."
        )
    return known[name]


def _evaluations(names: list[Any], where: str) -> tuple[Evaluation, ...]:
    known = dict.fromkeys(get_args(Evaluation))
    for name in names:
        _known(str(name), known, f"{where}: evaluations")
    return tuple(names)


def _check_labels(rows: tuple[Row, ...], where: str) -> None:
    labels = [row.label for row in rows]
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(f"{where}: two rows have the label {label!r}: change one of them.")


def _counts(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the counts in the file, each checked against its minimum."""
    lowest = {
        "seeds": 1,
        "first_seed": 0,
        "labelled_images": 2,
        "probe_images": 2,
        "probe_penalty": 0,
    }
    for key, limit in lowest.items():
        if values.get(key, limit) < limit:
            raise InputError(f"{where}: {key} = {values[key]} must be at least {limit}.")
    return {key: values[key] for key in lowest if key in values}


def _images(name: str, where: str) -> str:
    if name and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise InputError(
            f"{where}: images = {name!r} is part of the names of folders: use lower-case letters,"
            " digits, '.' and '-'."
        )
    return name


def _trend(values: Any, rows: Mapping[str, Any], where: str) -> Trend:
    _check_keys(values, TREND_KEYS, f"{where}: trend")
    chosen = values.get("rows") or [key for key, row in rows.items() if row.get("baseline")]
    for each in chosen:
        if not _known(str(each), rows, f"{where}: trend: rows").get("baseline"):
            raise InputError(f"{where}: trend: the row {each!r} has no baseline, hence no gain.")
    over = values.get("over", TREND_OVER[0])
    _known(over, dict.fromkeys(TREND_OVER), f"{where}: trend: over")
    return Trend(over, tuple(chosen))
