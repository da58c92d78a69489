"""What a run is told about mixing: the findings are those of the records, the words no stronger."""

import json
from collections import defaultdict
from dataclasses import replace

import pytest

from hardmix.settings.recipes import demo
from hardmix.sweep.pairs import student_interval
from hardmix.training import mixing_advice as advice
from hardmix.training.mixing_advice import FINDINGS, Finding, mixing_advice
from places import ROOT

RESULTS = ROOT / "docs" / "results"
SEEDS = {
    "question-2-views": range(1, 7),
    "question-1-strong": range(3, 9),
    "question-1-weak": range(7, 9),
    "question-2-mass": range(3, 9),
}
"""Of the pairs that count, by grid."""


def lines(*percent: float, epoch: int = 3):
    early = {"epoch": epoch - 1, "proxy_accuracy": 0.0}
    return [early, *({"epoch": epoch, "proxy_accuracy": each / 100} for each in percent)]


def pairs_of_runs():
    """By views and temperature: measures of MoCo-v2 and of MoCHi (128, 128, 16), by seed."""
    found = defaultdict(lambda: defaultdict(dict))
    for file in (RESULTS / "records").glob("*.json"):
        record = json.loads(file.read_text())
        config, seeds = record["config"], SEEDS.get(record["grid"], ())
        mixed = config["mix"]["num_pairs"], config["mix"]["num_with_query"]
        temperature = config["train"]["temperature"]
        if record["seed"] in seeds and mixed in ((0, 0), (128, 16)):
            where = config["data"]["augmentation"], config["data"]["min_scale"], temperature
            found[where][record["seed"]][config["method"]] = record["measures"]
    return found


def test_the_findings_are_those_of_the_records():
    expected = []
    for (_, _, temperature), by_seed in pairs_of_runs().items():
        both = [each for each in by_seed.values() if len(each) == 2]
        gains = [each["mochi"]["linear-cached"] - each["moco-v2"]["linear-cached"] for each in both]
        proxy = [each["moco-v2"]["proxy_accuracy"] for each in both]
        interval = student_interval(gains)
        numbers = sum(proxy) / len(proxy), interval.mean, interval.low, interval.high
        expected.append((*numbers, temperature, len(both)))
    assert sorted(list(each) for each in FINDINGS) == [
        pytest.approx(each, abs=0.006) for each in sorted(expected)
    ]


def test_a_low_temperature_is_told_what_was_found_at_a_low_one():
    config = demo("mochi")
    low = replace(config, train=replace(config.train, temperature=0.1))
    assert "temperature 0.2" in mixing_advice(config, lines(60))
    assert "temperature 0.1" in mixing_advice(low, lines(60))


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
