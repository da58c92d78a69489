"""What a run is told about mixing: the findings are those of the records, the words no stronger."""

import json
from collections import defaultdict

import pytest

from hardmix.settings.recipes import demo
from hardmix.sweep.own_grids import read_grid
from hardmix.sweep.pairs import student_interval
from hardmix.training import mixing_advice as advice
from hardmix.training.mixing_advice import FINDINGS, PAIRS, Finding, mixing_advice
from places import ROOT

RESULTS = ROOT / "docs" / "results"


def lines(*percent: float, epoch: int = 3):
    early = {"epoch": epoch - 1, "proxy_accuracy": 0.0}
    return [early, *({"epoch": epoch, "proxy_accuracy": each / 100} for each in percent)]


def series():
    """By views: proxy accuracies of MoCo-v2 and gains of the probe, by seed."""
    found = defaultdict(lambda: defaultdict(dict))
    for file in (RESULTS / "records").glob("*.json"):
        record = json.loads(file.read_text())
        if record["grid"] == "question-2-views":
            data = record["config"]["data"]
            method = record["config"]["method"]
            views = data["augmentation"], data["min_scale"]
            found[views][record["seed"]][method] = record["measures"]
    return found


def test_the_findings_are_those_of_the_records():
    grid = read_grid(str(RESULTS / "grids" / "question-2-views.toml"))
    expected = []
    for by_seed in series().values():
        assert sorted(by_seed) == list(range(1, grid.seeds + 1))
        gains = [
            each["mochi"]["linear-cached"] - each["moco-v2"]["linear-cached"]
            for each in by_seed.values()
        ]
        proxy = [each["moco-v2"]["proxy_accuracy"] for each in by_seed.values()]
        interval = student_interval(gains)
        expected.append((sum(proxy) / len(proxy), interval.mean, interval.low, interval.high))
    assert grid.seeds == PAIRS
    assert [list(each) for each in FINDINGS] == [
        pytest.approx(each, abs=0.006) for each in sorted(expected)
    ]


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (Finding(60, 0.5, 0.1, 0.9), "expected to help a little"),
        (Finding(60, 0.1, -0.3, 0.5), "do not count on mixing"),
        (Finding(60, -0.5, -0.9, -0.1), "not expected to help"),
    ],
)
def test_the_words_say_what_the_interval_supports(monkeypatch, finding, words):
    far = Finding(5, 9, 8, 10)
    monkeypatch.setattr(advice, "FINDINGS", (far, finding))
    text = mixing_advice(demo("mochi"), lines(70, 74))
    assert text.startswith("Proxy accuracy 72 %:")
    assert words in text
    assert f"{finding.gain:+.2f}" in text
    assert f"{finding.low:+.2f} to {finding.high:+.2f}" in text
    assert "docs/results.md" in text


def test_methods_without_a_proxy_task_and_runs_without_lines_are_told_nothing():
    assert mixing_advice(demo("supervised"), lines(70)) is None
    assert mixing_advice(demo("moco-v2"), []) is None
