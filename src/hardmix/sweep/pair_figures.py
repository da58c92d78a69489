"""Figures of pairs: forest plots of every accuracy, and the gains of trends."""

from collections.abc import Sequence

from hardmix.analysis.figures.paired_gains import GainLine, GainPoint, forest, gain_over
from hardmix.analysis.figures.picture import Picture
from hardmix.sweep.pairs import ACCURACIES, FoundTrend, Pairs, student_interval, values_over
from hardmix.sweep.results import SweepResult

FIGURED = (*ACCURACIES, "uniformity", "queue-uniformity")


def forests(pairs: Sequence[Pairs]) -> list[Picture]:
    """Draw a forest plot for every measure of `FIGURED`, with a line for every row."""
    pictures = []
    for measure in dict.fromkeys(each.measure for each in pairs if each.measure.id in FIGURED):
        lines = [
            GainLine(each.row, tuple(each.differences.values()), each.interval.half)
            for each in pairs
            if each.measure == measure
        ]
        pictures.append(forest(lines, measure.title, f"forest-{measure.id}", measure.percent))
    return pictures


def gains_over(
    result: SweepResult, pairs: Sequence[Pairs], found: Sequence[FoundTrend]
) -> list[Picture]:
    """Draw a figure for every trend: all rows with a gain, and the line of the trend's rows."""
    pictures = []
    of_both = {pair.measure.id for pair in pairs}
    titles = {
        measure.id: measure.title
        + " of the baseline" * (measure.id in of_both)
        + " (%)" * measure.percent
        for measure in result.measures
    }
    for each in found:
        points = []
        for pair in (pair for pair in pairs if pair.measure == each.measure):
            over = values_over(each.trend.over, pair.id, result)
            seeds = [seed for seed in pair.differences if seed in over]
            if seeds:
                gains = [pair.differences[seed] for seed in seeds]
                x = [over[seed] for seed in seeds]
                half = student_interval(gains).half
                own = pair.id in each.trend.rows
                points.append(GainPoint(pair.row, tuple(x), tuple(gains), half, own))
        name = f"gain-over-{each.trend.over}-{each.measure.id}"
        pictures.append(gain_over(points, titles[each.trend.over], each.measure.title, name))
    return pictures
