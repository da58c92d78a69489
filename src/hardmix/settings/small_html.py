"""How a value looks in a notebook: a title, a table, a curve. Every text is escaped.

It is here because every room has values to show, and needs nothing but Python.
"""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, EDGE = 220, 70, 4
"""Size of a curve in pixels, and the space around it."""
MOST_POINTS = 150
"""Points of a curve; longer ones are thinned out."""


def facts_html(title: str, facts: Mapping[str, object], more: str = "") -> str:
    """Return a title and a table of names and values; `more` is HTML that follows."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(str(value))}</td></tr>"
        for name, value in facts.items()
    )
    table = f"<table>{rows}</table>" if rows else ""
    return f"<div><p><b>{escape(title)}</b></p>{table}{more}</div>"


def rows_html(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a title and a table with a line of column names."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = [
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    ]
    return f"<div><p><b>{escape(title)}</b></p><table><tr>{head}</tr>{''.join(lines)}</table></div>"


def curve_html(name: str, points: Sequence[tuple[float, float]]) -> str:
    """Return a curve as inline SVG, with its name, first and last value; empty below 2 points."""
    if len(points) < 2:
        return ""
    shown = [*points[:: max(1, len(points) // MOST_POINTS)], points[-1]]
    (left, right), (low, high) = (
        (min(values), max(values)) for values in ([p[axis] for p in shown] for axis in (0, 1))
    )
    across = (WIDTH - 2 * EDGE) / ((right - left) or 1)
    up = (HEIGHT - 2 * EDGE) / ((high - low) or 1)
    places = " ".join(
        f"{EDGE + across * (x - left):.1f},{HEIGHT - EDGE - up * (y - low):.1f}" for x, y in shown
    )
    text = f"{name}: {points[0][1]:.4g} to {points[-1][1]:.4g}"
    return (
        "<figure style='display:inline-block;margin:4px 12px 4px 0'>"
        f"<svg width='{WIDTH}' height='{HEIGHT}' role='img' aria-label='{escape(text)}'>"
        f"<polyline points='{places}' fill='none' stroke='#2a78b8' stroke-width='1.5'/></svg>"
        f"<figcaption>{escape(text)}</figcaption></figure>"
    )
