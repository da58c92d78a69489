"""Figures of paired differences: the numbers beside them are those that are drawn."""

import pytest

from hardmix.analysis.paired_gains import GainLine, GainPoint, forest, gain_over
from hardmix.analysis.picture import png, save, svg


def drawn_lines(picture) -> list:
    (axes,) = picture.figure.axes
    return axes.get_lines()


def test_a_forest_plot_has_every_seed_every_mean_and_the_line_of_no_difference(tmp_path):
    lines = [GainLine("MoCHi, weak", (0.5, 1.5), 0.8), GainLine("MoCHi <b>", (-1.0,), None)]
    picture = forest(lines, "linear probe", "forest-linear")
    places = [list(line.get_xdata()) for line in drawn_lines(picture)]
    assert [0.5, 1.5] in places
    assert [1.0] in places
    assert [0, 0] in places
    (axes,) = picture.figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "MoCHi, weak (2)",
        "MoCHi <b> (1)",
    ]
    assert picture.numbers["lines"][0] == {
        "label": "MoCHi, weak",
        "differences": (0.5, 1.5),
        "half": 0.8,
    }
    assert {file.suffix for file in save(picture, tmp_path)} == {".svg", ".png", ".json"}
    assert svg(picture).count("<svg") == 1
    assert png(picture).startswith(b"\x89PNG")


def test_the_line_goes_through_the_means_of_the_series_and_not_through_the_others():
    # Means of the series lie on gain = 0.01 * proxy accuracy - 0.1.
    series = [
        GainPoint(f"point {x}", (x - 1.0, x + 1.0), (0.01 * x - 0.2, 0.01 * x), 0.3)
        for x in (10, 40, 80)
    ]
    other = GainPoint("longer", (50.0,), (9.0,), None, in_line=False)
    picture = gain_over([*series, other], "proxy accuracy (%)", "linear probe", "gain")
    assert picture.numbers["line"] == [
        (10, pytest.approx(0.0)),
        (80, pytest.approx(0.7)),
    ]
    (axes,) = picture.figure.axes
    assert axes.get_xlabel() == "proxy accuracy (%)"
    assert len(picture.figure.legends[0].get_texts()) == 4


def test_two_points_have_no_line():
    points = [GainPoint(str(x), (float(x),), (1.0,), None) for x in (1, 2)]
    assert gain_over(points, "proxy accuracy", "k-NN", "gain").numbers["line"] is None
