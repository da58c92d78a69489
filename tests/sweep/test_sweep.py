"""Sweeps: planned, shared, stopped, continued, and put into tables whose numbers are known."""

import csv
import io
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hardmix.commands import main as cli
from hardmix.errors import InputError, UnfinishedError
from hardmix.evaluation import linear
from hardmix.evaluation.detection import detect
from hardmix.evaluation.evaluated_run import EvaluatedRun
from hardmix.runs.folder import Run
from hardmix.runs.reading import read_run
from hardmix.runtime.console import duration
from hardmix.settings.evaluations import EVALUATIONS, LINEAR_PRESETS, SCHEDULES
from hardmix.settings.recipes import RECIPES
from hardmix.settings.saved import to_json
from hardmix.sweep import measures as sweep_evaluations, sweeping
from hardmix.sweep.estimates import evaluation_seconds, measure_speed, training_seconds
from hardmix.sweep.grids import GRIDS
from hardmix.sweep.measures import MEASURES, shared_command
from hardmix.sweep.planning import SweepOptions, config_of, evaluations_of, make_plan, run_name
from hardmix.sweep.results import as_latex, collect, escape
from hardmix.sweep.sweeping import sweep
from hardmix.training.pretrain import pretrain
from untrained_runs import run_of_backbone

pytestmark = pytest.mark.slow

BEST = "MoCHi (1024, 1024, 128)"
PROTOCOL = {
    "linear-cached": {"protocol": "cached features, lbfgs: not the paper's"},
    "knn": {"k": 200, "temperature": 0.07},
    "embedding": {},
}


def options(out: Path, grid: str = "table1", **others) -> SweepOptions:
    return SweepOptions(**{"grid": grid, "out": out, "scale": "shapes", "seeds": 2, **others})


class FakeTrainer:
    """Writes the folder of a run without training it, and results that follow from its config."""

    def __init__(self) -> None:
        self.trained: list[str] = []
        self.evaluated: list[tuple[str, str]] = []
        self.raises: dict[str, Exception] = {}
        """Errors to raise, by a part of a run's name, or "evaluation NAME"."""
        self.found: dict[str, str] = {}
        """The names in the folder when a run began."""

    def pretrain(self, config, out, *, resume):
        assert resume == "auto"
        run = Run(out)
        start = run.path / "checkpoint"
        self.found[run.path.name] = start.read_text() if start.exists() else "nothing"
        run.path.mkdir(parents=True, exist_ok=True)
        run.config_file.write_bytes(to_json(config))
        start.write_text(run.path.name)
        for part, error in self.raises.items():
            if part in run.path.name:
                raise error
        line = {"step": 1, "epoch": config.train.epochs - 1, "loss": 1.0}
        line |= {"images_per_second": 2000.0, "proxy_accuracy": 0.5, "proxy_accuracy_mixed": 0.25}
        run.metrics_file.write_text(json.dumps(line) + "\n")
        run.encoder_file.write_bytes(b"")
        self.trained.append(run.path.name)
        return run

    def evaluate(self, run, name, options):
        if f"evaluation {name}" in self.raises:
            raise self.raises[f"evaluation {name}"]
        self.evaluated.append((run.path.name, name))
        config = run.config()
        known = {"moco-v1": 0.4, "moco-v2": 0.5, "mochi": 0.6, "supervised": 0.9}
        top1 = known.get(config.method, 0.3)
        result = {"top1": top1 + 0.01 * config.train.seed, "data": "shapes", **PROTOCOL[name]}
        if name == "embedding":
            result = {"alignment": 0.25, "uniformity": -2.0 - config.train.seed}
        run.results.mkdir(exist_ok=True)
        (run.results / f"{name}.json").write_text(json.dumps(result))


@pytest.fixture
def trainer(monkeypatch) -> FakeTrainer:
    fake = FakeTrainer()
    monkeypatch.setattr(sweeping, "pretrain", fake.pretrain)
    monkeypatch.setattr(sweeping, "evaluate", fake.evaluate)
    monkeypatch.setattr(sweeping, "draw", lambda plan, runs: None)  # drawn for real once, below
    return fake


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        cli.main(["sweep", *arguments])
    return done.value.code


