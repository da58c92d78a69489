"""One reader and one labeller: a run is called the same in tables, figures and sweeps."""

import json
import re

import pytest

import hardmix.runs.reading as reading
from fake_runs import config_of, metrics_of, result_of, write_run
from hardmix.analysis.analyze import compare
from hardmix.report import page
from hardmix.report.evaluation_tables import evaluations_of
from hardmix.report.grouping import group_runs
from hardmix.report.training_curves import curves_of
from hardmix.runs.folder import Run, read_config
from hardmix.runs.reading import label_runs, read_run, read_runs, read_settings, side_by_side
from hardmix.settings.saved import flatten, settings
from hardmix.sweep import sweeping
from hardmix.sweep.planning import SweepOptions, make_plan

pytest.importorskip("matplotlib")


def runs_of_app_b1(folder):
    """MoCo, its steps to MoCo-v2, and two seeds of MoCHi."""
    configs = {
        "a": config_of("moco-v1"),
        "b": config_of("moco-v1", optimizer__schedule="cosine"),
        "c": config_of("moco-v2"),
        "d": config_of("mochi", 0),
        "e": config_of("mochi", 1),
        "f": config_of("mochi", 0, train__queue_size=1024),
    }
    return [
        write_run(folder / name, config, metrics_of(2), {"knn": result_of(config, 0.5, k=200)})
        for name, config in configs.items()
    ]


LABELS = {
    "a": "MoCo",
    "b": "MoCo + cosine",
    "c": "MoCo-v2",
    "d": "MoCHi (128, 128, 16), K = 2048, seed 0",
    "e": "MoCHi (128, 128, 16), K = 2048, seed 1",
    "f": "MoCHi (128, 128, 16), K = 1024, seed 0",
}


def test_a_run_has_one_label_in_table_figures_and_curves(tmp_path):
    records = read_runs(runs_of_app_b1(tmp_path))
    assert {record.name: record.label for record in records} == LABELS
    groups = group_runs(records)
    (table,) = evaluations_of(groups)
    assert [score.group.label for score in table.scores] == [
        *("MoCo", "MoCo + cosine", "MoCo-v2"),
        *("MoCHi (128, 128, 16), K = 2048", "MoCHi (128, 128, 16), K = 1024"),
    ]
    for group in groups:
        for run in group.runs:
            pooled = re.sub(r", seed \d+", "", run.label)
            assert pooled == group.label, "a row is its runs without the seed"
    drawn = {
        line["run"]
        for picture in compare(records)[0]
        if picture.name in ("fig2b", "fig2c")
        for line in picture.numbers["lines"]
    }
    assert drawn == set(LABELS.values())
    assert {run["label"] for run in curves_of(groups)["runs"]} == set(LABELS.values())


def test_a_sweeps_figures_and_page_use_the_same_labels(tmp_path, monkeypatch):
    runs = runs_of_app_b1(tmp_path)
    shown = []
    monkeypatch.setattr(page, "render", lambda runs, missing, out: shown.extend(runs) or page.MARK)
    out = tmp_path / "out"
    sweeping.draw(make_plan(SweepOptions(grid="table1", out=out, scale="shapes", seeds=1)), runs)
    assert {run.name: run.label for run in shown} == LABELS
    lines = json.loads((out / "figures" / "table1" / "fig2b.json").read_text())["numbers"]["lines"]
    assert {line["run"] for line in lines} == set(LABELS.values())
    assert (out / "table1.html").exists()


def test_each_file_is_read_once_for_a_page_and_its_figures(tmp_path, monkeypatch):
    runs = runs_of_app_b1(tmp_path)[:2]
    logs, objects = [], []
    read_log, read_json = reading._read_log, reading.read_json
    monkeypatch.setattr(reading, "_read_log", lambda file: logs.append(file) or read_log(file))
    monkeypatch.setattr(reading, "read_json", lambda file: objects.append(file) or read_json(file))
    page.write_report(runs, tmp_path / "report.html")
    for read in (logs, objects):
        assert len(read) == len(set(read)) > 0
    assert [file.name for file in logs].count("metrics.jsonl") == 2


def test_labels_say_only_what_tells_runs_apart():
    base = flatten(config_of("mochi"))
    assert label_runs([base], ["run"]) == ["MoCHi (128, 128, 16)"]
    other = {**base, "data.workers": 9, "train.log_every": 1}  # how, not what
    assert label_runs([base, other], ["a", "b"]) == [
        "MoCHi (128, 128, 16), a",
        "MoCHi (128, 128, 16), b",
    ]
    adam = {**base, "optimizer.name": "adamw"}
    assert label_runs([base, adam], ["a", "b"]) == [
        "MoCHi (128, 128, 16), sgd",
        "MoCHi (128, 128, 16), adamw",
    ]
    unnamed = {**base, "data.name": None}
    assert label_runs([base, unnamed], ["a", "b"]) == [
        "MoCHi (128, 128, 16), shapes",
        "MoCHi (128, 128, 16)",
    ]
    assert label_runs([{}, {"method": "somebodys"}], ["x", "y"]) == ["x", "somebodys"]


def test_a_record_agrees_with_the_config_and_a_lone_reading(tmp_path):
    (path, *others) = runs_of_app_b1(tmp_path)
    record = read_run(path)
    config = read_config(path / "config.json")
    assert record.config == config
    as_json = {k: list(v) if isinstance(v, tuple) else v for k, v in settings(config).items()}
    assert record.settings == read_settings(Run(path)) == as_json
    assert record.metrics == Run(path).metrics()
    assert record.missing == []
    together = side_by_side([record, *map(read_run, others)])
    assert [each.label for each in together] == list(LABELS.values())
    assert [each.hue for each in together] == list(range(6))


def test_a_run_of_an_older_version_is_grouped_with_those_of_this_one(tmp_path):
    new, old = config_of("mochi", 0), config_of("mochi", 1)
    for name in ("name", "betas", "decay_all", "clip", "warm_up_epochs"):
        del old["optimizer"][name]
    del old["data"]["views"], old["train"]["wandb"], old["options"]
    paths = [write_run(tmp_path / name, each) for name, each in [("new", new), ("old", old)]]
    records = read_runs(paths)
    assert [len(group.runs) for group in group_runs(records)] == [2]
    assert not any("older version" in sentence for sentence in records[1].missing)
