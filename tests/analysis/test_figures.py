"""Figures: what is drawn is what the JSON says, the same bytes each time, on light and dark."""

import importlib.util
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from PIL import Image

from hardmix.analysis import (
    accuracy_grids,
    embedding,
    hardness,
    over_training,
    picture as pictures,
    toy_sphere,
)
from hardmix.analysis.accuracy_grids import MochiSetting, Place
from hardmix.analysis.embedding import MapPoints
from hardmix.analysis.gallery import Neighbour, Parents, Query, gallery
from hardmix.analysis.hardness import Histogram, Ranks
from hardmix.analysis.over_training import (
    BOTH_PARENTS,
    FALSE,
    ONE_PARENT,
    REAL_ONLY,
    WITH_POINTS,
    Curve,
)
from hardmix.analysis.picture import COLOURS, INK, Picture, check_installed
from hardmix.analysis.toy_sphere import ToyPoints
from hardmix.data.thumbnails import data_uri
from hardmix.errors import InputError

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib")

LINES = [
    Curve("MoCHi", WITH_POINTS, 0, [0.5, 1.0, 1.5], [0.1, 0.2, 0.25]),
    Curve("MoCHi", REAL_ONLY, 0, [0.5, 1.0, 1.5], [0.1, 0.4, 0.6]),
    Curve("MoCo-v2", WITH_POINTS, 1, [1.0, 2.0], [0.3, 0.7]),
]
SHARES = [
    Curve("MoCHi", FALSE, 0, [1.0, 2.0], [0.05, 0.08]),
    Curve("MoCHi", ONE_PARENT, 0, [1.0, 2.0], [0.06, 0.09]),
    Curve("MoCHi", BOTH_PARENTS, 0, [1.0, 2.0], [0.01, 0.02]),
]
RANKS = [
    ("MoCHi", [Ranks(0, [1, 2, 4], [0.1, 0.05, 0.01]), Ranks(1, [1, 2, 4], [0.2, 0.02, 0.001])]),
    ("MoCo-v2", [Ranks(0, [1, 2, 4], [0.1, 0.06, 0.02])]),
]
CELLS = [
    MochiSetting(64, 128, 0, 0.62, 0.01, 2),
    MochiSetting(64, 128, 32, 0.58, 0, 1),
    MochiSetting(32, 64, 0, 0.6, 0, 1),
]
BASELINE = MochiSetting(0, 0, 0, 0.6, 0.005, 3)
PLACES = [Place("MoCHi", 0, 0.5, -2.0), Place("MoCo-v2", 1, 0.4, -1.5)]
PIXELS = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
NEAR = Neighbour(3, data_uri(PIXELS), "cat", 0.9, True)
QUERY = Query(
    7,
    "shapes[7]",
    data_uri(PIXELS),
    "cat",
    [NEAR, NEAR._replace(id=4, label="dog", similarity=0.8, false=False)],
    [Parents("pair", 0.95, 0.4, [NEAR, NEAR]), Parents("query", 0.97, 0.3, [NEAR])],
)

DRAWINGS = {
    "fig1": lambda: toy_sphere.fig1(
        [ToyPoints("memory", [0.0, 1.0], [1.0, 0.0]), ToyPoints("query", [0.5], [0.5])], {"seed": 0}
    ),
    "fig2a": lambda: hardness.fig2a(RANKS),
    "fig2a of one run": lambda: hardness.fig2a(RANKS[:1]),
    "fig2b": lambda: over_training.fig2b(LINES),
    "fig2c": lambda: over_training.fig2c(SHARES),
    "fig3a": lambda: accuracy_grids.fig3a(CELLS, BASELINE, "k-NN accuracy"),
    "fig3b": lambda: accuracy_grids.fig3b(CELLS[:2], BASELINE, "k-NN accuracy"),
    "fig3c": lambda: accuracy_grids.fig3c(PLACES),
    "similarities": lambda: hardness.similarity_histograms(
        "MoCHi",
        [("positives", [Histogram(0, [0, 1, 3, 0])]), ("hardest", [Histogram(0, [1, 1, 2, 0])])],
    ),
    "map": lambda: embedding.embedding_map(
        MapPoints([0.0, 1.0, 2.0], [0.0, 1.0, 0.0], [0, 1, -1], ["cat", "dog"], []), "images"
    ),
    "spectrum": lambda: embedding.feature_spectrum([2.0, 1.0, 0.0], 1.9, None),
    "gallery": lambda: gallery([QUERY]),
}


