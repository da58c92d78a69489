"""The report's numbers against the files they come from; hostile and broken files."""

import base64
import hashlib
import json
import re
import shutil
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from fake_runs import (
    ACTIVE_SVG,
    config_of,
    gallery_of,
    map_of,
    metrics_of,
    neighbours_of,
    picture,
    result_of,
    verdict_of,
    write_figures,
    write_run,
)
from hardmix.analysis.over_training import steps_per_epoch
from hardmix.commands import main as cli
from hardmix.errors import InputError
from hardmix.paper.numbers import paper_beside, paper_rows
from hardmix.report.evaluation_tables import axis_of, axis_over, evaluations_of
from hardmix.report.grouping import group_runs
from hardmix.report.overview import commands_of, differences
from hardmix.report.page import data_block, visible, write_report
from hardmix.report.run_figures import figure_of
from hardmix.report.training_curves import (
    MOST_POINTS,
    all_metrics,
    curves_of,
    curves_of_run,
    thinned,
)
from hardmix.runs import summary
from hardmix.runs.reading import read_runs, short_names
from hardmix.settings.saved import flatten
from hardmix.settings.schedules import cosine

pytestmark = pytest.mark.slow

EMPTY_ELEMENTS = {"meta", "link", "img", "br", "input", "col"}
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'-alert(1)-'",
    "</script><script>alert(1)</script>",
    "{{ 7 * 7 }}{% raw %}",
    "\u2028\u2029\u202e\x1b[31mred\x00",
    "&lt;script&gt;",
]


