"""`hardmix report RUN... --out report.html`: a report of one or more runs, on one page.

The page needs no network and no other file. Text from the runs goes through Jinja2's autoescape; a
content security policy allows only the script below, by its hash.
"""

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from hardmix.errors import InputError
from hardmix.report import (
    evaluation_tables,
    grouping,
    image_galleries,
    overview,
    run_figures,
    training_curves,
)
from hardmix.report.evaluation_tables import axis_of
from hardmix.report.looking import look_at_runs
from hardmix.runs.folder import versions
from hardmix.runs.reading import RunRecord, read_runs, several, with_new_results
from hardmix.runtime.console import duration, say
from hardmix.runtime.files import write_atomically

MARK = "<!-- Made by hardmix report. -->"
"""The page's second line; only a file that has it is overwritten."""

COLOURS = 8
"""Colours in page.css; further groups reuse them with another dash."""


def write_report(
    paths: Path | str | Sequence[Path | str], out: Path | str, *, look: bool = False
) -> Path:
    """Read one or more runs, and write their report.

    With `look`, runs that lack them get neighbours and a map of the features, and the gallery of
    hardest negatives. That needs their encoders and images.
    """
    out = Path(out)
    check_out(out)  # fail before the work, not after
    records = read_runs([Path(path) for path in several(paths)])
    if not look:
        return write_page(records, out)
    failures = look_at_runs(records)
    return write_page([with_new_results(record) for record in records], out, failures)


def write_page(runs: Sequence[RunRecord], out: Path, failures: Sequence[str] = ()) -> Path:
    """Write the page; its last section lists `failures` and everything that is missing."""
    check_out(out)
    readable = [run for run in runs if not run.is_empty]
    missing = [*failures, *(sentence for run in runs for sentence in run.missing)]
    missing += [sentence for run in readable for sentence in overview.incomplete(run)]
    if not readable:
        raise InputError("nothing to report. " + " ".join(missing or ["Name a run."]))
    page = render(readable, missing, out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page.encode("utf-8"))
    except OSError as error:
        raise InputError(f"out={out} cannot be written: {error.strerror}.") from error
    say(f"Wrote {out} ({len(page) / 1e6:.1f} MB, {len(readable)} of {len(runs)} runs)")
    if missing:
        say(f"  Missing: {len(missing)}; see the page's last section.")
    return out


def check_out(out: Path, mark: str = MARK) -> None:
    """Raise InputError unless `out` is new or an earlier page of this kind."""
    if out.is_dir():
        raise InputError(f"out={out} is a folder: use a file, such as {out}/report.html.")
    try:
        if not out.exists():
            return
        with out.open("rb") as old:
            ours = mark.encode() in old.read(400)
    except OSError as error:
        raise InputError(f"out={out} cannot be written: {error.strerror}.") from error
    if not ours:
        raise InputError(
            f"out={out} exists and is not a hardmix page: choose another name, or delete it."
        )


def render(
    runs: Sequence[RunRecord],
    missing: list[str],
    out: Path,
    *,
    live: Markup | None = None,
    script: str = "",
) -> str:
    """Return the page's HTML; sentences on missing parts are added to `missing`.

    `live` comes first on a page that is refreshed by `script`; such a page omits figures that would
    have to be drawn again each time.
    """
    groups = grouping.group_runs(runs)
    missing.extend(evaluation_tables.unknown_results(runs) + grouping.repeated_seeds(groups))
    ordered = [run for group in groups for run in group.runs]
    owned = overview.is_for_owner(ordered)
    words = ["hardmix", "report", *(str(run.run.path) for run in ordered), "--out", str(out)]
    context = {
        "owned": owned,
        "title": overview.title_of(groups),
        "paragraph": overview.paragraph_of(groups),
        "rows": overview.run_rows(groups),
        "groups": groups,
        "runs": ordered,
        "run_groups": {run.name: group.number for group in groups for run in group.runs},
        "differences": overview.differences(ordered),
        "versions": overview.versions_of(ordered),
        "commands": [(run, overview.commands_of(run)) for run in ordered],
        "report_command": shlex.join(words),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "page_versions": versions(),
        "evaluations": evaluation_tables.evaluations_of(groups),
        "verdicts": overview.verdicts_of(groups, missing),
        "links": live is None,  # a page from a server may not open files
        **curve_context(groups),
        # The paper's comparisons would only report that runs for them are missing.
        **picture_context(groups, missing, draw=live is None, compare=live is None and not owned),
    }
    own = part("page.js")
    return (
        environment()
        .get_template("template.html")
        .render(
            mark=Markup(MARK),
            script=Markup(own),
            policy=content_policy(own, script, connect="'self'") if live else content_policy(own),
            style=Markup(part("page.css") + (part("live.css") if live else "")),
            live=live,
            missing=missing,
            **context,
        )
    )


def curve_context(groups: Sequence[grouping.SeedGroup]) -> dict[str, Any]:
    """Return the curves' points, and a sample of them as tables."""
    curves = training_curves.curves_of(groups)
    tables = [
        (metric, training_curves.sample_table(curves, metric["key"]))
        for metric in curves["metrics"]
    ]
    return {"curves": curves, "curve_tables": tables}


def picture_context(
    groups: Sequence[grouping.SeedGroup],
    missing: list[str],
    draw: bool = True,
    compare: bool = True,
) -> dict[str, Any]:
    """Return figures (those that `compare` runs only if asked for), gallery and maps."""
    runs = [run for group in groups for run in group.runs]
    compared, names = run_figures.comparison(runs, missing) if compare else ([], set())
    maps = image_galleries.feature_maps(groups, missing)
    return {
        "neighbours": image_galleries.feature_galleries(groups, missing),
        "figures": compared + run_figures.of_each_run(groups, {*names, "embedding-map"}, missing),
        "galleries": image_galleries.galleries(groups, missing),
        "maps": maps,
        "map_data": [each.data | ({} if draw else {"links": {}}) for each in maps],
    }


@cache
def environment() -> Environment:
    """Return a Jinja2 environment that escapes everything; unknown names are errors."""
    environment = Environment(
        loader=FunctionLoader(part),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "data": data_block,
        "colour": colour,
        "points": points,
        "shown": overview.shown,
        "axis": axis_of,
        "duration": duration,
    }
    return environment


HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"  # controls, separators, halves
    r"\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"  # marks that turn the text around
)


def visible(value: Any) -> Any:
    """Return text with invisible and direction-changing characters escaped."""
    if not isinstance(value, str):
        return value
    text = HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", value)
    return Markup(text) if isinstance(value, Markup) else text


def data_block(value: Any) -> Markup:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(
        _visible_inside(value), separators=(",", ":"), allow_nan=False
    )  # ASCII: no U+2028
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _visible_inside(value: Any) -> Any:
    if isinstance(value, dict):
        return {visible(key): _visible_inside(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_visible_inside(each) for each in value]
    return visible(value)


def colour(group: int) -> str:
    """Return a group's colour, by its name in page.css."""
    return f"var(--c{group % COLOURS})"


def points(value: float) -> str:
    """Return a difference with its sign."""
    return f"{value:+.1f}".replace("-", "\N{MINUS SIGN}")


def content_policy(*scripts: str, images: str = "data:", connect: str = "'none'") -> str:
    """Return a policy that allows only the page's own scripts, by hash, and its images."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; img-src {images}; style-src 'unsafe-inline'; script-src {hashes};"
        f" connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


@cache
def part(name: str) -> str:
    """Return the text of a file in this folder."""
    return files("hardmix.report").joinpath(name).read_text(encoding="utf-8")
