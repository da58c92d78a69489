"""Sec. 3.2 and App. B.1, the proxy task: Fig. 2b, from metrics.jsonl."""

from collections.abc import Sequence

from hardmix.analysis.figures import Line, fig2b
from hardmix.analysis.figures.fig2 import REAL_ONLY, WITH_POINTS
from hardmix.analysis.records import Found, Record, curve


def proxy_task(records: Sequence[Record]) -> Found:
    """Proxy accuracy over training of every run that logged it."""
    lines = []
    for record in records:
        epochs, mixed = curve(record, "proxy_accuracy_mixed")
        real_epochs, real = curve(record, "proxy_accuracy")
        # Without synthetic points both are the same line: it is drawn once, without markers.
        if not mixed or (epochs, mixed) == (real_epochs, real):
            epochs, mixed, real = real_epochs, real, []
        if mixed:
            lines.append(Line(record.label, WITH_POINTS, record.hue, epochs, mixed))
        if real:
            lines.append(Line(record.label, REAL_ONLY, record.hue, real_epochs, real))
    if not lines:
        return [], ["No run logged the proxy task: no Fig. 2b."]
    return [fig2b(lines, _note(records))], []


def _note(records: Sequence[Record]) -> str:
    """App. B.1 compares at one temperature: another makes another task."""
    temperatures = sorted(
        {
            r.config.train.temperature
            for r in records
            if r.config and r.config.method != "supervised"
        }
    )
    if len(temperatures) < 2:
        return ""
    words = ", ".join(f"{temperature:g}" for temperature in temperatures)
    return f" These runs have different temperatures ({words}), which changes the task too."
