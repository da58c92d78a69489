"""Grids from a TOML file: read, refused in words, trained, recorded, and collected from records."""

import csv
import io
import json
import shutil
from pathlib import Path
from typing import get_args

import pytest
from PIL import Image

from hardmix.commands import main as cli
from hardmix.errors import InputError
from hardmix.runs.folder import Run
from hardmix.settings.evaluations import EVALUATIONS
from hardmix.settings.saved import to_json
from hardmix.sweep import sweeping
from hardmix.sweep.grid_rows import Evaluation, baseline_of
from hardmix.sweep.measures import MAKERS, MEASURES, PROTOCOLS
from hardmix.sweep.own_grids import TREND_OVER, read_grid
from hardmix.sweep.pairs import paired, refused_pairs
from hardmix.sweep.planning import SweepOptions, config_of, evaluations_of, make_plan
from hardmix.sweep.results import collect

pytestmark = pytest.mark.slow

GRID = """
title = "Views"
recipe = "demo"
evaluations = ["linear-cached", "knn", "proxy"]
seeds = 3
first_seed = 1

[settings]
data.num_images = 256
train.batch-size = 32
train.queue_size = 128
mix = { num_hardest = 16, num_pairs = 16, num_with_query = 2 }

[[row]]
id = "weak"
label = "MoCo-v2, weak"
method = "moco-v2"
settings.data.min_scale = 0.6

[[row]]
id = "weak-mochi"
like = "weak"
method = "mochi"
baseline = "weak"

[[row]]
id = "strong"
method = "moco-v2"

[[row]]
id = "strong-mochi"
like = "strong"
method = "mochi"
baseline = "strong"
settings.mix.num_pairs = 32

[[trend]]
over = "proxy_accuracy"
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "views.toml"
    path.write_text(GRID)
    return path


def options(file: Path, out: Path, **others) -> SweepOptions:
    return SweepOptions(**{"grid": str(file), "out": out, "seeds": 3, "first_seed": 1, **others})


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        cli.main(["sweep", *arguments])
    return done.value.code


def test_a_row_is_its_recipe_what_all_share_and_its_own_settings(file):
    grid = read_grid(str(file))
    weak, weak_mochi, strong, strong_mochi = (row.own for row in grid.rows)
    assert (weak.method, weak_mochi.method) == ("moco-v2", "mochi")
    assert (weak.data.min_scale, weak_mochi.data.min_scale, strong.data.min_scale) == (
        *(0.6, 0.6),
        0.2,
    )
    assert all(row.own.train.batch_size == 32 for row in grid.rows)
    assert (weak_mochi.mix.num_pairs, strong_mochi.mix.num_pairs) == (16, 32)
    assert weak.optimizer.lr == 0.12, "the recipe's"
    assert [row.label for row in grid.rows] == [
        *("MoCo-v2, weak", "weak-mochi", "strong", "strong-mochi")
    ]
    assert (grid.seeds, grid.first_seed, grid.place) == (3, 1, "Views")
    assert grid.trends[0].rows == ("weak-mochi", "strong-mochi")


def test_baselines_are_named_by_id(file):
    rows = read_grid(str(file)).rows
    found = [baseline_of(row, rows) for row in rows]
    assert [None if each is None else each.id for each in found] == [
        *("weak", "weak", "strong", "strong")
    ]


def test_the_names_of_runs_begin_with_what_the_images_are_called(file, tmp_path):
    names = [job.name for chain in make_plan(options(file, tmp_path)).chains for job in chain]
    named = tmp_path / "named.toml"
    named.write_text(GRID.replace('title = "Views"', 'title = "Views"\nimages = "cifar100"'))
    others = [job.name for chain in make_plan(options(named, tmp_path)).chains for job in chain]
    assert all(name.startswith("demo-") for name in names)
    assert others == [name.replace("demo-", "cifar100-", 1) for name in names]


def test_runs_go_seed_by_seed_and_each_row_directly_after_its_baseline(file, tmp_path):
    jobs = make_plan(options(file, tmp_path)).own
    seeds = [job.config.train.seed for job in jobs]
    assert seeds == [1] * 4 + [2] * 4 + [3] * 4
    assert [job.config.method for job in jobs] == ["moco-v2", "mochi"] * 6


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seeds = 3", "seed = 3", ["unknown key 'seed'", "seeds"]),
        ("seeds = 3", "seeds = 0", ["seeds = 0", "at least 1"]),
        ("seeds = 3", "seeds = true", ["seeds = True", "int"]),
        ('recipe = "demo"', 'recipe = "dmo"', ["recipe = 'dmo'", "demo"]),
        ('method = "moco-v2"', 'method = "moco"', ["method = 'moco'", "moco-v2"]),
        ('"knn", ', '"nkk", ', ["evaluations = 'nkk'", "knn"]),
        ('"linear-cached"', '"linear"', ["linear", "linear-cached", "demo"]),
        ("min_scale = 0.6", "min_skale = 0.6", ["min_skale", "weak"]),
        ("min_scale = 0.6", 'min_scale = "x"', ["min_scale='x'", "float"]),
        ("min_scale = 0.6", "min_scale = 6.0", ["data.min_scale=6.0"]),
        ("min_scale = 0.6", 'root = "/x"', ["root", "--data.root"]),
        ("queue_size = 128", "seed = 128", ["seed", "--seeds"]),
        ("num_hardest = 16", "num_hardest = 1000", ["mix.num_hardest=1000", "queue_size=128"]),
        ('baseline = "weak"', 'baseline = "week"', ["baseline = 'week'", "weak"]),
        ('like = "weak"', 'like = "later"', ["like = 'later'", "weak"]),
        ('id = "strong"', 'id = "weak"', ["row 3", "unique id", "'weak'"]),
        (
            'id = "strong"',
            'id = "strong"\nlabel = "weak-mochi"',
            ["label 'weak-mochi'", "two rows"],
        ),
        ('over = "proxy_accuracy"', 'over = "proxy"', ["over = 'proxy'", "proxy_accuracy"]),
        ('over = "proxy_accuracy"', 'rows = ["weak"]', ["'weak'", "no baseline"]),
        ('title = "Views"', "title = Views", ["is not TOML"]),
        ('title = "Views"', 'images = "a b/.."', ["images = 'a b/..'", "lower-case"]),
    ],
)
def test_a_wrong_file_is_refused_by_what_is_wrong(tmp_path, capfd, old, new, words):
    assert old in GRID
    path = tmp_path / "grid.toml"
    path.write_text(GRID.replace(old, new, 1))
    assert run_command(str(path), "--out", str(tmp_path / "out"), "--dry-run") == 2
    shown = " ".join(capfd.readouterr().err.split())
    assert "Traceback" not in shown
    for word in words:
        assert word in shown, shown
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_there_and_one_without_rows(tmp_path, capfd):
    missing, empty = tmp_path / "missing.toml", tmp_path / "empty.toml"
    empty.write_text('title = "nothing"\n')
    for path, word in ((missing, "cannot be read"), (empty, "has no row")):
        assert run_command(str(path), "--out", str(tmp_path / "out"), "--dry-run") == 2
        assert word in " ".join(capfd.readouterr().err.split())


def test_options_of_the_papers_grids_are_refused(file, tmp_path):
    for changes in ({"scale": "shapes"}, {"epochs": 3}, {"temperature": 0.1}):
        with pytest.raises(InputError, match="write the settings to"):
            options(file, tmp_path, **changes)


def test_every_evaluation_and_every_trend_that_a_file_may_ask_for_exists(tmp_path):
    path = tmp_path / "all.toml"
    every = json.dumps(get_args(Evaluation))
    path.write_text(
        f'recipe = "imagenet100"\nevaluations = {every}\n[[row]]\nid = "a"\nmethod = "mochi"\n'
    )
    (row,) = read_grid(str(path)).rows
    chosen = options(path, tmp_path)
    known = {*MAKERS, *EVALUATIONS, *chosen.detection.values()}
    assert set(evaluations_of(row, chosen)) <= known
    assert set(TREND_OVER) <= {measure.id for measure in MEASURES}


class FakeTrainer:
    """Writes a finished run; its accuracy follows from views, method and seed."""

    def __init__(self) -> None:
        self.trained: list[str] = []

    def pretrain(self, config, out, *, resume):
        run = Run(out)
        run.path.mkdir(parents=True, exist_ok=True)
        run.config_file.write_bytes(to_json(config))
        weak, seed = config.data.min_scale == 0.6, config.train.seed
        line = {"step": 1, "epoch": 0, "proxy_accuracy": (0.8 if weak else 0.1) + 0.01 * seed}
        run.metrics_file.write_text(json.dumps(line) + "\n")
        run.encoder_file.write_bytes(b"")
        self.trained.append(run.path.name)
        return run

    def evaluate(self, run, name, options):
        config = run.config()
        weak, seed = config.data.min_scale == 0.6, config.train.seed
        # Seeds differ by ten points; MoCHi gains 2 with weak views, 0.5 with strong ones.
        gain = (2.0 if weak else 0.5) + 0.1 * (seed - 2)
        top1 = 30 + 10 * seed + (gain if config.method == "mochi" else 0)
        run.results.mkdir(exist_ok=True)
        result = {"top1": top1 / 100, "data": "shapes", **PROTOCOLS[name]}
        (run.results / f"{name}.json").write_text(json.dumps(result))


@pytest.fixture
def trainer(monkeypatch) -> FakeTrainer:
    fake = FakeTrainer()
    monkeypatch.setattr(sweeping, "pretrain", fake.pretrain)
    monkeypatch.setattr(sweeping, "evaluate", fake.evaluate)
    monkeypatch.setattr(sweeping, "draw", lambda plan, runs: None)
    return fake


def test_the_command_trains_a_file_and_shows_pairs(file, tmp_path, trainer, capfd):
    out = tmp_path / "out"
    assert run_command(str(file), "--out", str(out), "--pairs") == 0
    assert len(trainer.trained) == 12, "seeds are the file's"
    shown = " ".join(capfd.readouterr().out.split())
    assert "the paper has no numbers for it" in shown
    # Gains of 1.9, 2.0, 2.1: the deviation is 0.1, t is 4.303, so the half is 0.248.
    assert "+2.00 [+1.75, +2.25]" in shown
    lines = list(csv.DictReader(io.StringIO((out / "views-pairs.csv").read_text())))
    weak = next(
        line
        for line in lines
        if line["label"] == "weak-mochi" and line["measure"] == "linear-cached"
    )
    facts = weak["over"], weak["pairs"], weak["significant"]
    assert facts == ("MoCo-v2, weak", "3", "yes, higher")
    assert [float(weak[f"seed_{seed}"]) for seed in (1, 2, 3)] == pytest.approx([1.9, 2.0, 2.1])
    facts = json.loads((out / "views-pairs.json").read_text())
    trends = {
        name: each[name]
        for each in facts["trends"]
        if each["measure"] == "linear-cached"
        for name in ("slope", "mean_gain")
        if name in each
    }
    # 1.5 points for 70 % of proxy accuracy, at every seed.
    assert trends["slope"]["mean"] == pytest.approx(1.5 / 7)
    assert trends["mean_gain"]["by_seed"] == pytest.approx({"1": 1.15, "2": 1.25, "3": 1.35})
    for ending in ("csv", "tex", "json"):
        assert (out / f"views.{ending}").exists()
        assert (out / f"views-pairs.{ending}").exists()
    figures = {file.name for file in (out / "figures" / "views").iterdir()}
    assert "forest-linear-cached.svg" in figures
    assert "gain-over-proxy_accuracy-linear-cached.png" in figures


def test_records_are_enough_to_make_every_table_again(file, tmp_path, trainer):
    out, other = tmp_path / "out", tmp_path / "other"
    assert run_command(str(file), "--out", str(out), "--pairs") == 0
    records = sorted((out / "records").iterdir())
    assert len(records) == 12
    shutil.rmtree(out / "runs")
    collected = [str(file), "--out", str(other), "--records", str(out / "records")]
    assert run_command(*collected, "--collect", "--pairs") == 0
    assert len(trainer.trained) == 12
    for name in ("views.csv", "views.tex", "views-pairs.csv", "views-pairs.json"):
        assert (other / name).read_text() == (out / name).read_text(), name
    assert not (other / "sweep.json").exists(), "nothing but tables and figures"
    third = tmp_path / "third"
    assert run_command(*collected[:2], str(third), *collected[3:], "--collect", "--dry-run") == 0
    assert not third.exists()


def test_a_recorded_run_is_not_trained_again_elsewhere(file, tmp_path, trainer, capfd):
    here, there = tmp_path / "here", tmp_path / "there"
    records = ["--records", str(tmp_path / "records")]
    assert run_command(str(file), "--out", str(here), "--seeds", "1", *records) == 0
    first = list(trainer.trained)
    capfd.readouterr()
    assert run_command(str(file), "--out", str(there), "--seeds", "2", *records) == 0
    shown = capfd.readouterr().out
    assert shown.count("was finished elsewhere") == len(first) == 4
    assert "1 new, 1 recorded" in shown
    assert all(name.endswith("-seed2") for name in trainer.trained[4:])
    assert len(trainer.trained) == 8
    assert len(list((tmp_path / "records").iterdir())) == 8


def test_a_record_says_what_its_numbers_depend_on_and_no_place_of_a_machine(
    file, tmp_path, trainer
):
    arguments = ["--out", str(tmp_path / "out"), "--seeds", "1", "--only", "weak-mochi"]
    assert run_command(str(file), *arguments, "--data.root", str(tmp_path)) == 0
    (record,) = (tmp_path / "out" / "records").iterdir()
    facts = json.loads(record.read_text())
    assert str(tmp_path) not in record.read_text()
    assert facts["measures"] == pytest.approx(
        {"linear-cached": 41.9, "knn": 41.9, "proxy_accuracy": 81.0}
    )
    assert (facts["seed"], facts["grid"], facts["name"]) == (1, "views", record.stem)
    assert facts["config"]["mix"]["num_pairs"] == 16
    assert {"torch", "hardmix", "python"} <= set(facts["versions"])
    assert facts["command"].startswith("hardmix sweep views.toml --out DIR --data.root DATA")
    assert len(record.read_bytes()) < 8000


def test_a_pair_of_two_machines_is_refused(file, tmp_path, trainer):
    """Sums round differently on another CPU or with other threads, so the pair differs in more."""
    assert run_command(str(file), "--out", str(tmp_path)) == 0
    shutil.rmtree(tmp_path / "runs")
    for record in (tmp_path / "records").iterdir():
        facts = json.loads(record.read_text())
        odd = facts["seed"] == 2 and facts["config"]["mix"]["num_pairs"] == 32
        record.write_text(json.dumps(facts | {"cpu": "A", "threads": 2 if odd else 1}))
    result = collect(make_plan(options(file, tmp_path)))
    assert refused_pairs(result) == [
        "Seed 2: strong-mochi and strong are not used as a pair, because they were trained on"
        " different machines (A, threads: 2 and A, threads: 1)."
    ]
    seeds = {pairs.id: set(pairs.differences) for pairs in paired(result)}
    assert seeds == {"weak-mochi": {1, 2, 3}, "strong-mochi": {1, 3}}


def test_a_damaged_record_is_named(file, tmp_path, trainer):
    chosen = options(file, tmp_path / "out", seeds=1)
    sweeping.sweep(chosen)
    record = next((tmp_path / "out" / "records").iterdir())
    shutil.rmtree(tmp_path / "out" / "runs")
    for text in ("{", '{"format": "other"}'):
        record.write_text(text)
        with pytest.raises(InputError, match=record.stem):
            sweeping.sweep(chosen, dry_run=True)


def test_a_tiny_grid_for_real(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(
        GRID.replace('"proxy"]', '"proxy", "queue"]\nlabelled_images = 128')
        .replace(
            "[settings]",
            "[settings]\ntrain.epochs = 1\nmix.warm_up_epochs = 0\ntrain.knn_every = 0",
        )
        .replace("mix = { num_hardest = 16, num_pairs = 16, num_with_query = 2 }", "")
        .replace("data.num_images", "mix.num_hardest = 16\nmix.num_pairs = 16\ndata.num_images")
    )
    out = tmp_path / "out"
    chosen = ["--seeds", "1", "--only", "MoCo-v2, weak", "weak-mochi"]
    assert run_command(str(path), "--out", str(out), *chosen) == 0
    facts = [json.loads(file.read_text()) for file in (out / "records").iterdir()]
    mochi = next(each for each in facts if each["config"]["method"] == "mochi")
    moco = next(each for each in facts if each["config"]["method"] == "moco-v2")
    assert {"linear-cached", "knn", "proxy_accuracy", "queue-uniformity"} <= set(moco["measures"])
    assert 0 < mochi["measures"]["synthetic_mass"] < 100
    assert "synthetic_mass" not in moco["measures"]
    assert -4 <= mochi["measures"]["queue-uniformity"] <= 0 <= mochi["measures"]["queue-alignment"]
    knn = json.loads(next((out / "runs").glob("*/results/knn.json")).read_text())
    assert (knn["train"], knn["test"]) == (128, 128)
    # Both have seen the same: the config differs in nothing but the method.
    assert config_of(read_grid(str(path)).rows[1], options(path, out), 1).data.num_images == 256
    # Evaluated later on other images: their result is added, the rest and the commit stay.
    later = tmp_path / "later.toml"
    later.write_text(path.read_text().replace('"knn", ', '"knn", "transfer", '))
    assert run_command(str(later), "--out", str(out), *chosen) == 2  # --transfer-root is missing
    file = next((out / "records").glob("*mochi*"))
    file.write_text(
        file.read_text().replace(f'"commit": {json.dumps(mochi["commit"])}', '"commit": "c"')
    )
    for number, colour in enumerate(["red", "blue"] * 10):
        place = tmp_path / "other" / colour
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), colour).save(place / f"{number}.png")
    other = ["--transfer-root", str(tmp_path / "other")]
    assert run_command(str(later), "--out", str(out), *chosen, *other) == 0
    added = json.loads(file.read_text())
    assert added["commit"] == "c"
    assert added["measures"].pop("transfer") == 100  # a random network tells red from blue
    assert added["measures"] == mochi["measures"]
    # Another grid with the same run asks for one more: what others asked for stays recorded.
    third = tmp_path / "third.toml"
    third.write_text(path.read_text().replace('"knn", ', '"knn", "embedding", '))
    assert run_command(str(third), "--out", str(out), *chosen) == 0
    again = json.loads(file.read_text())
    assert {"transfer", "embedding"} <= set(again["evaluations"])
    assert again["measures"]["transfer"] == 100


def test_a_method_without_a_queue_is_not_asked_for_its_queue(tmp_path):
    path = tmp_path / "methods.toml"
    row = '\n[[row]]\nid = "simclr"\nmethod = "simclr"\n'
    path.write_text(
        GRID.replace('"proxy"]', '"proxy", "queue"]').replace("\n[[trend]]", f"{row}\n[[trend]]")
    )
    asked = {job.config.method: job.evaluations for job in make_plan(options(path, tmp_path)).own}
    assert "queue" in asked["moco-v2"]
    assert asked["simclr"] == ("linear-cached", "knn")


def test_a_trend_that_cannot_be_computed_says_why(file, tmp_path, trainer, capfd):
    file.write_text(GRID.replace('over = "proxy_accuracy"', 'over = "synthetic_mass"'))
    assert run_command(str(file), "--out", str(tmp_path / "out"), "--pairs") == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "No trend over synthetic_mass: weak-mochi, strong-mochi have no synthetic_mass" in shown


def test_a_trend_of_a_single_row_has_no_slope_and_says_so(file, tmp_path, trainer, capfd):
    over = 'over = "proxy_accuracy"'
    file.write_text(GRID.replace(over, f'{over}\nrows = ["weak-mochi"]'))
    assert run_command(str(file), "--out", str(tmp_path / "out"), "--pairs") == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "No trend over proxy_accuracy: a slope needs at least two rows" in shown
    assert "nan" not in (tmp_path / "out" / "views-pairs.json").read_text().casefold()


def test_a_methods_own_settings_are_named_as_on_the_command_line(tmp_path):
    path = tmp_path / "pcl.toml"
    row = '\n[[row]]\nid = "pcl"\nmethod = "pcl"\nsettings.pcl.clusters = [10, 20]\n'
    path.write_text(GRID.replace("\n[[trend]]", f"{row}\n[[trend]]"))
    (job,) = [
        each for each in make_plan(options(path, tmp_path)).own if each.config.method == "pcl"
    ][:1]
    assert job.config.options.clusters == (10, 20)