class Rendered(NamedTuple):
    draw: Callable[[], Picture]
    picture: Picture
    svg: str
    png: bytes


@pytest.fixture(params=DRAWINGS, scope="module")
def rendered(request) -> Rendered:
    draw = DRAWINGS[request.param]
    picture = draw()
    svg = pictures.svg(picture) if "svg" in picture.formats else ""
    return Rendered(draw, picture, svg, pictures.png(picture))


def test_the_same_numbers_give_the_same_bytes_in_files_too(rendered, tmp_path):
    picture = rendered.draw()
    files = pictures.save(picture, tmp_path / "new" / "folder")
    data = {file.suffix[1:]: file.read_bytes() for file in files}
    assert data["png"] == rendered.png
    assert data.get("svg", b"").decode() == rendered.svg
    assert {file.suffix[1:] for file in files} == {*picture.formats, "json"}
    facts = json.loads(data["json"])
    assert facts == {
        "title": picture.title,
        "caption": picture.caption,
        "numbers": json.loads(json.dumps(picture.numbers)),
    }
    assert {file.name for file in files[0].parent.iterdir()} == {file.name for file in files}


def test_axes_have_labels_in_words(rendered):
    figure = rendered.picture.figure
    around = [text.get_text() for text in (figure._supxlabel, figure._supylabel) if text]
    for axes in figure.axes:
        shown = axes.axison and (axes.has_data() or axes.get_xlabel())
        words = [axes.get_xlabel(), axes.get_ylabel(), *around]
        assert not shown or any(len(word) > 3 for word in words)


def test_an_svg_follows_the_page_and_asks_for_nothing(rendered):
    text = rendered.svg
    if not text:
        assert rendered.picture.name == "gallery"  # a sheet of photographs is a PNG alone
        return
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "currentColor" in text
    assert INK not in text
    assert "<text" in text
    assert f"<title>{rendered.picture.title}</title>" in text
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    addresses = set(re.findall(r'(?:href|src)="(?!#|data:)([^"]+)"', text))
    assert not addresses
    assert not re.search(r"<path[^>]*#ffffff", text)  # no white behind it


def test_a_png_is_on_white(rendered):
    corner = Image.open(io.BytesIO(rendered.png)).convert("RGBA").getpixel((0, 0))
    assert corner == (255, 255, 255, 255)


def drawn(axes) -> list[tuple[list[float], list[float]]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]


def test_lines_over_training_are_the_numbers_in_percent():
    for picture, lines in [
        (over_training.fig2b(LINES), LINES),
        (over_training.fig2c(SHARES), SHARES),
    ]:
        found = drawn(picture.figure.axes[0])
        assert [x for x, _ in found] == [line.x for line in lines]
        for (_, y), line in zip(found, lines, strict=True):
            assert y == pytest.approx([100 * share for share in line.y])
        assert [line["y"] for line in picture.numbers["lines"]] == [line.y for line in lines]


def test_the_papers_markers_tell_the_kinds_apart():
    markers = [line.get_marker() for line in over_training.fig2c(SHARES).figure.axes[0].get_lines()]
    assert markers == ["None", "^", "s"]
    proxy = over_training.fig2b(LINES).figure.axes[0].get_lines()
    assert [line.get_marker() for line in proxy] == ["None", "^", "None"]
    assert proxy[0].get_color() == proxy[1].get_color() == COLOURS[0]
    assert proxy[2].get_color() == COLOURS[1]
    assert proxy[2].get_linestyle() != proxy[0].get_linestyle()


def test_a_panel_for_each_run_and_a_line_for_each_epoch():
    picture = hardness.fig2a(RANKS)
    for axes, (label, epochs) in zip(picture.figure.axes, RANKS, strict=True):
        assert axes.get_title(loc="left") == label
        assert drawn(axes) == [(each.rank, each.probability) for each in epochs]


def test_gains_are_written_into_their_cells():
    picture = accuracy_grids.fig3b(CELLS[:2], BASELINE, "k-NN accuracy")
    axes = picture.figure.axes[0]
    texts = {(*text.get_position(), text.get_text()) for text in axes.texts}
    assert texts == {(0, 0, "0.0"), (0, 1, "+2.0"), (1, 1, "-2.0")}
    shown = axes.images[0].get_array()
    assert shown[1, 0] == pytest.approx(2.0)
    assert bool(np.ma.getmaskarray(shown)[0, 1])  # s = 0, s' = 32 was not run
    assert {"num_pairs": 128, "num_with_query": 32, "gain": -2.0} in picture.numbers["cells"]


