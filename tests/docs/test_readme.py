"""Every number of the README follows from a file: from the records, the settings, the bench."""

import json
import re
import sys
import tomllib

import pytest

import hardmix
from hardmix.paper.numbers import paper_rows
from hardmix.settings.methods import METHOD_FACTS
from hardmix.sweep.pairs import student_interval
from places import ROOT

sys.path.append(str(ROOT / "experiments"))

import audit
import page
import results

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text()
WORDS = {9: "nine", 10: "ten"}
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def section(title: str) -> str:
    """Return the text of a section, without the targets of its links."""
    text = README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())


@pytest.fixture(scope="module")
def evidence() -> page.Evidence:
    """The rows of all complete grids, read from the records."""
    return results.read_all(results.complete_grids())


def means(evidence, rows, measure="knn") -> list[float]:
    """Return the mean gain of each row."""
    gains = [list(page.runs_of(row, evidence).gains(measure).values()) for row in rows]
    return [sum(each) / len(each) for each in gains]


def span(values) -> str:
    """Return the least and the greatest, to a digit."""
    return f"+{min(values):.1f} to +{max(values):.1f}"


def test_what_we_measured_follows_from_the_records(evidence, capsys):
    text = section("What we measured")
    planned = [
        student_interval(list(evidence[row].gains("linear-cached").values()))
        for row in ("question-1-strong/both", "question-2-views/plain-0.2-mochi")
    ]
    paper = {
        row.method: row.value
        for row in paper_rows()
        if (row.source, row.metric, row.queue_size, row.epochs) == ("table1", "top1", 16384, 200)
        and row.mix in (None, (1024, 1024, 128))
        and not row.oracle
    }
    everywhere = [row for row, _ in results.EVERYWHERE if "tau-0." not in row]
    mixing = means(evidence, everywhere)
    colder = student_interval(
        list(page.runs_of("question-2-mass/tau-0.1-mochi", evidence).gains("knn").values())
    )
    assert colder.low < 0 < colder.high
    capsys.readouterr()
    for measure in (audit.PROBE, "knn"):
        audit.holm(evidence, measure, measure)
    found = re.findall(r": (\d+) gains .*; (\d+) exclude 0, (\d+) by Holm", capsys.readouterr().out)
    (number, probe, probe_holm), (_, knn, knn_holm) = found
    claims = [
        f"{min(mixing):.1f} to {max(mixing):.1f} points at the paper's temperature of 0.2;"
        " nothing at 0.1",
        f"The planned six pairs have {planned[0].text(2)} with",
        f"and {planned[1].text(2)} with crops",
        f"the paper has {paper['MoCHi'] - paper['MoCo-v2']:+.1f} on ImageNet-100 after 200",
        "temperature 0.1 (neighbours "
        + span(means(evidence, [f"advice-views/{each}-tau-0.1" for each in ("strong", "weak")])),
        "hardness` ("
        + span(means(evidence, ["advice-views/strong-hardness", "family-lead/hardness"])),
        f"Of {number} such gains, {knn} exclude 0 for neighbours and {probe} for the classifier;"
        f" corrected for their number, {knn_holm} and {probe_holm} do",
        "hardmix trains on 1.5 times as many images per second",
        "CIFAR-100, 10,000 images, 20 epochs, a network of 432,800 parameters",
        "with 95 % intervals",
    ]
    assert [claim for claim in claims if claim not in text] == []
    told = set(NUMBER.findall(" ".join(claims)))
    assert set(NUMBER.findall(text.replace("MoCo-v2", ""))) <= told


def test_the_runs_of_these_pairs_are_what_the_readme_says():
    records = (ROOT / "experiments" / "records").glob("cifar100-mo*.json")
    configs = [json.loads(file.read_text()) for file in records]
    planned = [each["config"] for each in configs if each["grid"] == "question-1-strong"]
    assert len(planned) >= 12
    assert {each["data"]["num_images"] for each in planned} == {10_000}
    assert {each["train"]["epochs"] for each in planned} == {20}


def test_the_speed_is_the_benchs():
    (ratio,) = re.findall(
        r"lightly \(MoCo\) / hardmix MoCHi, fp32 \| ([\d.]+) \|.*met",
        "\n".join(
            line
            for line in (ROOT / "docs" / "performance.md").read_text().splitlines()
            if "resnet18, batch 256" in line
        ),
    )
    assert float(ratio) >= 1.5
    assert "1.5 times as many images per second as lightly" in section("What we measured")


def test_what_is_needed_is_what_the_package_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert "Python 3.11 or newer" in README
    assert {re.split("[><=]", each)[0] for each in project["dependencies"]} == {
        *("torch", "numpy", "jaxtyping")
    }
    assert "torch>=2.6" in project["dependencies"]
    assert "torch 2.6 or newer, numpy, jaxtyping; nothing else" in README


def test_the_counts_are_those_of_the_settings():
    default = hardmix.recipes.photos().minutes
    assert default == 10
    assert "ten minutes on a CPU" in README
    assert hardmix.recipes.imagenet100().train.queue_size == 16384
    others = METHOD_FACTS.keys() - {"moco-v1", "moco-v2", "moco-v3", "mochi", "supervised"}
    assert re.search(rf"\b{WORDS[len(others)]} methods that the paper\s+compares with", README)
    assert len(README.splitlines()) <= 120
