"""Advice on mixing: the findings are those of the records, and the words are no stronger."""

import runpy
import subprocess
import sys
from dataclasses import replace

import pytest

from hardmix.settings.config import LossConfig, MixConfig
from hardmix.settings.recipes import demo
from hardmix.sweep.pairs import student_interval
from hardmix.training import mixing_advice as advice
from hardmix.training.mixing_advice import Effect, Finding, findings, mixing_advice
from places import ROOT


def lines(*percent: float, epoch: int = 3):
    early = {"epoch": epoch - 1, "proxy_accuracy": 0.0}
    return [early, *({"epoch": epoch, "proxy_accuracy": each / 100} for each in percent)]


def test_the_findings_are_those_of_the_records():
    program = ROOT / "tools" / "mixing_findings.py"
    check = subprocess.run([sys.executable, program, "--check"], capture_output=True, text=True)
    assert (check.returncode, check.stderr) == (0, "")
    runs = runpy.run_path(str(program))["pairs_of_runs"]()
    expected = []
    for (*_, temperature), by_seed in runs.items():
        both = [each for each in by_seed.values() if len(each) == 2]
        if not both:
            continue  # MoCo-v2 alone, at temperatures that were compared without mixing
        proxy = [each["moco-v2"]["proxy_accuracy"] for each in both]
        numbers = [sum(proxy) / len(proxy)]
        for measure in ("linear-cached", "knn"):
            gains = [each["mochi"][measure] - each["moco-v2"][measure] for each in both]
            interval = student_interval(gains)
            numbers += [interval.mean, interval.low, interval.high]
        expected.append([*numbers, temperature, len(both)])
    found = [[f.proxy_accuracy, *f.probe, *f.knn, f.temperature, f.pairs] for f in findings()]
    assert sorted(found) == [pytest.approx(each, abs=0.006) for each in sorted(expected)]
    assert len(found) == 9


def run_of(temperature: float = 0.2, queue_size: int = 2048):
    config = demo("mochi")
    train = replace(config.train, temperature=temperature, queue_size=queue_size)
    return replace(config, train=train)


def test_a_low_temperature_is_told_what_was_found_at_a_low_one():
    assert "at 61 %" in mixing_advice(run_of(), lines(65))
    assert "at 69 %" in mixing_advice(run_of(temperature=0.1), lines(65))


UP, UNCLEAR, DOWN = Effect(0.5, 0.1, 0.9), Effect(0.1, -0.3, 0.5), Effect(-0.5, -0.9, -0.1)


@pytest.mark.parametrize(
    ("probe", "knn", "words"),
    [
        (UP, UP, "mixing is expected to help a little ("),
        (UP, UNCLEAR, "mixing is expected to help a little ("),
        (UNCLEAR, UNCLEAR, "mixing is not expected to make a clear difference ("),
        (UNCLEAR, UP, "mixing is not expected to make a clear difference, except by k-NN ("),
        (DOWN, UNCLEAR, "still too hard for this encoder, so mixing is not expected to help yet ("),
        (DOWN, UP, "mixing is not expected to help yet, except by k-NN ("),
    ],
)
def test_the_words_say_what_the_intervals_support(monkeypatch, probe, knn, words):
    far = Finding(5, Effect(9, 8, 10), Effect(9, 8, 10))
    monkeypatch.setattr(advice, "findings", lambda: (far, Finding(70, probe, knn)))
    text = mixing_advice(run_of(), lines(70, 74))
    assert text.startswith("Proxy accuracy 72 %: ")
    assert words in text
    for gain in (probe, knn):
        assert f"{gain.mean:+.2f} ({gain.low:+.2f} to {gain.high:+.2f})" in text


def test_a_run_far_from_those_measured_is_told_nothing():
    assert mixing_advice(run_of(), lines(60)) is not None
    assert mixing_advice(run_of(), lines(75)) is None  # between 61 % and 91 %
    assert mixing_advice(run_of(temperature=0.07), lines(69)) is None
    assert mixing_advice(run_of(temperature=0.1), lines(6)) is None


def test_the_proxy_accuracy_of_another_queue_is_another_one():
    """The same training has 14.7 % with 2048 keys and 26.7 % with 512."""
    assert mixing_advice(run_of(queue_size=1024), lines(60)) is not None
    assert mixing_advice(run_of(queue_size=512), lines(60)) is None
    assert mixing_advice(run_of(queue_size=16384), lines(60)) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"loss": LossConfig(weights="hardness")},
        {"loss": LossConfig(denominator="hcl")},
        {"loss": LossConfig(filter="above-positive")},
        {"mix": MixConfig(strategy="synco")},
        {"oracle": True},
    ],
    ids=str,
)
def test_other_losses_are_told_nothing(changed):
    """The findings are of plain MoCo-v2 and MoCHi: hardness weighting, for one, gains nothing."""
    assert mixing_advice(run_of(), lines(61)) is not None
    assert mixing_advice(replace(run_of(), **changed), lines(61)) is None


def test_methods_without_a_proxy_task_and_runs_without_lines_are_told_nothing():
    assert mixing_advice(demo("supervised"), lines(70)) is None
    assert mixing_advice(demo("moco-v2"), []) is None