def test_accuracy_over_n_stands_beside_its_baseline():
    axes = accuracy_grids.fig3a(CELLS, BASELINE, "k-NN accuracy").figure.axes[0]
    points = {(x[0], round(y[0], 3)) for x, y in drawn(axes) if len(x) == 1}
    assert {(64, 62.0), (64, 58.0), (32, 60.0)} <= points
    assert any(y == pytest.approx([60.0, 60.0]) for _, y in drawn(axes))


def test_alignment_and_uniformity_are_negated():
    assert drawn(accuracy_grids.fig3c(PLACES).figure.axes[0]) == [([2.0], [-0.5]), ([1.5], [-0.4])]


def test_histograms_are_shares():
    picture = DRAWINGS["similarities"]()
    (x, y), *_ = drawn(picture.figure.axes[0])
    assert x == pytest.approx([-0.75, -0.25, 0.25, 0.75])
    assert y == pytest.approx([0, 25, 75, 0])
    assert picture.numbers["kinds"][0]["epochs"][0]["share"] == [0, 0.25, 0.75, 0]


def test_an_epoch_has_one_colour_in_all_panels():
    early, late = Histogram(0, [1, 1]), Histogram(5, [1, 3])
    picture = hardness.similarity_histograms("run", [("keys", [early, late]), ("points", [late])])
    first, second = picture.figure.axes[:2]
    colours = [line.get_color() for line in first.get_lines()]
    assert len(set(colours)) == 2
    assert [line.get_color() for line in second.get_lines()] == colours[1:]


def test_singular_values_are_shown_as_parts_of_the_largest():
    picture = DRAWINGS["spectrum"]()
    assert picture.numbers["singular_values"] == [1.0, 0.5, 0.0]
    assert list(picture.figure.axes[0].get_lines()[0].get_ydata())[:2] == [1.0, 0.5]


def test_the_gallery_frames_negatives_of_the_same_class_alone_in_grey():
    picture = gallery([QUERY])
    axes = picture.figure.axes[0]
    frames = [patch for patch in axes.patches if patch.get_linewidth() > 2]
    false = [NEAR, *(each for point in QUERY.synthetic for each in point.parents)]
    assert len(frames) == len(false)
    assert len(axes.images) == 1 + 2 + 2 * 2
    words = [text.get_text() for text in axes.texts]
    assert "0.90 same class" in words
    assert {patch.get_edgecolor() for patch in frames} == {to_rgba("#777777")}
    assert "0.80" in words


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", "$x^{", "_hidden", "a\0\n\x1b", "猫"]
)
def test_a_run_may_have_any_name(name):
    picture = over_training.fig2b([LINES[0]._replace(run=name)])
    root = ElementTree.fromstring(pictures.svg(picture))
    assert not [tag for tag in root.iter() if tag.tag.endswith("script")]
    shown = " ".join(root.itertext())
    assert name.strip("\0\n\x1b")[:8] in shown
    assert pictures.png(picture).startswith(b"\x89PNG")


def test_what_is_no_number_is_no_json(tmp_path):
    picture = over_training.fig2b([LINES[0]._replace(y=[0.1, float("nan"), 0.2])])
    with pytest.raises(ValueError, match="JSON"):
        pictures.save(picture, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        pictures.save(DRAWINGS["fig3c"](), tmp_path / "file")


def test_a_picture_is_read_again_unless_it_is_of_something_else(tmp_path):
    picture = DRAWINGS["fig3c"]()
    pictures.save(picture, tmp_path)
    assert pictures.load(tmp_path, "fig3c", "encoder 1") is None
    pictures.save(Picture(**{**vars(picture), "mark": "encoder 1"}), tmp_path)
    again = pictures.load(tmp_path, "fig3c", "encoder 1")
    assert again is not None
    assert (again.title, again.numbers, again.figure) == (picture.title, picture.numbers, None)
    assert pictures.load(tmp_path, "fig3c", "encoder 2") is None
    (tmp_path / "fig3c.json").write_text("{")
    assert pictures.load(tmp_path, "fig3c", "encoder 1") is None


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"hardmix\[analysis\]"):
        check_installed()
    with pytest.raises(InputError, match=r"hardmix\[analysis\]"):
        over_training.fig2b(LINES)