def files_in(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def test_a_dry_run_touches_nothing(tmp_path, trainer, capfd):
    sweep(options(tmp_path / "out"), dry_run=True)
    assert files_in(tmp_path) == []
    assert trainer.trained == []
    shown = capfd.readouterr().out
    assert "Not comparable" in shown
    assert "24 runs" in shown
    assert "guessed 1330 images/s" in shown
    assert "never mixes" not in shown
    sweep(options(tmp_path / "out", seeds=1, epochs=1), dry_run=True)  # 10 of 200 become 0 of 1
    assert "never mixes" not in capfd.readouterr().out


def test_a_sweep_trains_every_row_once_for_every_seed(tmp_path, trainer):
    outcome = sweep(options(tmp_path))
    assert not outcome.failures
    assert len(trainer.trained) == len(set(trainer.trained)) == 2 * len(GRIDS["table1"].rows)
    assert len(trainer.evaluated) == 3 * len(trainer.trained)
    first = trainer.trained[: len(GRIDS["table1"].rows)]
    assert all(name.endswith("-seed0") for name in first), "a second seed before all had one"


def test_finished_runs_and_results_are_used_again_by_every_grid(tmp_path, trainer):
    sweep(options(tmp_path, seeds=1))
    trained, evaluated = list(trainer.trained), len(trainer.evaluated)
    sweep(options(tmp_path, seeds=1))
    assert trainer.trained == trained
    assert len(trainer.evaluated) == evaluated
    chosen = options(tmp_path, "fig3b", seeds=1, only=("MoCo-v2", "(1024, 128,"))
    sweep(chosen)
    new = set(trainer.trained) - set(trained)
    # Table 1 already has MoCo-v2 and (1024, 128, 256).
    assert len(make_plan(chosen).own) == 5
    assert len(new) == len(trainer.trained) - len(trained) == 3


def test_a_whole_label_means_that_row_and_a_part_all_that_hold_it(tmp_path: Path) -> None:
    def labels(*only: str) -> list[str]:
        return [row.label for row in make_plan(options(tmp_path, seeds=1, only=only)).rows]

    assert labels("moco-v2") == ["MoCo-v2"]
    assert labels("o-v2") == ["MoCo-v2", "MoCo-v2, oracle"]
    assert labels("supervised", "MoCo-v2, oracle") == ["MoCo-v2, oracle", "supervised"]


def test_a_stopped_sweep_goes_on_where_it_stopped(tmp_path, trainer):
    trainer.raises = {"oracle": UnfinishedError("stopped by SIGTERM.")}
    with pytest.raises(UnfinishedError, match="same sweep command resumes"):
        sweep(options(tmp_path, seeds=1))
    before = list(trainer.trained)
    assert 0 < len(before) < len(GRIDS["table1"].rows)
    trainer.raises = {}
    sweep(options(tmp_path, seeds=1))
    assert trainer.trained[: len(before)] == before
    assert len(set(trainer.trained)) == len(trainer.trained) == len(GRIDS["table1"].rows)
    (continued,) = [name for name, found in trainer.found.items() if found != "nothing"]
    assert "oracle" in continued


def test_evaluations_that_take_long_run_on_all_gpus_of_a_run(tmp_path, trainer, monkeypatch):
    commands = []

    def evaluate_by_torchrun(words, gpus, stop):
        commands.append((words, gpus))
        trainer.evaluate(Run(words[1]), words[0], None)

    monkeypatch.setattr(sweeping, "evaluate_by_torchrun", evaluate_by_torchrun)
    monkeypatch.setattr(sweeping, "train_by_torchrun", lambda run, config, gpus, stop: None)
    monkeypatch.setattr(
        sweeping,
        "train",
        lambda job, plan, stop, gpus: trainer.pretrain(
            job.config, plan.folder(job.name), resume="auto"
        ),
    )
    sweep(options(tmp_path, seeds=1, only=("MoCo-v2",), device="cpu", gpus_per_run=2))
    ((knn, gpus),) = commands
    assert knn == ["knn", str(tmp_path / "runs" / trainer.trained[0]), "--k", "200"]
    assert gpus == ["cpu", "cpu"]
    assert [name for _, name in trainer.evaluated] == ["linear-cached", "knn", "embedding"]


def test_the_papers_evaluations_have_a_command_that_processes_share(tmp_path):
    run = Run(run_of_backbone(tmp_path / "run", "resnet18-narrow"))
    whole = options(tmp_path, "table2", scale="paper", data_root="images", voc_root=Path("voc"))
    whole = replace(whole, coco_root=Path("coco"), workers=3, gpus_per_run=8)
    root = str(Path("images").absolute())
    assert shared_command(run, "linear", whole)[2:] == ["--no-cached", "--data.root", root]
    voc = shared_command(run, "detection-voc-24k", whole)
    assert voc[:6] == ["detect", str(run.path), "--task", "voc", "--schedule", "24k"]
    assert voc[6:] == ["--data.root", "voc", "--device", "auto", "--data.workers", "3"]
    assert shared_command(run, "detection-coco-1x", whole)[3:6] == ["coco", "--schedule", "1x"]
    assert shared_command(run, "embedding", whole) is None


def test_a_failure_is_written_down_and_the_rest_is_done(tmp_path, trainer):
    trainer.raises = {"oracle": InputError("no labels here.")}
    outcome = sweep(options(tmp_path, seeds=1))
    assert len(outcome.failures) == 2
    assert len(trainer.trained) == len(GRIDS["table1"].rows) - 2
    for failure in outcome.failures:
        assert failure.file.read_text() == "no labels here.\n"
        assert not failure.ours
    assert (tmp_path / "table1.csv").exists()
    trainer.raises = {}
    assert not sweep(options(tmp_path, seeds=1)).failures
    assert list((tmp_path / "failures").iterdir()) == []


def test_a_failed_evaluation_costs_no_other(tmp_path, trainer):
    trainer.raises = {"evaluation knn": InputError("too few images.")}
    outcome = sweep(options(tmp_path, seeds=1, only=("MoCo-v2", "MoCo-v2, oracle")))
    assert [failure.file.name.split(".")[1] for failure in outcome.failures] == ["knn"] * 2
    assert {name for _, name in trainer.evaluated} == {"linear-cached", "embedding"}


@pytest.mark.parametrize(
    ("error", "status"), [(InputError("bad data."), 2), (RuntimeError("a bug"), 1)]
)
def test_the_exit_status_tells_bad_input_from_a_defect(tmp_path, trainer, capfd, error, status):
    trainer.raises = {"supervised": error}
    arguments = ["table1", "--out", str(tmp_path), "--scale", "shapes", "--seeds", "1"]
    arguments += ["--only", "supervised", "t = 0.2"]
    assert run_command(*arguments) == status
    shown = capfd.readouterr().err
    assert "1 run failed, all others are done" in shown
    assert "Traceback" not in shown
    (file,) = (tmp_path / "failures").iterdir()
    assert ("Traceback" in file.read_text()) == (status == 1)
    trainer.raises = {}
    assert run_command(*arguments) == 0


@pytest.mark.parametrize("grid", ["table1", "table1-supp"])
def test_parts_of_a_sweep_are_a_partition(tmp_path, grid):
    plan = make_plan(options(tmp_path, grid))
    whole = [job.name for job in plan.own]
    assert len(set(whole)) == len(whole)
    for parts in (1, 2, 7, 100):
        shares = [
            replace(plan, options=replace(plan.options, index=f"{number}/{parts}")).own
            for number in range(1, parts + 1)
        ]
        assert sorted(job.name for share in shares for job in share) == sorted(whole)
        for share in shares:  # a run and the one it goes on from stay in one process
            names = {job.name for job in share}
            assert all(job.continues in names for job in share if job.continues)


def test_two_parts_make_the_table_of_one(tmp_path, trainer):
    chosen = {"seeds": 2, "only": ("MoCo-v2", BEST)}
    for number in (1, 2):
        sweep(options(tmp_path / "shared", index=f"{number}/2", **chosen))
    sweep(options(tmp_path / "alone", **chosen))
    tables = [(tmp_path / name / "table1.csv").read_text() for name in ("shared", "alone")]
    assert tables[0] == tables[1]


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_of_another_process_is_left_to_it_and_taken_up_later(tmp_path, trainer, capfd):
    chosen = options(tmp_path, seeds=1, only=("MoCo-v2", "MoCo-v2, oracle"))
    name = make_plan(chosen).own[0].name
    claim = tmp_path / ".claims" / name
    claim.mkdir(parents=True)
    command = [sys.executable, "-c", HOLD, str(claim / ".lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        other.stdout.readline()
        outcome = sweep(chosen)
        other.stdin.close()
    assert [job.name for job in outcome.elsewhere] == [name]
    assert not outcome.failures
    assert name not in trainer.trained
    assert len(trainer.trained) == 1
    assert f"{name} is being run by another process" in capfd.readouterr().out
    assert not sweep(chosen).elsewhere
    assert name in trainer.trained


def test_longer_runs_go_on_from_a_copy_of_the_shorter_ones(tmp_path, trainer):
    chosen = options(tmp_path, "table1-supp", seeds=1, only=("MoCo-v2, 100", "MoCo-v2, 800"))
    sweep(chosen)
    short, usual, long = trainer.trained
    assert trainer.found == {short: "nothing", usual: short, long: usual}
    epochs = [Run(tmp_path / "runs" / name).config().train for name in trainer.trained]
    assert [(each.epochs, each.stop_epoch) for each in epochs] == [(16, 8), (16, None), (64, None)]
    # The middle one is a step on the way: no row asked for its results.
    assert {name for name, _ in trainer.evaluated} == {short, long}
    assert all(
        (tmp_path / "runs" / name / "encoder.safetensors").exists() for name in (short, long)
    )


def test_a_run_whose_start_failed_has_failed_too(tmp_path, trainer):
    trainer.raises = {"e16-": InputError("no room.")}
    outcome = sweep(options(tmp_path, "table1-supp", seeds=1, only=("MoCo-v2, 800",)))
    assert [failure.job.config.train.epochs for failure in outcome.failures] == [16, 64]
    assert "which failed" in outcome.failures[1].sentence
    assert not outcome.elsewhere


def test_a_run_that_was_changed_by_hand_is_not_taken_for_the_sweeps(tmp_path, trainer):
    chosen = options(tmp_path, seeds=1, only=("supervised",))
    sweep(chosen)
    (run,) = (tmp_path / "runs").iterdir()
    config = json.loads((run / "config.json").read_text())
    config["train"]["epochs"] = 99
    (run / "config.json").write_text(json.dumps(config))
    (failure,) = sweep(chosen).failures
    assert "contains another run" in failure.sentence


def test_names_follow_from_what_is_trained_and_nothing_else(tmp_path):
    rows = {row.label: row for row in GRIDS["table1"].rows}
    config = config_of(rows[BEST], options(tmp_path), 0)
    name = run_name(config)
    assert name == "demo-mochi-128-128-16-k2048-e16-da844586-seed0"
    moved = options(tmp_path / "b", "fig3b", workers=7, device="cpu", first_seed=1)
    elsewhere = config_of(next(r for r in GRIDS["fig3b"].rows if r.label == BEST), moved, 1)
    assert run_name(elsewhere) == name.replace("seed0", "seed1")
    every = [
        run_name(config_of(row, options(tmp_path, grid), 0))
        for grid in ("table1", "variants", "fig3a")
        for row in GRIDS[grid].rows
    ]
    assert len(set(every)) == len({re.sub(r".*-(\w{8})-seed0", r"\1", each) for each in every})


def test_runs_on_cifar_100_are_not_called_cifar_10(tmp_path):
    (chain, *_) = make_plan(options(tmp_path, scale="cifar100", data_root="x")).chains
    assert chain[0].name.startswith("cifar100-")
    (chain, *_) = make_plan(options(tmp_path, scale="cifar10", data_root="x")).chains
    assert chain[0].name.startswith("cifar10-")


def test_mixing_settings_do_not_name_a_run_that_mixes_nothing():
    config = RECIPES["demo"].build("moco-v2", False)
    other = RECIPES["demo"].build("mochi", False)
    assert run_name(config).split("-")[1:3] == ["moco", "v2"]
    assert run_name(config) == run_name(
        type(config)(**{**vars(config), "mix": type(other.mix)(num_hardest=64)})
    )


def test_tables_hold_mean_deviation_and_gain_over_moco_v2(tmp_path, trainer):
    sweep(options(tmp_path, seeds=3, only=("MoCo-v2", BEST, "oracle")))
    lines = list(csv.DictReader(io.StringIO((tmp_path / "table1.csv").read_text())))
    found = {(line["label"], line["measure"]): line for line in lines}
    mochi = found[BEST, "linear-cached"]
    # Seeds 0, 1, 2 have 60, 61, 62 (MoCHi) and 50, 51, 52 (MoCo-v2): both deviate by 1.
    assert float(mochi["mean"]) == pytest.approx(61)
    assert float(mochi["std"]) == pytest.approx(1)
    assert float(mochi["gain"]) == pytest.approx(10)
    assert float(mochi["gain_error"]) == pytest.approx(math.sqrt(1 / 3 + 1 / 3))
    assert (mochi["gain_over"], mochi["seeds_finished"]) == ("MoCo-v2", "3")
    assert (mochi["paper"], mochi["paper_std"], mochi["paper_gain"]) == ("79.0", "0.4", "1.0")
    assert mochi["comparable"] == "no"
    setting = [mochi[f"num_{name}"] for name in ("hardest", "pairs", "with_query")]
    assert (setting, mochi["queue_size"]) == (["128", "128", "16"], "2048")
    assert found["MoCHi (1024, 1024, 128), oracle", "knn"]["gain_over"] == "MoCo-v2, oracle"
    assert found["MoCo-v2", "linear-cached"]["gain_word"] == "baseline"
    # Not printed beside the value: 81.8 - 78.0 of the paper's own rows.
    oracle = found["MoCo-v2, oracle", "linear-cached"]
    assert (oracle["paper_gain"], oracle["paper_gain_printed"]) == ("3.8", "False")
    assert float(found[BEST, "uniformity"]["mean"]) == pytest.approx(-3)
    facts = json.loads((tmp_path / "table1.json").read_text())
    assert facts["statement"].startswith("Not comparable")
    assert facts["seeds"] == [0, 1, 2]
    row = next(row for row in facts["rows"] if row["label"] == BEST)
    assert row["results"]["knn"]["values"] == pytest.approx({"0": 60, "1": 61, "2": 62})


def test_fresh_seeds_are_reported_alone(tmp_path, trainer):
    sweep(options(tmp_path, seeds=1, only=("MoCo-v2",)))
    sweep(options(tmp_path, seeds=2, first_seed=5, only=("MoCo-v2",)))
    facts = json.loads((tmp_path / "table1.json").read_text())
    assert facts["seeds"] == [5, 6]
    assert set(facts["rows"][0]["results"]["knn"]["values"]) == {"5", "6"}


def test_one_seed_has_no_deviation_and_no_error(tmp_path, trainer):
    chosen = options(tmp_path, seeds=1, only=("MoCo-v2", BEST))
    sweep(chosen)
    result = collect(make_plan(chosen))
    line = next(line for line in result.lines if line.row.label == BEST)
    assert next(iter(line.cells.values())).deviation is None
    assert next(iter(line.cells.values())).gain.points == pytest.approx(10)
    assert next(iter(line.cells.values())).gain.error is None


def test_a_table_of_some_rows_has_the_baseline_that_was_trained_before(tmp_path, trainer):
    sweep(options(tmp_path, seeds=1, only=("MoCo-v2", "MoCo-v2, oracle")))
    sweep(options(tmp_path, seeds=1, only=(BEST, f"{BEST}, oracle")))
    facts = json.loads((tmp_path / "table1.json").read_text())
    assert [row["label"] for row in facts["rows"]] == [
        *("MoCo-v2", BEST, "MoCo-v2, oracle", f"{BEST}, oracle")
    ]
    assert facts["rows"][1]["results"]["knn"]["gain"] == pytest.approx(10)


def test_fig3b_has_gains_beside_the_papers_and_proxy_its_accuracy(tmp_path, trainer):
    sweep(options(tmp_path, "fig3b", seeds=1, only=("MoCo-v2", "(1024, 128, 256)")))
    facts = json.loads((tmp_path / "fig3b.json").read_text())
    row = next(row for row in facts["rows"] if row["label"] == "MoCHi (1024, 128, 256)")
    number = row["results"]["linear-cached"]
    assert (number["paper"], number["paper_gain"]) == (None, 1.1)
    sweep(options(tmp_path, "proxy", seeds=1, only=("cosine",)))
    first = json.loads((tmp_path / "proxy.json").read_text())["rows"][0]
    assert first["label"] == "MoCo + cosine"
    assert first["results"]["proxy_accuracy"]["mean"] == 50.0


def test_a_result_of_another_protocol_is_not_taken(tmp_path, trainer):
    chosen = options(tmp_path, seeds=1, only=("supervised",))
    sweep(chosen)
    (run,) = (tmp_path / "runs").iterdir()
    for name, old, new in [
        ("linear-cached", "lbfgs", "sgd"),
        ("knn", "200", "20"),
        ("knn", "shapes", "cifar10"),
        ("knn", "}", ""),
    ]:
        file = run / "results" / f"{name}.json"
        whole = file.read_text()
        assert sweep_evaluations.is_present(read_run(run), name)
        file.write_text(whole.replace(old, new))
        assert not sweep_evaluations.is_present(read_run(run), name)
        file.write_text(whole)


def test_every_evaluation_that_a_grid_may_need_exists(tmp_path):
    paper = {"scale": "paper", "data_root": str(tmp_path)}
    needed = {
        name
        for grid in GRIDS
        for schedule in ("1x", "2x")
        for chosen in [options(tmp_path, grid, **paper, coco_schedule=schedule)]
        for row in GRIDS[grid].rows
        for name in evaluations_of(row, chosen)
    } | {"linear-cached", "queue", "transfer"}
    small = options(tmp_path, "table2", voc_root=tmp_path, coco_root=tmp_path)
    detections = {*options(tmp_path, **paper).detection.values(), *small.detection.values()}
    detections |= {name for name in needed if name.startswith("detection-")}
    assert needed - detections == sweep_evaluations.MAKERS.keys() | {"knn"}
    assert needed - detections <= sweep_evaluations.MAKERS.keys() | EVALUATIONS.keys()
    assert needed | detections <= {measure.file for measure in MEASURES}


def test_the_papers_scale_evaluates_by_the_papers_protocols(tmp_path, monkeypatch):
    called = {}

    def on_crops(evaluated, chosen):
        called["linear"] = evaluated, *linear._protocol(evaluated, chosen)
        return {}

    def opened(path, data, precision, checkpoint):
        assert (precision, checkpoint) == ("fp32", None)
        return EvaluatedRun(Run(path), None, data, *[None] * 5)

    monkeypatch.setattr(linear, "open_evaluated_run", opened)
    monkeypatch.setattr(linear, "measure_on_crops", on_crops)
    monkeypatch.setattr(detect, "evaluate", lambda path, *given: called.update({given[0]: given}))
    config = RECIPES["imagenet1k"].build("moco-v2", False)
    run = Run.create(tmp_path / "run", config)
    roots = {"voc_root": tmp_path / "voc", "coco_root": tmp_path / "coco"}
    chosen = options(tmp_path, "table2", scale="paper", data_root="images", **roots)
    for name in ("linear", "detection-voc-24k", "detection-coco-1x"):
        sweep_evaluations.evaluate(run, name, chosen)
    evaluated, preset, protocol = called.pop("linear")
    assert (evaluated.run.path, preset) == (run.path, LINEAR_PRESETS["imagenet1k"])
    assert (evaluated.data.root, protocol) == ("images", "preset imagenet1k")
    assert list(called.values()) == [
        (SCHEDULES["voc", "24k"], tmp_path / "voc"),
        (SCHEDULES["coco", "1x"], tmp_path / "coco"),
    ]
    sweep_evaluations.evaluate(run, "detection-coco-2x", replace(chosen, coco_schedule="2x"))
    assert (SCHEDULES["coco", "2x"], tmp_path / "coco") in called.values()


def test_detections_stand_beside_the_papers(tmp_path, trainer, monkeypatch):
    def evaluate(run, name, _):
        numbers = {"ap": {"mean": 0.5}, "ap50": {"mean": 0.8}, "ap75": {"mean": 0.6}}
        result = {"metrics": {"VOC07 11-point": numbers}, "protocol": "preset imagenet1k"}
        result |= {"data": "imagenet", **PROTOCOL["knn"]}
        run.results.mkdir(exist_ok=True)
        (run.results / f"{name}.json").write_text(json.dumps({"top1": 0.7, **result}))

    monkeypatch.setattr(sweeping, "evaluate", evaluate)
    roots = {"data_root": str(tmp_path), "voc_root": tmp_path}
    only = ("MoCHi (512, 1024, 512)",)
    sweep(options(tmp_path / "out", "table2", scale="paper", seeds=1, only=only, **roots))
    facts = json.loads((tmp_path / "out" / "table2.json").read_text())
    assert facts["comparable"]
    results = {row["label"]: row["results"] for row in facts["rows"]}[only[0]]
    measured = {each["title"]: (each["mean"], each["paper"]) for each in results.values()}
    assert measured["Linear evaluation top-1"] == (70, 67.6)
    assert measured["VOC AP"] == (50, 57.1)
    assert measured["VOC AP50"] == (80, 82.7)
    assert measured["VOC AP75"] == (60, 64.1)


def test_latex_is_escaped_and_every_line_has_every_column(tmp_path, trainer):
    chosen = options(tmp_path, "variants", only=("MoCo-v2", "50 %"))
    sweep(chosen)
    text = as_latex(collect(make_plan(chosen)))
    assert text == (tmp_path / "variants.tex").read_text()
    assert r"50 \% of the top N" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    columns = re.search(r"\\begin\{tabular\}\{(l\w+)\}", text).group(1)
    assert len(rows) == 1 + 3
    assert all(len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1 for row in rows)
    assert "±" not in text
    assert text.count("{") == text.count("}")
    assert not re.search(r"(?<!\\)[%#_]", text)
    assert len(re.findall(r"(?<!\\)\$", text)) % 2 == 0


def test_latex_has_the_columns_sections_and_order_of_the_paper(tmp_path, trainer):
    only = ("MoCo-v2", "MoCo-v2, oracle", BEST, f"{BEST}, oracle", "supervised")
    sweep(options(tmp_path, only=only))
    rows = [
        line.removesuffix(r" \\")
        for line in (tmp_path / "table1.tex").read_text().splitlines()
        if line.endswith(r"\\")
    ]
    assert rows == [
        "Method & top-1 & diff",
        r"MoCo-v2 & 50.50 $\pm$ 0.71 & ",
        rf"+ {BEST} & 60.50 $\pm$ 0.71 & +10.0",
        r"\multicolumn{3}{c}{\emph{Using Class Oracle}}",
        r"MoCo-v2 & 50.50 $\pm$ 0.71 & ",
        rf"+ {BEST} & 60.50 $\pm$ 0.71 & +10.0",
        r"supervised & 90.50 $\pm$ 0.71 & ",
    ]
    beside = (tmp_path / "table1-beside.tex").read_text()
    assert "k-NN top-1" in beside
    assert r"79.0 $\pm$ 0.4" in beside
    assert "images per second" not in beside
    assert "images per second" in (tmp_path / "table1-cost.tex").read_text()


def test_the_spread_of_a_single_run_is_that_of_its_detectors(tmp_path, trainer, monkeypatch):
    def evaluate(run, name, _):
        numbers = {key: {"mean": 0.5, "std": 0.002} for key in ("ap", "ap50", "ap75")}
        text = json.dumps({"metrics": {"VOC07 11-point": numbers}, "top1": 0.7} | PROTOCOL["knn"])
        run.results.mkdir(exist_ok=True)
        (run.results / f"{name}.json").write_text(text)

    monkeypatch.setattr(sweeping, "evaluate", evaluate)
    only = ("MoCo-v2", "MoCHi (256, 512, 0)", "MoCHi (256, 512, 0), 100 epochs")
    chosen = options(tmp_path / "out", "table2", seeds=1, only=only, voc_root=tmp_path)
    sweep(chosen)
    text = (tmp_path / "out" / "table2.tex").read_text()
    assert r"Method & top-1 & VOC AP50 & VOC AP & VOC AP75 \\" in text
    assert r"+ MoCHi (256, 512, 0) & - & 50.00 $\pm$ 0.20 (+0.0) & " in text
    assert text.index("100 epoch training") < text.index("200 epoch training")
    run = Run(tmp_path / "out" / "runs" / trainer.trained[-1])
    assert run.config().model.backbone == "resnet18-narrow"
    words = shared_command(run, "detection-voc-short", replace(chosen, detector_iterations=60))
    assert words[3:6] == ["voc", "--schedule", "short"]
    ending = "--iterations 60 --milestones 45 55 --warm-up 5 --test-every 0"
    assert " ".join(words).endswith(ending)


def test_each_special_character_of_latex_is_escaped():
    assert escape(r"a_b & 50% {x} $1 #2 ~ ^ \n") == (
        r"a\_b \& 50\% \{x\} \$1 \#2 \textasciitilde{} \textasciicircum{} \textbackslash{}n"
    )


def test_the_job_script_is_an_array_with_a_part_for_every_run(tmp_path, trainer):
    out = tmp_path / "a folder"
    assert run_command("table1", "--out", str(out), "--scale", "shapes", "--job-only") == 0
    assert trainer.trained == []
    script = (out / "job.sh").read_text()
    assert "#SBATCH --array=1-36" in script
    assert '--index "$SLURM_ARRAY_TASK_ID/36"' in script
    assert f"--out '{out}'" in script
    assert subprocess.run(["bash", "-n", out / "job.sh"], check=False).returncode == 0
    assert len(list((out / "configs").iterdir())) == 36


def test_a_job_asks_for_the_gpus_of_a_run_and_is_written_where_there_are_none(tmp_path, trainer):
    command = ["table1", "--out", str(tmp_path / "out"), "--data.root", str(tmp_path)]
    assert run_command(*command, "--job-only", "--gpus-per-run", "8") == 0
    script = (tmp_path / "out" / "job.sh").read_text()
    assert "#SBATCH --gpus-per-task=8\n" in script
    assert "#SBATCH --cpus-per-task=64\n" in script
    assert "--gpus-per-run 8" in script
    config = next((tmp_path / "out" / "configs").glob("*mochi*")).read_text()
    assert json.loads(config)["train"]["precision"] == "fp32"
    assert run_command(*command, "--gpus-per-run", "8") == 2
    assert trainer.trained == []


def test_seeds_and_precision_are_the_papers_unless_others_are_asked_for(tmp_path, capfd):
    seeds = {name: grid.seeds for name, grid in GRIDS.items()}
    assert seeds.pop("table1") == 3  # "at least 3 runs" (App. C.1)
    assert set(seeds.values()) == {1}
    (run,) = make_plan(SweepOptions(grid="table3", out=tmp_path, seeds=1, only=("MoCo-v2",))).own
    assert run.config.train.precision == "fp32"
    assert run_command("table3", "--out", str(tmp_path), "--dry-run", "--precision", "bf16") == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "Not comparable: trained with --precision bf16" in shown
    assert "table3 at the scale paper, 9 runs" in shown


def test_the_time_depends_on_gpus_methods_and_evaluations(tmp_path):
    def seconds(gpus: int, grid: str = "table2", **others) -> tuple[float, float]:
        plan = make_plan(SweepOptions(grid=grid, out=tmp_path, gpus_per_run=gpus, **others))
        speed = measure_speed(plan)
        return (
            training_seconds(plan.own, plan, speed),
            evaluation_seconds(plan.own, plan, speed),
        )

    moco = {"only": ("MoCo-v2, 100 epochs",), "seeds": 1}
    four, eight = seconds(4, **moco), seconds(8, **moco)
    assert four == pytest.approx([2 * each for each in eight])
    assert four[0] == pytest.approx(1_281_167 * 100 / 490)  # the paper's four GPUs
    linear, voc = 1_281_167 * 100 / (4 * 490), 24_000 * 16 * 3 / (4 * 18)
    assert four[1] > linear + voc
    supervised = seconds(4, "table1", only=("supervised",), seeds=1)[0]
    assert supervised == pytest.approx(0.75 * seconds(4, "table1", only=("MoCo-v2",), seeds=1)[0])


def test_the_job_script_has_what_changes_the_runs(tmp_path, trainer):
    changes = ["--epochs", "3", "--num-images", "64", "--temperature", "0.1"]
    assert (
        run_command("table1", "--out", str(tmp_path), "--scale", "shapes", "--job-only", *changes)
        == 0
    )
    assert " ".join(changes) in (tmp_path / "job.sh").read_text()


def test_time_is_estimated_from_the_runs_that_are_there(tmp_path, trainer, capfd):
    sweep(options(tmp_path, seeds=1))
    capfd.readouterr()
    sweep(options(tmp_path, seeds=2), dry_run=True)
    shown = capfd.readouterr().out
    assert "measured in 12 runs, 2000 images/s" in shown
    # Twelve runs of 16 epochs of 10,000 images at 2000 a second.
    assert f"Estimated time: {duration(12 * 80)} of training" in shown


def test_times_duration():
    words = [duration(seconds) for seconds in (5, 90, 7500, 300_000)]
    assert words == ["5 s", "1 min", "2 h 5 min", "3 days 11 h"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tabel1"], ["'tabel1'", "choose one of table1"]),
        (["table1", "--index", "5/4"], ["--index 5/4", "I from 1 to N"]),
        (["table1", "--index", "0/4"], ["--index 0/4"]),
        (["table1", "--index", "two"], ["--index two"]),
        (["table1", "--seeds", "0"], ["--seeds 0"]),
        (["table1", "--only", "SimCLR"], ["--only SimCLR", "MoCHi (1024, 1024, 128)"]),
        (["table3", "--scale", "shapes"], ["--coco-root is missing", "COCO"]),
        (["table3", "--detector-iterations", "9"], ["--detector-iterations", "paper's settings"]),
        (
            ["table3", "--scale", "shapes", "--detector-iterations", "0"],
            ["--detector-iterations 0"],
        ),
        (["table1"], ["--data.root is missing", "ImageNet"]),
        (["table1", "--scale", "cifar10"], ["--data.root is missing", "CIFAR-10"]),
        (["table1", "--scale", "cifar10", "--data.root", "/no"], ["/no does not exist"]),
        (["table1", "--scale", "shapes", "--data.root", "."], ["--scale shapes", "generated"]),
        (["table2", "--data.root", "."], ["--voc-root is missing"]),
        (["table1", "--epochs", "5"], ["--epochs", "paper's settings"]),
        (["table1", "--scale", "shapes", "--epochs", "0"], ["--epochs 0"]),
        (["table1", "--temperature", "0.1"], ["--temperature", "paper's settings"]),
        (
            ["table1", "--scale", "shapes", "--temperature", "-1"],
            ["--temperature -1", "finite number above 0"],
        ),
        (["table1", "--scale", "imagenet"], ["imagenet"]),
    ],
)
def test_bad_input_is_said_in_words_and_nothing_written(tmp_path, capfd, arguments, words):
    if arguments[1:] == ["--epochs", "5"]:
        arguments = [*arguments, "--data.root", "."]
    assert run_command(*arguments, "--out", str(tmp_path / "out")) == 2
    shown = capfd.readouterr().err
    assert "Traceback" not in shown
    for word in words:
        assert word in shown
    assert files_in(tmp_path) == []


def test_the_folder_of_another_sweep_is_refused_by_what_differs(tmp_path, trainer):
    sweep(options(tmp_path, seeds=1, only=("supervised",)))
    before = files_in(tmp_path)
    for changes, words in [
        (
            {"scale": "cifar10", "data_root": str(tmp_path)},
            "scale shapes, but this one has cifar10",
        ),
        ({"epochs": 3}, "epochs None, but this one has 3"),
        ({"num_images": 64}, "num_images None, but this one has 64"),
        ({"temperature": 0.1}, "temperature None, but this one has 0.1"),
    ]:
        with pytest.raises(InputError, match=words):
            sweep(options(tmp_path, **changes))
    assert files_in(tmp_path) == before


def test_rows_that_a_scale_makes_equal_are_one_run_and_said(tmp_path, trainer, capfd):
    chosen = options(tmp_path, "table1-supp", seeds=1, epochs=1, only=("MoCo-v2, 100", "MoCo-v2"))
    sweep(chosen)
    shown = capfd.readouterr().out
    assert "MoCo-v2, 100 epochs and MoCo-v2 have the same settings at this scale" in shown
    assert len(trainer.trained) == len(set(trainer.trained))


def test_a_tiny_sweep_for_real_with_a_longer_run_that_goes_on(tmp_path):
    out = tmp_path / "sweep"
    arguments = ["table1-supp", "--out", str(out), "--scale", "shapes", "--seeds", "1"]
    arguments += ["--epochs", "2", "--num-images", "128", "--only", "MoCo-v2, 100", "MoCo-v2, 800"]
    assert run_command(*arguments) == 0
    runs = {Run(path).config().train.epochs: Run(path) for path in (out / "runs").glob("*-e[28]-*")}
    assert sorted(runs) == [2, 8]
    # Epoch 100 of 200, then the rest, is the unbroken run to the last bit.
    alone = pretrain(runs[2].config(), tmp_path / "alone")
    ours, unbroken = (load_file(run.encoder_file) for run in (runs[2], alone))
    assert all(ours[name].equal(unbroken[name]) for name in unbroken)
    names = {file.stem for file in runs[8].results.iterdir()}
    assert names == {"pretrain", "knn", "linear-cached", "embedding"}
    facts = json.loads((out / "table1-supp.json").read_text())
    shown = {row["label"]: row["results"] for row in facts["rows"]}
    top1 = json.loads((runs[8].results / "knn.json").read_text())["top1"]
    assert shown["MoCo-v2, 800 epochs"]["knn"]["mean"] == pytest.approx(100 * top1)
    assert (out / "table1-supp.html").exists()
    assert (out / "figures" / "table1-supp" / "fig3c.svg").exists()
