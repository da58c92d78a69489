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
REGIME = {
    "data.name": "folder",
    "data.num_images": 10_000,
    "model.backbone": "small",
    "train.epochs": 20,
    "train.queue_size": 2048,
}
"""What all of them share; views and temperature differ."""


def lines(*percent: float, epoch: int = 3):
    early = {"epoch": epoch - 1, "proxy_accuracy": 0.0}
    return [early, *({"epoch": epoch, "proxy_accuracy": each / 100} for each in percent)]


def is_moco_or_mochi(config):
    """Whether a run is MoCo-v2 or MoCHi (128, 128, 16) and nothing else."""
    loss = config.get("loss", {})  # older records have none
    usual = (
        loss.get("weights", "none") == "none" and loss.get("denominator", "infonce") == "infonce"
    )
    mix = config["mix"]["num_hardest"], config["mix"]["num_pairs"], config["mix"]["num_with_query"]
    mochi = mix == (128, 128, 16) and config["mix"]["strategy"] == "mochi"
    return usual and not config["oracle"] and (config["method"] == "moco-v2" or mochi)


def pairs_of_runs():
    """By views and temperature: measures of MoCo-v2 and of MoCHi (128, 128, 16), by seed."""
    found = defaultdict(lambda: defaultdict(dict))
    for file in (RESULTS / "records").glob("*.json"):
        record = json.loads(file.read_text())
        config = record["config"]
        here = {name: config[name.split(".")[0]][name.split(".")[1]] for name in REGIME}
        if here == REGIME and config["method"] in ("moco-v2", "mochi") and is_moco_or_mochi(config):
            data, temperature = config["data"], config["train"]["temperature"]
            where = data["augmentation"], data["min_scale"], temperature
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
