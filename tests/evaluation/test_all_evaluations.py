"""The table of evaluations makes commands, result files, titles and columns."""

import dataclasses
import json
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from hardmix.commands import main as cli
from hardmix.commands.evaluate import EVALUATION_COMMANDS
from hardmix.evaluation import knn
from hardmix.models.backbones import build_backbone
from hardmix.report.evaluation_tables import evaluations_of
from hardmix.report.grouping import group_runs
from hardmix.runs.folder import Run
from hardmix.runs.reading import read_runs
from hardmix.settings.config import DataConfig, ModelConfig, PretrainConfig, TrainConfig
from hardmix.settings.evaluations import (
    EVALUATIONS,
    Evaluation,
    KnnOptions,
    evaluation_kind,
    evaluation_title,
    result_titles,
)
from hardmix.settings.facts import docs_of
from hardmix.sweep.measures import MEASURES

CONFIG = PretrainConfig(
    recipe="demo",
    data=DataConfig(name="shapes", num_images=48, image_size=32, blur=False, workers=0),
    model=ModelConfig(backbone="small"),
    train=TrainConfig(device="cpu"),
)
OPTIONS = {"knn": ["--k", "5"], "linear": ["--seeds", "1"], "finetune": ["--epochs", "1"]}
FILES = {"knn": "knn", "linear": "linear-cached", "finetune": "finetune-1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    torch.manual_seed(0)
    run = Run.create(tmp_path_factory.mktemp("runs") / "run", CONFIG)
    run.write_encoder(build_backbone("small").trunk, CONFIG)
    return run


def test_tables_agree():
    assert EVALUATIONS.keys() == EVALUATION_COMMANDS.keys()
    assert EVALUATIONS.keys() <= result_titles().keys()
    for name, each in EVALUATIONS.items():
        assert callable(import_module(f"hardmix.evaluation.{name}").measure)
        assert each.title == result_titles()[name]
        assert dataclasses.is_dataclass(each.options)
        fields = {field.name for field in dataclasses.fields(each.options)}
        assert fields == docs_of(each.options).keys(), "every option has its help"
        assert cli.COMMANDS[name].__doc__


@pytest.mark.parametrize("name", EVALUATIONS)
def test_each_makes_its_command_its_file_and_its_title(name, run, capfd):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, str(run.path), *OPTIONS[name]])
    assert ended.value.code == 0, capfd.readouterr().err
    result = json.loads((run.results / f"{FILES[name]}.json").read_text())
    assert 0 <= result["top1"] <= 1
    assert evaluation_kind(FILES[name]) in (name, f"{name}-cached")
    (table,) = [
        table
        for table in evaluations_of(group_runs(read_runs([run.path])))
        if table.id == FILES[name]
    ]
    assert table.title == evaluation_title(FILES[name])
    assert table.title.startswith(result_titles()[evaluation_kind(FILES[name])])
    assert table.scores[0].mean == pytest.approx(100 * result["top1"])


def test_the_help_of_an_evaluation_shows_its_options_and_no_views(run, capfd):
    for name, each in EVALUATIONS.items():
        with pytest.raises(SystemExit) as ended:
            cli.main([name, str(run.path), "--help"])
        assert ended.value.code == 0
        shown = capfd.readouterr().out
        for field in dataclasses.fields(each.options):
            assert f"--{field.name.replace('_', '-')}" in shown
        assert "--data.root" in shown
        assert not any(f"--data.{each}" in shown for each in ("augmentation", "views", "blur"))


def test_a_file_is_known_by_its_kind_the_longest_that_fits():
    assert evaluation_kind("linear-cached") == "linear-cached"
    assert evaluation_kind("linear") == "linear"
    assert evaluation_kind("finetune-0.1-untrained") == "finetune"
    assert evaluation_kind("linearity") == "linearity"
    assert evaluation_title("finetune-0.1-untrained") == (
        "Fine-tuned on 0.1 of the labels, from random weights"
    )
    assert evaluation_title("somebodys") == "somebodys"


def test_a_sweep_has_a_column_for_each_kind_and_joins_them_by_ids():
    ids = [measure.id for measure in MEASURES]
    assert len(set(ids)) == len(ids)
    columns = [measure.title for measure in MEASURES]
    assert len(set(columns)) == len(columns)
    kinds = {evaluation_kind(measure.file) for measure in MEASURES}
    assert {"linear", "linear-cached", "knn", "detection", "embedding"} <= kinds
    assert kinds - {"metrics", "pretrain"} <= result_titles().keys()
    for measure in MEASURES:
        kind = result_titles().get(evaluation_kind(measure.file))
        if measure.path == ("top1",):
            assert measure.title == f"{kind} top-1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfOptions(KnnOptions):
    """Measure half of the k-NN accuracy."""

    share: float = 0.5
    """The share of the features that is kept."""


def measure_half(path, options, data=None):
    found = knn.measure(path, options, data)
    result = {"top1": options.share * found["top1"], "data": found["data"]}
    Run(path).write_result("half", result)
    return result


def test_a_new_one_is_a_file_and_a_line(run, monkeypatch, capfd):
    from hardmix.commands.argv import scan
    from hardmix.commands.evaluate import evaluation_command

    module = SimpleNamespace(measure=measure_half)
    monkeypatch.setitem(sys.modules, "hardmix.evaluation.half", module)
    monkeypatch.setitem(EVALUATIONS, "half", Evaluation("Half", HalfOptions))
    evaluation_command("half")(scan([str(run.path), "--share", "0.25", "--k", "3"]))
    found = {table.id: table for table in evaluations_of(group_runs(read_runs([run.path])))}
    knn_of_run = json.loads((run.results / "knn.json").read_text())["top1"]
    assert found["half"].title == "Half"
    assert found["half"].scores[0].mean == pytest.approx(25 * knn_of_run)
