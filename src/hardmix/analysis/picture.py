"""A figure: a drawing, how to read it, and the numbers that are drawn.

matplotlib is optional and imported late, without pyplot. What is drawn in `INK` is `currentColor`
in an SVG: text and axes follow a page's light or dark scheme. The same numbers give the same bytes.
"""

import importlib.util
import io
import json
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import escape

from hardmix.errors import InputError
from hardmix.runtime.files import read_json, write_atomically

Format = Literal["svg", "png"]
LineStyle = Literal["-", "--", "-.", ":"]
FORMATS: tuple[Format, ...] = ("svg", "png")

INK = "#010203"
"""Text and axes: near black in a PNG, `currentColor` in an SVG."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's colours, which colour-blind people can distinguish; those that vanish on white or
black are omitted."""
LINES: tuple[LineStyle, ...] = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
SEQUENCE = "viridis"
"""Colours for ordered things, such as epochs."""
MOST_TOGETHER = 6
"""Most runs on one pair of axes with a legend: as many as there are colours."""
LONGEST = 44
"""Most characters of a label."""
WIDTH = 6.4
"""Width of a figure in inches."""

Drawing = Any
"""matplotlib's Figure or Axes."""

_STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": "medium",
    "axes.formatter.use_mathtext": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
    "font.size": 10.0,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "legend.fontsize": "small",
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.usetex": False,  # a matplotlibrc in the current folder must not start TeX
    "text.parse_math": False,  # a run may be called $x$
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure with its title, caption and numbers."""

    name: str
    """Name of its files, without suffix."""
    title: str
    """Title, drawn above the PNG."""
    caption: str
    """How to read it, in one or two sentences."""
    numbers: dict[str, Any]
    """The numbers that are drawn, as JSON."""
    figure: Drawing = field(default=None, repr=False)
    """matplotlib's figure; None if the picture was read from its files."""
    formats: tuple[Format, ...] = FORMATS
    """Formats that `save` writes in addition to JSON."""
    mark: str = ""
    """A hash of what it was made from; a picture with another mark is out of date."""


Found = tuple[list[Picture], list[str]]
"""Pictures, and sentences about what is missing."""


def check_installed() -> None:
    """Raise InputError if an optional dependency is missing, before any work."""
    missing = [name for name in ("matplotlib", "sklearn") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"figures need {' and '.join(missing)}, which is not installed:"
            " pip install 'hardmix[analysis]'."
        )


def save(picture: Picture, folder: Path) -> list[Path]:
    """Write NAME.svg, NAME.png and NAME.json to the folder, each atomically."""
    draw = {"svg": lambda: svg(picture).encode(), "png": lambda: png(picture)}
    facts = {"title": picture.title, "caption": picture.caption, "numbers": picture.numbers}
    if picture.mark:
        facts["mark"] = picture.mark
    data: dict[str, bytes] = {kind: draw[kind]() for kind in picture.formats}
    data["json"] = json.dumps(facts, allow_nan=False).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for kind, content in data.items():
            write_atomically(folder / f"{picture.name}.{kind}", content)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}.") from error
    return [folder / f"{picture.name}.{kind}" for kind in data]


def load(folder: Path, name: str, mark: str) -> Picture | None:
    """Load a picture that exists, is intact and has the same mark; otherwise None."""
    try:
        facts = read_json(folder / f"{name}.json")
        formats = tuple(kind for kind in FORMATS if (folder / f"{name}.{kind}").exists())
        if facts["mark"] == mark and "png" in formats:
            texts = facts["title"], facts["caption"], facts["numbers"]
            return Picture(name, *texts, formats=formats, mark=mark)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing or damaged, so it is made again
    return None


def svg(picture: Picture) -> str:
    """Return an SVG element for a page, without title, with text and axes in `currentColor`."""
    _title(picture, shown=False)
    with _style(picture.name):
        out = io.StringIO()
        # None omits an entry: a date would make the bytes differ.
        nothing = dict.fromkeys(["Date", "Creator", "Format", "Type"])
        picture.figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    # A hundredth of a point is enough: paths take half the bytes.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", text)
    words = f"<title>{escape(picture.title)}</title><desc>{escape(picture.caption)}</desc>"
    end = text.index(">") + 1
    return text[: end - 1] + ' role="img">' + words + text[end:]


def png(picture: Picture) -> bytes:
    """Return a PNG on white, with the title above it."""
    _title(picture, shown=True)
    with _style(picture.name):
        out = io.BytesIO()
        picture.figure.savefig(
            out, format="png", dpi=150, facecolor="white", metadata={"Software": None}
        )
    return out.getvalue()


@contextmanager
def canvas(title: str, height: float, width: float = WIDTH) -> Iterator[Drawing]:
    """Yield a new figure, in hardmix's style while it is drawn on."""
    check_installed()
    from matplotlib.figure import Figure

    with _style(""):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", weight="bold", size=11).set_gid("title")
        yield figure


def legend_below(
    figure: Drawing, handles: Sequence[Drawing], columns: int = 2, enlarge: float = 1.0
) -> None:
    """Add a legend below the axes; the figure grows by its height.

    `enlarge` makes its markers larger than those that are drawn.
    """
    rows = math.ceil(len(handles) / columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.19 * rows + 0.1)
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=columns,
        handlelength=3.2,
        markerscale=enlarge,
    )


def log_scale(axes: Drawing, name: Literal["x", "y"]) -> None:
    """Make an axis logarithmic with plain numbers, after everything is drawn on it."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set(**{f"{name}scale": "log"})
    low, high = axes.get_xlim() if name == "x" else axes.get_ylim()
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,), numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def shown(text: str) -> str:
    """Return a user's text for a figure: one line, shortened, and valid in XML."""
    clean = "".join(letter if letter.isprintable() else "?" for letter in text)
    clean = clean if len(clean) <= LONGEST else clean[: LONGEST - 3] + "..."
    return f" {clean}" if clean.startswith("_") else clean  # matplotlib hides labels with _


def colour(hue: int) -> str:
    """Return the colour of the run with index `hue`."""
    return COLOURS[hue % len(COLOURS)]


def line_style(hue: int) -> LineStyle:
    """Return a run's line style, which changes when colours repeat."""
    return LINES[(hue + hue // len(COLOURS)) % len(LINES)]


def ordered_colours(number: int) -> list[str]:
    """Return this many colours of `SEQUENCE`, without its palest end."""
    import matplotlib
    from matplotlib.colors import to_hex

    steps = max(1, number - 1)
    return [to_hex(matplotlib.colormaps[SEQUENCE](0.9 * i / steps)) for i in range(number)]


def _title(picture: Picture, *, shown: bool) -> None:
    for text in picture.figure.texts:
        if text.get_gid() == "title":
            text.set_visible(shown)
            text.set_in_layout(shown)


@contextmanager
def _style(salt: str) -> Iterator[None]:
    import matplotlib

    style = _STYLE | {"svg.hashsalt": f"hardmix {salt}"}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # names in any script
        yield