class Page(HTMLParser):
    """The page as a browser reads it: elements, attributes, text by section."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.source = file.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY_ELEMENTS:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open[-1] == tag, (self.open, tag)
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data
        if "table" in self.open and {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    @property
    def photographs(self) -> list[dict[str, str | None]]:
        """The attributes of every image that is not a drawing."""
        images = (found for tag, found in self.elements if tag == "img")
        return [found for found in images if not found["src"].startswith("data:image/svg")]

    def rows(self, heading: str) -> list[list[str]]:
        """Return the rows of the table under a column of this name."""
        found = next(table for table in self.tables if table and heading in table[0])
        return [[" ".join(cell.split()) for cell in row] for row in found[1:]]


def report(folder: Path, *runs: Path) -> Page:
    return Page(write_report(runs, folder / "out" / "report.html"))


def four_runs(folder: Path) -> list[Path]:
    """MoCo-v2 and MoCHi with two and three seeds."""
    scores = {("moco-v2", 0): 0.50, ("moco-v2", 1): 0.53}
    scores |= {("mochi", 0): 0.55, ("mochi", 1): 0.52, ("mochi", 2): 0.58}
    runs = []
    for (method, seed), top1 in scores.items():
        config = config_of(method, seed, train__epochs=4)
        results = {"knn": result_of(config, top1, k=200)}
        runs.append(write_run(folder / f"{method}-{seed}", config, metrics_of(4), results))
    return runs


def test_the_table_holds_mean_deviation_and_gain_of_the_result_files(tmp_path):
    rows = report(tmp_path, *four_runs(tmp_path)).rows("Gain over MoCo-v2")
    ours, theirs = [55.0, 52.0, 58.0], [50.0, 53.0]
    error = (statistics.variance(ours) / 3 + statistics.variance(theirs) / 2) ** 0.5
    assert rows[0] == [
        "MoCo-v2",
        "2",
        f"51.5 ± {statistics.stdev(theirs):.1f}",
        "",
        "71.5",
        "baseline",
    ]
    assert rows[1] == [
        "MoCHi (128, 128, 16)",
        "3",
        f"55.0 ± {statistics.stdev(ours):.1f}",
        "",
        "75.0",
        f"+3.5 ± {error:.1f}",
    ]


def test_a_gain_is_taken_only_over_the_same_settings(tmp_path):
    runs = four_runs(tmp_path)
    other = config_of("mochi", 0, train__epochs=8)
    runs.append(write_run(tmp_path / "longer", other, None, {"knn": result_of(other, 0.9, k=200)}))
    alone = config_of("mochi", 0, train__epochs=4, mix__num_pairs=64)
    runs.append(write_run(tmp_path / "fewer", alone, None, {"knn": result_of(alone, 0.4, k=200)}))
    (evaluation,) = evaluations_of(group_runs(read_runs(runs)))
    gains = {score.group.label: score.gain for score in evaluation.scores}
    assert gains["MoCHi (128, 128, 16), 8 epochs"].points is None
    assert gains["MoCHi (128, 128, 16), 8 epochs"].word == "no MoCo-v2 run with these settings"
    assert gains["MoCHi (128, 64, 16)"].points == pytest.approx(40 - 51.5)
    assert gains["MoCHi (128, 64, 16)"].error is None
    assert gains["MoCHi (128, 64, 16)"].word == "one seed"


def test_how_a_run_was_logged_does_not_make_another_group(tmp_path):
    first = config_of("mochi", 0, train__log_every=5)
    second = config_of("mochi", 1, train__log_every=50, train__device="cuda")
    third = config_of("mochi", 2, data__root="elsewhere")
    paths = [write_run(tmp_path / str(n), each) for n, each in enumerate([first, second, third])]
    assert [len(group.runs) for group in group_runs(read_runs(paths))] == [2, 1]


def test_a_copy_of_a_run_is_not_taken_for_another_seed(tmp_path):
    (run, *_) = four_runs(tmp_path)
    copy = shutil.copytree(run, tmp_path / "copy")
    assert (
        "moco-v2-0, copy have the same settings and the same seed 0"
        in report(tmp_path, run, copy).text
    )


def test_results_of_different_protocols_are_never_averaged(tmp_path):
    runs = four_runs(tmp_path)
    result = json.loads((runs[1] / "results" / "knn.json").read_text())
    (runs[1] / "results" / "knn.json").write_text(json.dumps({**result, "k": 20}))
    first, second = evaluations_of(group_runs(read_runs(runs)))
    by_words = {each.protocol: each for each in (first, second)}
    assert [len(score.values) for score in by_words["k 200, on shapes"].scores] == [1, 3]
    assert [len(score.values) for score in by_words["k 20, on shapes"].scores] == [1]


def test_what_needs_no_training_stands_below(tmp_path):
    config = config_of()
    floor = {"pixels": {"top1": 0.125}, "untrained": {"top1": 0.25}}
    results = {"knn": result_of(config, 0.5, baselines=floor)}
    rows = report(tmp_path, write_run(tmp_path / "run", config, None, results)).rows("Top-1")
    assert [(row[0], row[2]) for row in rows[1:]] == [
        ("raw pixels", "12.5"),
        ("untrained encoder", "25.0"),
    ]


def test_detectors_are_listed_by_their_average_precision(tmp_path):
    config = config_of(recipe="imagenet1k")
    numbers = {"ap": {"mean": 0.551}, "ap50": {"mean": 0.8}, "ap75": {"mean": None}}
    detection = {
        "metrics": {"VOC07 11-point": numbers},
        "settings": {"task": "voc", "iterations": 100, "batch_size": 16, "start": "run"},
        "images": {"train": 10, "test": 4952},
        "versions": {},
    }
    run = write_run(tmp_path / "run", config, None, {"detection-voc-24k": detection})
    page = report(tmp_path, run)
    (row,) = page.rows("AP")
    assert (row[2], row[3]) == ("55.1", "80.0")
    assert "57.1" in row[5]  # Table 2, MoCHi (512, 1024, 512), 200 epochs
    assert "iterations 100 instead of 24000" in page.text


def test_detectors_from_other_weights_are_never_called_the_runs(tmp_path):
    detection = {
        "metrics": {"VOC07 11-point": {"ap": {"mean": 0.338}, "ap50": {"mean": 0.602}}},
        "settings": {"task": "voc", "schedule": "24k"},
        "start": "random",
        "versions": {},
    }
    config = config_of(recipe="imagenet1k")
    run = write_run(tmp_path / "run", config, None, {"detection-voc-24k-random": detection})
    page = report(tmp_path, run)
    assert "Detection, VOC07 11-point, from random weights" in page.text
    (row,) = page.rows("AP")
    assert "57.1" not in " ".join(row)


LINEAR = {"protocol": "preset imagenet100", "data": "imagenet100"}


@pytest.mark.parametrize(
    ("method", "oracle", "value", "std"),
    [
        ("moco-v1", False, 74.0, None),
        ("moco-v2", False, 78.0, 0.2),
        ("moco-v2", True, 81.8, None),
        ("mochi", False, 79.0, 0.4),
        ("mochi", True, 82.5, None),
        ("supervised", False, 86.2, None),
    ],
)
def test_the_paper_s_own_settings_are_comparable_with_table_1(method, oracle, value, std):
    chosen = flatten(config_of(method, recipe="imagenet100", oracle=oracle))
    beside = paper_beside(chosen, "linear", "top1", LINEAR)
    assert (beside.row.value, beside.row.std, beside.row.place) == (value, std, "Table 1")
    assert beside.comparable
    assert beside.sentence.startswith("Comparable with Table 1 as far as it goes: ")
    assert "the paper does not state the backbone" in beside.sentence


@pytest.mark.parametrize(
    ("changes", "result", "reason"),
    [
        ({"train__epochs": 3}, {}, "3 epochs instead of 100"),
        ({"train__queue_size": 2048}, {}, "a queue of 2048 instead of 16384"),
        ({"model__backbone": "small"}, {}, "backbone small instead of resnet50"),
        ({"data__image_size": 32}, {}, "image size 32 instead of 224"),
        ({"data__name": "cifar10"}, {"data": "cifar10"}, "trained on cifar10 instead of"),
        ({}, {"data": "flowers"}, "evaluated on flowers"),
        ({"mix__num_pairs": 7}, {}, "(N, s, s') (1024, 7, 128) instead of"),
        ({}, {"protocol": "cached features"}, "evaluated differently from the paper (cached"),
        ({"data__num_images": 500}, {}, "number of images 500 instead of all"),
        ({"train__epochs": 100}, {}, "a schedule of 100 epochs, where the paper stops one of 200"),
        ({"train__epochs": 800}, {}, "the paper's 800 epochs are not one plain schedule"),
        ({"model__key_bn_splits": 1}, {}, "key batch-norm groups 1 instead of 4"),
        ({"train": {}}, {}, "temperature unknown instead of 0.2"),
    ],
)
def test_a_run_that_differs_from_the_paper_s_says_in_what(changes, result, reason):
    config = config_of("mochi", recipe="imagenet100", **changes)
    beside = paper_beside(flatten(config), "linear", "top1", LINEAR | result)
    assert not beside.comparable
    assert beside.sentence.startswith("Not comparable: ")
    assert reason in beside.sentence


def test_800_epochs_are_comparable_if_they_continue_200_as_app_c_1_says():
    chosen = flatten(config_of("mochi", recipe="imagenet100", train__epochs=800))

    def lines(first):
        lengths = [first] * 200 + [800] * 600
        return [{"epoch": e, "lr": 0.03 * cosine(e, n)} for e, n in enumerate(lengths)]

    restarted = paper_beside(chosen, "linear", "top1", LINEAR, lines(200))
    assert (restarted.row.value, restarted.comparable) == (84.5, True)
    assert not paper_beside(chosen, "linear", "top1", LINEAR, lines(800)).comparable
    oracle = config_of("mochi", recipe="imagenet100", train__epochs=400, oracle=True)
    beside = paper_beside(flatten(oracle), "linear", "top1", LINEAR, lines(200))
    assert beside.row.value == 84.2
    assert "does not say how its 400 epochs were scheduled" in beside.sentence
    assert "App. C.1" not in beside.sentence


def test_the_paper_s_row_of_the_same_length_and_queue_is_chosen():
    half = flatten(config_of("mochi", recipe="imagenet100", train__stop_epoch=100))
    beside = paper_beside(half, "linear", "top1", LINEAR)
    assert (beside.row.value, beside.comparable) == (73.6, True)
    short_queue = flatten(config_of("moco-v2", recipe="imagenet100", train__queue_size=4096))
    assert paper_beside(short_queue, "linear", "top1", LINEAR).row.value == 77.5
    assert paper_beside(short_queue, "none", "top1", {}).row is None
    assert paper_beside(flatten(config_of()), "linear", "top1", {}).row is None


def test_the_paper_s_numbers_come_with_the_package():
    rows = paper_rows()
    assert len(rows) > 200
    assert all(row.method not in ("SimCLR", "PIRL") for row in rows)  # copied by the paper
    assert 73.4 not in [row.value for row in rows if row.queue_size == 1024]  # "(all queue)"


def test_the_paper_s_number_and_its_sentence_are_on_the_page(tmp_path):
    config = config_of("mochi", recipe="imagenet100", train__epochs=3)
    run = write_run(tmp_path / "run", config, None, {"linear": result_of(config, 0.2, **LINEAR)})
    page = report(tmp_path, run)
    assert page.rows("Paper")[0][5] == "73.6 Table 1 of the appendix, not comparable"
    assert "Not comparable: 3 epochs instead of 100." in page.text
    assert "Comparable with" not in page.text


def hostile_run(folder: Path, text: str) -> Path:
    """Write a run with the text wherever a run can hold some."""
    name = text.replace("/", "|").replace("\x00", "")
    config = config_of(data__root=text, model__backbone=text)
    config["unknown" + text] = {text: text}
    results = {"linear": result_of(config, 0.5, protocol=text, data=text), "knn": {"top1": text}}
    results["linear"] |= {
        "command": text,
        "versions": {text: text},
        "baselines": {text: {"top1": 0}},
    }
    results[name] = result_of(config, 0.4)
    results["verdict"] = verdict_of(text=text, next=[text], mixing=text, measured={text: 0.5})
    run = write_run(folder / name, config, metrics_of(2), results)
    write_figures(run, {"gallery.json": gallery_of([text], caption=text)})
    write_figures(run, {"embedding-map.json": map_of([text])})
    write_figures(run, {"neighbours.json": neighbours_of([text], caption=text)})
    facts = {"title": text, "caption": text, "numbers": {text: text}}
    drawing = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 9 9'><text>x</text></svg>"
    write_figures(run, {"spectrum.svg": drawing, "spectrum.json": facts})
    return run


def test_nothing_from_a_run_becomes_markup(tmp_path):
    page = report(tmp_path, *(hostile_run(tmp_path, text) for text in HOSTILE))
    assert page.open == []
    assert [tag for tag, _ in page.elements].count("script") == 3
    assert not [name for _, found in page.elements for name in found if name.startswith("on")]
    sources = [found["src"] for tag, found in page.elements if tag == "img"]
    drawings = [each for each in sources if each.startswith("data:image/svg+xml;base64,")]
    pictures = [each for each in sources if each.startswith("data:image/webp;base64,")]
    assert len(drawings) >= len(HOSTILE)
    assert len(pictures) == len(HOSTILE) * (2 * (1 + 4 + 3) + 2 * (1 + 4))
    assert len(sources) == len(drawings) + len(pictures)
    assert not set(page.source) & set("\u2028\u2029\u202e\x1b\x00")
    for text in HOSTILE:
        assert visible(text) in page.text
    for block in page.scripts[:2]:
        json.loads(block)


def test_only_our_script_may_run(tmp_path):
    page = report(tmp_path, write_run(tmp_path / "run", config_of(), metrics_of(2)))
    policy = next(
        found["content"] for _, found in page.elements if found.get("http-equiv") is not None
    )
    digest = base64.b64encode(hashlib.sha256(page.scripts[2].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline';")
    addresses = [found.get(name) for _, found in page.elements for name in ("src", "href")]
    assert all(each.startswith(("#", "data:")) for each in addresses if each is not None)


def test_json_in_a_script_block_cannot_end_it():
    text = str(data_block({"</script>": ["<!--", "\u2028", "&"]}))
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == {"</script>": ["<!--", "\\u2028", "&"]}


@pytest.mark.parametrize("inside", ACTIVE_SVG)
def test_a_drawing_is_an_image_and_never_markup(inside, tmp_path):
    source = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 9 9'>{inside}</svg>"
    run = write_run(tmp_path / "run", config_of(), metrics_of(2))
    facts = {"title": 'A "title"', "caption": "c", "numbers": {}}
    write_figures(run, {"spectrum.svg": source, "spectrum.json": facts})
    page = report(tmp_path, run)
    for bad in (
        "evil",
        "javascript",
        "onclick",
        "onload",
        "alert(",
        "behavior: url",
        "foreignObject",
    ):
        assert bad not in page.source
    (image,) = (
        found for tag, found in page.elements if tag == "img" and found["alt"] == 'A "title"'
    )
    kind, _, data = image["src"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(data).decode() == source


@pytest.mark.parametrize(
    "source",
    [
        b"",
        b"<svg>",
        b"<html/>",
        b"<!DOCTYPE svg [<!ENTITY a 'b'>]><svg xmlns='http://www.w3.org/2000/svg'>&a;</svg>",
        b"<svg" + b" " * 2_000_001 + b"/>",
    ],
)
def test_what_is_no_drawing_is_refused(source):
    with pytest.raises(ValueError, match=r"XML|SVG|entities|MB"):
        figure_of(source, "title", "", {})


def test_a_figure_that_is_wide_gets_the_whole_width():
    drawing = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {} 9'/>"
    wide = [figure_of(drawing.format(width).encode(), "", "", {}).wide for width in (400, 700)]
    assert wide == [False, True]


def test_ids_on_the_page_are_unique_though_runs_have_the_same_figures(tmp_path):
    runs = four_runs(tmp_path)
    drawing = (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 9 9'><defs><path id='m' d='M0 0'/>"
        "</defs><use href='#m'/></svg>"
    )
    for run in runs:
        facts = {"title": "Spectrum", "caption": "c", "numbers": {}}
        write_figures(run, {"spectrum.svg": drawing, "spectrum.json": facts})
    page = report(tmp_path, *runs)
    ids = [found["id"] for _, found in page.elements if "id" in found]
    assert len(ids) == len(set(ids))
    links = [found["href"][1:] for tag, found in page.elements if tag in ("a", "use")]
    assert set(links) <= set(ids)


def older(text: str) -> str:
    config = json.loads(text)
    del config["model"]["key_bn_splits"]
    config["train"]["warmth"] = 3
    return json.dumps(config)


def from_the_network() -> dict:
    gallery = gallery_of(["a"])
    gallery["numbers"]["queries"][0]["image"] = "https://evil.example/x.png"
    return gallery


def left() -> dict:
    strange = map_of(["a"])
    strange["numbers"]["x"][0] = "left"
    return strange


UNREADABLE = "cannot be shown: it is damaged or not from hardmix."
STRANGE_CONFIG = {"method": ["x"], "train": 7, "mix": None, "data": {"name": 3}}
EMPTY_FACTS = {"title": "", "caption": "", "numbers": 1}
BROKEN = [
    ("metrics.jsonl", None, ": metrics.jsonl is missing, so it has no curves."),
    ("metrics.jsonl", lambda _: "", ": metrics.jsonl is empty, so it has no curves."),
    ("metrics.jsonl", lambda _: '3\n[1]\n"x"\nnull\n', ": metrics.jsonl is empty"),
    ("metrics.jsonl", lambda _: b"\xff\xfe\x00", ": metrics.jsonl cannot be read"),
    ("metrics.jsonl", lambda text: text + '{"st', ": 1 broken line of metrics.jsonl was skipped."),
    ("config.json", None, ": config.json is missing."),
    (
        "config.json",
        lambda text: text[:30],
        ": config.json is damaged: it cannot be read",
    ),
    ("config.json", lambda _: "[]", ": config.json is not a JSON object."),
    ("config.json", older, ": an older version did not record model.key_bn_splits;"),
    ("config.json", older, ": this version does not know train.warmth; shown as recorded."),
    ("config.json", lambda _: STRANGE_CONFIG, ": an older version did not record"),
    ("results/knn.json", None, ": no evaluation yet; try hardmix knn and hardmix linear."),
    ("results/knn.json", lambda text: text[:9], ": results/knn.json is damaged"),
    (
        "results/knn.json",
        lambda _: {"top1": "a", "run": 1},
        ": results/knn.json has no number",
    ),
    ("figures/gallery.json", lambda _: '{"numbers": {"q', f": figures/gallery.json {UNREADABLE}"),
    ("figures/gallery.json", lambda _: {"numbers": {"queries": [3]}}, ": figures/gallery.json"),
    ("figures/gallery.json", lambda _: from_the_network(), ": figures/gallery.json cannot be"),
    ("figures/embedding-map.json", lambda _: left(), ": figures/embedding-map.json cannot be"),
    ("figures/x.svg", lambda _: "<svg xmlns='http://www.w3.org/2000/svg'/>", ": figures/x.svg"),
    ("figures/y.svg", lambda _: "<svg", ": figures/y.svg cannot be shown"),
]
"""A file of a run, what becomes of its text (None: it is gone), and what the page says."""


def test_what_is_missing_is_said_and_the_rest_is_shown(tmp_path):
    (good, pattern, *_) = four_runs(tmp_path)
    runs = [good]
    for number, (name, change, _) in enumerate(BROKEN):
        run = shutil.copytree(pattern, tmp_path / f"broken{number}")
        write_figures(run, {"y.json": EMPTY_FACTS})
        file = run / name
        made = None if change is None else change(file.read_text() if file.exists() else "")
        if made is None:
            file.unlink()
        else:
            made = json.dumps(made) if isinstance(made, dict) else made
            file.write_bytes(made if isinstance(made, bytes) else made.encode())
        runs.append(run)
    page = report(tmp_path, *runs)
    for number, (_, _, sentence) in enumerate(BROKEN):
        assert f"broken{number}{sentence}" in page.text
    assert "moco-v2-0:" not in page.text.partition("What is missing")[2]
    assert {row[0] for row in page.rows("Last loss")} == {run.name for run in runs}
    assert page.open == []


def test_a_config_that_is_nested_without_end_costs_no_more_than_the_figures(tmp_path):
    (good, bad, *_) = four_runs(tmp_path)
    (bad / "config.json").write_text("[" * 100_000)
    page = report(tmp_path, good, bad)
    assert "moco-v2-1: config.json is damaged" in page.text
    assert len(page.rows("Last loss")) == 2


def test_a_run_without_labels_says_so(tmp_path):
    run = write_run(tmp_path / "run", config_of(), metrics_of(3, labelled=False))
    page = report(tmp_path, run)
    assert (
        "run: its images have no labels, so there are no false negatives and no k-NN." in page.text
    )


def test_a_result_of_an_earlier_length_of_the_run_is_named(tmp_path):
    (run, *_) = four_runs(tmp_path)
    (run / "config.json").write_text(json.dumps(config_of("moco-v2", 0, train__epochs=9)))
    text = report(tmp_path, run).text
    assert "results/knn.json was measured when train.epochs was 4; it is now 9." in text


def test_folders_that_are_no_runs_are_named_beside_those_that_are(tmp_path):
    (tmp_path / "empty").mkdir()
    run = write_run(tmp_path / "run", config_of(), metrics_of(2))
    page = report(tmp_path, tmp_path / "absent", run, tmp_path / "empty", run)
    assert f"{tmp_path / 'absent'} is not a folder." in page.text
    assert f"{tmp_path / 'empty'} is not a run: it has no config.json." in page.text
    assert len(page.rows("Last loss")) == 1


def test_with_nothing_to_show_no_page_is_written(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"nothing to report.*empty is not a run"):
        write_report([tmp_path / "empty"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_only_an_earlier_page_is_replaced_and_nothing_else_is_touched(tmp_path):
    runs = four_runs(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(InputError, match=r"config\.json exists and is not a hardmix page"):
        write_report(runs, runs[0] / "config.json")
    with pytest.raises(InputError, match="is a folder"):
        write_report(runs, tmp_path)
    with pytest.raises(InputError, match="cannot be written"):
        write_report(runs, runs[0] / "config.json" / "report.html")
    page = write_report(runs, tmp_path / "new" / "report.html")
    write_report(runs[:1], page)
    assert "1 run:" in Page(page).text
    after = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert {**after} == {**before, page: page.read_bytes()}


def test_the_command_writes_the_page_and_refuses_bad_input_with_status_2(tmp_path, capfd):
    run = write_run(tmp_path / "run", config_of(), metrics_of(2))
    for arguments, status, words in (
        (["report", str(run), "--out", str(tmp_path / "r.html")], 0, "Wrote"),
        (["report"], 2, "name at least one run"),
        (["report", str(tmp_path / "none"), "--out", str(tmp_path / "s.html")], 2, "not a folder"),
    ):
        with pytest.raises(SystemExit) as done:
            cli.main(arguments)
        shown = capfd.readouterr()
        assert done.value.code == status
        assert words in " ".join((shown.out + shown.err).split())
    assert (tmp_path / "r.html").exists()
    assert not (tmp_path / "s.html").exists()


def test_curves_run_over_epochs_and_leave_out_what_is_no_number(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "run", config_of(), metrics_of(4))])
    by_key = curves_of_run(run, all_metrics([run]))
    assert steps_per_epoch(run.metrics) == 10
    assert by_key["loss"][0] == (0.5, 7.75)
    assert by_key["loss"][-1] == (4, 6)
    assert by_key["knn"] == [(1, 32.5), (2, 45), (3, 57.5), (4, 70)]
    assert len(by_key["synthetic_one_false"]) == 7  # the first was NaN
    assert by_key["synthetic_query_false"] == []


def test_every_number_that_a_method_logs_has_a_curve(tmp_path):
    lines = [line | {"code_entropy": 0.5 + line["step"], "note": "text"} for line in metrics_of(4)]
    runs = read_runs([write_run(tmp_path / "run", config_of("swav"), lines)])
    curves = curves_of(group_runs(runs))
    names = {metric["key"]: metric["name"] for metric in curves["metrics"]}
    assert names["code_entropy"] == "Code entropy"
    assert len(curves["points"]["code_entropy"][0]) == len(lines)
    assert not {"step", "epoch", "note"} & names.keys()
    assert "Code entropy" in Page(write_report([tmp_path / "run"], tmp_path / "report.html")).text


def test_long_curves_are_thinned_to_means(tmp_path):
    points = [(float(n), float(n % 2)) for n in range(1000)]
    thin = thinned(points, MOST_POINTS)
    assert len(thin) <= MOST_POINTS
    assert thin[0] == (1.5, 0.5)  # the first four
    assert thinned(points[:300], MOST_POINTS) == points[:300]


def test_curves_of_the_page_are_those_of_the_metrics(tmp_path):
    page = report(tmp_path, *four_runs(tmp_path))
    data = json.loads(page.scripts[0])
    assert [run["name"] for run in data["runs"]] == [
        "moco-v2-0",
        "moco-v2-1",
        "mochi-0",
        "mochi-1",
        "mochi-2",
    ]
    assert [run["group"] for run in data["runs"]] == [0, 0, 1, 1, 1]
    assert data["points"]["loss"][0][-1] == [4.0, 6.0]


def test_only_settings_that_differ_are_compared(tmp_path):
    paths = [
        write_run(tmp_path / "a", config_of("mochi", 0)),
        write_run(tmp_path / "b", config_of("mochi", 1, mix__num_pairs=64)),
    ]
    assert differences(read_runs(paths)) == [
        ("mix.num_pairs", ["128", "64"]),
        ("train.seed", ["0", "1"]),
    ]


def test_commands_to_repeat_a_run_are_quoted_for_the_shell(tmp_path):
    (run,) = four_runs(tmp_path)[:1]
    run = run.rename(tmp_path / "my run; rm x")
    commands = {each.about: each.line for each in commands_of(*read_runs([run]))}
    assert commands["Train it again"] == (
        f"hardmix pretrain --config '{run}/config.json' --out '{run}-again'"
    )
    assert commands["results/knn.json"] == "hardmix knn 'my run'"


def test_names_are_as_short_as_tells_runs_apart():
    assert short_names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert short_names([Path("/x/1/run"), Path("/x/2/run")]) == ["1/run", "2/run"]


def test_gallery_and_map_stand_without_javascript(tmp_path):
    run = write_run(tmp_path / "run", config_of(), metrics_of(2))
    write_figures(run, {"gallery.json": gallery_of(["cat", "dog"])})
    write_figures(run, {"embedding-map.json": map_of(["cat", "dog"])})
    page = report(tmp_path, run)
    images = page.photographs
    assert images[0]["src"] == picture(0)
    assert images[2]["alt"] == "dog, 0.890, same class"
    marks = re.findall(r"<em>(.*?)</em>", page.source)
    parents = ["one parent of the same class", "parent of the same class"]
    assert marks == 2 * ["same class", *parents]
    assert "false" not in " ".join(found.get("class") or "" for _, found in page.elements)
    dots = [found["d"] for tag, found in page.elements if tag == "path" and "h0" in found["d"]]
    assert sum(each.count("h0") for each in dots) == 60


def test_what_does_not_fit_on_the_page_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("hardmix.report.image_galleries.MOST_BYTES", 5_000)
    runs = four_runs(tmp_path)[:2]
    for run in runs:
        write_figures(run, {"gallery.json": gallery_of(["cat"])})
    sizes = [(run / "figures" / "gallery.json").stat().st_size for run in runs]
    assert max(sizes) <= 5_000 < sum(sizes)
    text = report(tmp_path, *runs).text
    assert re.search(r"moco-v2-1: .*gallery\.json was omitted to keep the page small", text)


def test_the_page_answers_in_the_reader_s_order(tmp_path):
    config = config_of(train__epochs=4)
    results = {"verdict": verdict_of(), "knn": result_of(config, 0.5)}
    run = write_run(tmp_path / "run", config, metrics_of(4), results)
    write_figures(run, {"gallery.json": gallery_of(["cat", "dog"])})
    write_figures(run, {"embedding-map.json": map_of(["cat", "dog"])})
    write_figures(run, {"neighbours.json": neighbours_of(["a.jpg"])})
    page = report(tmp_path, run)
    sections = [found["id"] for tag, found in page.elements if tag == "section"]
    assert sections == [
        *["verdict", "neighbours", "map", "results", "curves", "figures", "gallery"],
        *["runs", "settings", "repeat", "missing"],
    ]
    links = [
        found["href"][1:] for tag, found in page.elements if tag == "a" and "target" not in found
    ]
    assert links == ["main", *sections[1:]]


def test_the_verdict_stands_first_with_its_advice_and_its_numbers(tmp_path):
    mixing = "proxy accuracy 5 %: mixing is not expected to help yet"
    results = {"verdict": verdict_of(mixing=mixing)}
    page = report(tmp_path, write_run(tmp_path / "run", config_of(), metrics_of(2), results))
    text = page.text.partition("1 run:")[0]  # the paragraph on what was run follows
    assert "The encoder is worse than the weights it started from." in text
    advice = [text.index(each) for each in ("a lower learning rate", "train longer")]
    advice.append(text.index(f"Mixing: {mixing}"))
    assert advice == sorted(advice)
    shown = re.findall(r"<dt>(.*?)</dt><dd><span><i style=\"width:(.*?)%\"", page.source)
    assert shown == [
        ("this encoder", "62.5"),
        ("the weights it started from", "75.0"),
        ("untrained encoder", "25.0"),
        ("raw pixels", "30.0"),
        ("colour histogram", "50.0"),
    ]
    assert "Share of 1,000 images whose class most of their 20 nearest neighbours have." in text
    assert "Guessing gives 10.0 %." in text
    verdict = verdict_of()
    verdict["scores"]["encoder"] |= {"nearest": 0.6, "vote": 0.65}
    about = summary.verdict_of(verdict).about
    assert about.startswith("The mean of two shares of 1,000 images: those whose nearest neighbour")
    assert 'class="verdict not-better"' in page.source
    assert "verdict.json" not in page.text.partition("What is missing")[2]


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ({}, "run: results/verdict.json has no sentence."),
        ({"text": 7}, "run: results/verdict.json has no sentence."),
        ({"text": "Good.", "next": 3, "better": "yes", "scores": [1], "measured": None}, "Good."),
        ({"text": "Good.", "scores": {"encoder": "x", "start": {"score": None}}}, "Good."),
        ({"text": "Good.", "measured": {"trained": 0.5, "other": 3.25}}, "other"),
    ],
)
def test_a_strange_verdict_costs_no_page(tmp_path, verdict, said):
    run = write_run(tmp_path / "run", config_of(), metrics_of(2), {"verdict": verdict})
    assert said in report(tmp_path, run).text


def test_a_run_without_a_verdict_has_no_place_for_one(tmp_path):
    page = report(tmp_path, write_run(tmp_path / "run", config_of(), metrics_of(2)))
    assert 'id="verdict"' not in page.source
    assert "verdict.json" not in page.text


def test_images_are_named_and_lead_to_their_files(tmp_path):
    run = write_run(tmp_path / "run", config_of(), metrics_of(2))
    write_figures(run, {"neighbours.json": neighbours_of(["a b#1.jpg", "c.jpg"])})
    write_figures(run, {"embedding-map.json": map_of(["cat"])})
    page = report(tmp_path, run)
    links = [found["href"] for tag, found in page.elements if tag == "a" and "target" in found]
    assert links[:3] == ["file:///photos/a%20b%231.jpg"] * 2 + ["file:///photos/c.jpg"]
    assert all(link.startswith("file:///photos/") for link in links)
    assert "<b>0.700</b><span>c.jpg</span>" in page.source
    on_map = [found for tag, found in page.elements if tag == "image"]
    assert 10 < len(on_map) <= 20  # of 20 thumbnails, those that do not overlap
    assert {found["data-point"] for found in on_map} <= {str(each) for each in range(0, 60, 3)}
    assert "<title>0.png</title>" in page.source
    data = json.loads(page.scripts[1])[0]
    assert data["names"]["3"] == "3.png"
    assert data["links"]["3"] == "file:///photos/3.png"
    assert len(on_map) + len(data["images"]) == 20  # none is in the page twice


def test_thumbnails_on_the_map_do_not_overlap(tmp_path):
    run = write_run(tmp_path / "run", config_of(), metrics_of(2))
    write_figures(run, {"embedding-map.json": map_of(["cat"], number=600)})
    page = report(tmp_path, run)
    on_map = [found for tag, found in page.elements if tag == "image"]
    places = [(int(found["x"]), int(found["y"])) for found in on_map]
    for number, (x, y) in enumerate(places):
        assert 0 <= x <= 940
        assert 0 <= y <= 940
        for x2, y2 in places[:number]:
            assert abs(x - x2) >= 60 or abs(y - y2) >= 60


def test_only_large_thumbnails_are_smoothed(tmp_path):
    run = write_run(tmp_path / "run", config_of(), metrics_of(2))
    write_figures(run, {"neighbours.json": neighbours_of(["a.jpg"])})  # 128 pixels
    write_figures(run, {"gallery.json": gallery_of(["cat"])})  # 8 pixels
    images = report(tmp_path, run).photographs
    small = ["small" in found["class"].split() for found in images]
    assert small == [False] * 10 + [True] * 16


def test_runs_of_a_table_have_their_place_on_an_axis(tmp_path):
    runs = four_runs(tmp_path)
    (evaluation,) = evaluations_of(group_runs(read_runs(runs)))
    axis = axis_of(evaluation)
    assert axis is not None
    assert axis.ticks == [(0.0, "50"), (0.5, "55"), (1.0, "60")]
    assert axis.places(evaluation.scores[1].values) == pytest.approx([0.5, 0.2, 0.8])  # 55, 52, 58
    page = report(tmp_path, *runs)
    assert re.findall(r'text-anchor="middle">(\d+)</text>', page.source) == ["50", "55", "60"]


def test_a_single_run_has_no_strip(tmp_path):
    config = config_of()
    run = write_run(tmp_path / "run", config, None, {"knn": result_of(config, 0.5)})
    (evaluation,) = evaluations_of(group_runs(read_runs([run])))
    assert axis_of(evaluation) is None
    assert 'class="strip"' not in report(tmp_path, run).source


@given(st.lists(st.floats(0, 100), min_size=2, max_size=6))
def test_every_run_is_on_the_axis(values):
    axis = axis_over(values)
    assert axis is not None
    assert all(-1e-6 <= place <= 1 + 1e-6 for place in axis.places(values))
    assert 2 <= len(axis.ticks) <= 5
    assert axis.high - axis.low >= 0.2


def test_what_has_one_point_is_not_drawn(tmp_path):
    lines = [*metrics_of(2), {"step": 20, "epoch": 1, "knn": 0.5}]
    once = [line for line in lines if "knn" not in line] + [lines[-1]]
    run = write_run(tmp_path / "run", config_of(train__epochs=2), once)
    keys = [each["key"] for each in json.loads(report(tmp_path, run).scripts[0])["metrics"]]
    assert "knn" not in keys
    assert keys[:2] == ["loss", "proxy_accuracy"]
    (run / "metrics.jsonl").write_text(json.dumps(metrics_of(1)[0]) + "\n")
    page = report(tmp_path, run)
    assert 'id="curves"' not in page.source
    assert "No Fig. 2b: the runs logged the proxy task only once." in page.text
    assert "No Fig. 2c: the runs logged false negatives only once." in page.text
    assert 'id="figures"' not in page.source


def test_loss_knn_and_proxy_accuracy_come_first_and_the_rest_is_folded(tmp_path):
    page = report(tmp_path, write_run(tmp_path / "run", config_of(), metrics_of(4)))
    metrics = json.loads(page.scripts[0])["metrics"]
    assert [each["key"] for each in metrics if each["main"]] == ["loss", "knn", "proxy_accuracy"]
    assert all(each["main"] for each in metrics[:3])
    assert len(metrics) > 6


def test_a_run_on_own_photographs_is_reported_to_their_owner(tmp_path):
    """The folder is the title, training is folded away, and no figure of the paper is missing."""
    config = config_of(recipe="photos", data__root="/pictures/birds", data__name="folder")
    run = write_run(tmp_path / "run", config, metrics_of(3), {"verdict": verdict_of()})
    facts = neighbours_of(["heron", "wren"])
    clusters = [
        {"name": f"<b>{name}", "size": 1200, "images": facts["numbers"]["queries"][0]["near"]}
        for name in ("herons", "wrens")
    ]
    write_figures(run, {"neighbours.json": facts | {"clusters": clusters}})
    text = write_report([run], tmp_path / "report.html").read_text()
    assert "<title>Images of birds</title>" in text
    assert "Fig. 3" not in text
    places = [
        text.index(part)
        for part in (
            'id="verdict"',
            'id="neighbours"',
            'id="clusters"',
            'id="training"',
            'id="runs"',
        )
    ]
    assert places == sorted(places)
    assert text.index('id="repeat"') < text.index("</details>", text.index('id="repeat"'))
    assert "&lt;b&gt;herons <small>1,200 images" in text
    other = write_run(tmp_path / "demo", config_of(), metrics_of(3))
    assert 'id="training"' not in write_report([run, other], tmp_path / "two.html").read_text()
