"""The benchmarks measure real code, compare like with like, and write their results."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks import __main__ as program, growth, jobs, limits, loader, suite, tables, worker
from benchmarks.images import listed, photographs
from benchmarks.limits import LIMITS, judge
from benchmarks.official import OfficialMoco, OfficialStep, OfficialViews
from benchmarks.rounds import summary, take_turns
from benchmarks.steps import TINY, build_step, build_training, random_batch
from benchmarks.suite import PLANS, BenchOptions, notes
from hardmix.data.image_set import ImageSet
from hardmix.data.loading import ViewLoader
from hardmix.errors import InputError
from hardmix.models.batch_norm import split_batch_norm
from hardmix.settings.config import DataConfig
from hardmix.training.step import take_step

pytestmark = pytest.mark.slow

SETUP = suite.prepare_setup(BenchOptions(quick=True, device="cpu"))


def here(job: jobs.BenchJob, tell: jobs.Tell) -> list[jobs.Row]:
    """The job in this process: a fresh one takes seconds to import torch."""
    rows = worker.MEASURES[job.kind](json.loads(json.dumps(job.settings)), tell)
    return json.loads(json.dumps(rows))


@pytest.mark.parametrize(
    "part", ["loss", "step", "methods", "loader", "end-to-end", "memory", "growth"]
)
def test_a_part_measures_every_variant_and_writes_their_ratios(part, tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "available_cores", lambda: 1)  # many processes: see below
    out = tmp_path / "bench.json"
    suite.bench(BenchOptions(parts=(part,), out=out, quick=True, device="cpu"), run=here)
    report = json.loads(out.read_text())
    (rows,) = report["parts"].values()
    assert {"command", "date", "seed", "cpu", "versions", "load_average_before"} <= report.keys()
    assert rows
    for row in rows:
        variants = row.get("milliseconds") or row["peak_mb"]
        assert len(variants) >= 2
        for name in variants:
            assert row["ratio"][name].keys() == variants.keys()
            assert row["ratio"][name][name]["median"] == 1
    page = out.with_suffix(".md").read_text()
    assert report["command"] in page
    assert all(tables.NAMES[name] in page for name in rows[0]["ratio"])


def test_a_part_that_fails_does_not_lose_those_before_it(tmp_path):
    def measure(job, tell):
        if job.kind != "loss":
            raise RuntimeError("the machine went away")
        return here(job, tell)

    out = tmp_path / "bench.json"
    options = BenchOptions(parts=("loss", "memory"), out=out, quick=True, device="cpu")
    with pytest.raises(RuntimeError, match="went away"):
        suite.bench(options, run=measure)
    assert json.loads(out.read_text())["parts"].keys() == {"loss"}
    assert "plain MoCo" in out.with_suffix(".md").read_text()


def test_a_benchmark_gives_no_advice_on_training(tmp_path, capfd):
    out = tmp_path / "bench.json"
    suite.bench(BenchOptions(parts=("step",), out=out, quick=True, device="cpu"), run=here)
    assert "warning" not in capfd.readouterr().err


def test_the_program_measures_in_a_fresh_process_and_names_what_it_leaves_out(tmp_path, capfd):
    out = tmp_path / "loss.json"
    program.main(["loss", "--quick", "--device", "cpu", "--out", str(out)])
    shown = capfd.readouterr()
    assert "replace CIFAR-10" in shown.out
    (row, *_) = json.loads(out.read_text())["parts"]["loss"]
    assert row["allocator"] in jobs.ALLOCATORS
    variants = {"plain_moco", "materialised", "hardmix", "hardmix_tensor", "hardmix_moco"}
    assert variants <= row["milliseconds"].keys()
    assert row["loss"]["hardmix_moco"] == pytest.approx(row["loss"]["plain_moco"], rel=1e-5)


def test_every_job_can_be_done_by_the_process_that_measures():
    whole = replace(SETUP, quick=False, rounds=15, precisions=("fp32", "bf16"), cores=2)
    for setup in (SETUP, whole):
        for name in PLANS:
            for job in suite.PLANS[name](setup):
                assert job.kind in worker.MEASURES
                assert job.turns >= 1
                assert json.loads(json.dumps(job.settings))["device"] == "cpu"


def test_a_step_in_bf16_gives_the_loss_of_fp32_up_to_its_precision(tmp_path):
    batch = random_batch(TINY, "cpu")
    fp32, bf16 = (
        float(build_step(name, TINY, "cpu", tmp_path)(batch))
        for name in ("mochi_fp32", "mochi_bf16")
    )
    assert bf16 == pytest.approx(fp32, rel=0.02)
    assert bf16 != fp32


def official_and_ours(tmp_path, steps):
    """Losses of the official way of writing MoCo, and of ours with s = s' = 0, of equal weights."""
    size = TINY._replace(num_pairs=0, num_with_query=0)
    data = DataConfig(name="list", root=listed(tmp_path, 100), image_size=size.image_size)
    training = build_training("mochi_fp32", size, "cpu", data, tmp_path / "run")
    config, method = training.config, training.method
    split_batch_norm(method.pair.key, 1)  # official MoCo in one process has one group
    encoder = copy.deepcopy(method.pair.query)
    theirs = OfficialMoco(
        nn.Sequential(encoder.trunk, encoder.head),
        config.model.dim,
        size.queue,
        config.model.key_momentum,
        config.train.temperature,
    )
    theirs.queue.copy_(method.memory.keys.T)
    step = OfficialStep(theirs, config.optimizer)
    batch = random_batch(size, "cpu")
    losses = []
    for number in range(steps):
        ours = take_step(training, batch, epoch=0)
        training.step = number + 1
        losses.append((float(step(batch.query, batch.key)), float(ours)))
    return losses, theirs, method


def test_official_moco_as_written_here_trains_as_ours_does_without_points(tmp_path):
    losses, theirs, method = official_and_ours(tmp_path, steps=4)
    for official, ours in losses:
        assert official == pytest.approx(ours, rel=1e-4)
    assert len({round(official, 4) for official, _ in losses}) == 4
    assert torch.allclose(theirs.queue.T, method.memory.keys, atol=1e-4)
    for a, b in zip(theirs.key_encoder.parameters(), method.pair.key.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_official_views_and_ours_have_one_shape_and_one_range():
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 256, (128, 3, 32, 32), generator=generator, dtype=torch.uint8)
    images = ImageSet("noise", None, None, tensor=tensor)
    ours = next(ViewLoader(images, DataConfig(image_size=32), 128, 0, torch.device("cpu")).epoch(0))
    pil = loader.PilImages(images, OfficialViews(32))
    torch.manual_seed(0)
    query, key = (torch.stack(views) for views in zip(*(pil[n] for n in range(128)), strict=True))
    assert query.shape == key.shape == ours.query.shape == ours.key.shape
    assert not torch.equal(query, key)
    black, white = (torch.tensor([0.0, 1.0])[:, None] - torch.tensor([0.485, 0.456, 0.406])) / (
        torch.tensor([0.229, 0.224, 0.225])
    )
    for views in (query, key, ours.query, ours.key):
        flat = views.movedim(1, 0).flatten(1)
        assert (flat.amin(1) >= black - 1e-4).all()
        assert (flat.amax(1) <= white + 1e-4).all()
    assert torch.allclose(query.mean(dim=(0, 2, 3)), ours.query.mean(dim=(0, 2, 3)), atol=0.15)


def test_generated_photographs_are_jpeg_files_of_imagenets_size(tmp_path):
    images = photographs(None, tmp_path, 3)
    assert len(images) == 3
    for file in images.files:
        with Image.open(file) as image:
            assert (image.format, image.size) == ("JPEG", (500, 375))
        assert 60_000 < Path(file).stat().st_size < 200_000


def test_variants_take_turns_and_a_ratio_is_the_median_of_the_rounds_own():
    order = []

    def block(name, values):
        return lambda: order.append(name) or values[order.count(name) - 1]

    blocks = {"a": block("a", [9.0, 1.0, 10.0, 4.0]), "b": block("b", [9.0, 2.0, 5.0, 4.0])}
    row = take_turns("here", blocks, 3, lambda _: None)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert row["milliseconds"] == {"a": [1.0, 10.0, 4.0], "b": [2.0, 5.0, 4.0]}
    assert row["ratio"]["a"]["b"] == {"low": 0.75, "median": 1.0, "high": 1.5}


def test_a_limit_is_met_missed_or_said_not_to_be_measured():
    setup = replace(SETUP, quick=False, lightly=False)
    setting = limits.loader.SMALL_IMAGES
    row = {"setting": setting, "judged": True, "others_share": 0.5}
    row |= summary({"official": [60.0, 60.0], "hardmix": [10.0, 10.0]})
    small, files, photos = judge({"loader": [row]}, setup)
    assert [claim["met"] for claim in judge({"loader": [row]}, SETUP)] == [None] * 3
    assert files["note"] == "cannot be measured here"
    assert (small["measured"], small["met"], small["busy"]) == (6.0, True, True)
    assert (photos["met"], photos["note"]) == (None, "cannot be measured here")
    bf16, fp32 = judge({"end-to-end": []}, replace(setup, precisions=("fp32",)))
    assert bf16["note"] == setup.precision_reason
    assert fp32["note"] == "lightly is not installed"


def test_every_limit_is_about_something_that_a_whole_run_measures():
    whole = replace(
        SETUP, quick=False, rounds=15, precisions=("fp32", "bf16"), cores=2, lightly=True
    )
    for limit in LIMITS:
        settings = json.dumps([job.settings for job in suite.PLANS[limit.part](whole)])
        if limit.part not in ("start", "end-to-end"):  # these name their settings later
            assert json.dumps(limit.setting)[1:-1] in settings
        if limit.part not in ("start", "loader"):  # and these have one pair of variants each
            assert f'"{limit.variant}"' in settings
            assert f'"{limit.against}"' in settings


def test_many_processes_are_left_out_where_cores_are_fewer_and_this_is_said():
    one, two = replace(SETUP, cores=1), replace(SETUP, cores=2)
    assert growth.processes_jobs(one, 2) == []
    assert any("2 processes" in note for note in notes(one))
    (job,) = growth.processes_jobs(two, 2)
    assert job.settings["processes"] == [1, 2]
    assert not any("2 processes" in note for note in notes(two))


def test_a_job_that_is_refused_is_the_users_to_mend(monkeypatch):
    said = '{"refused": "no such thing"}\n'
    monkeypatch.setattr(jobs.sys, "executable", "/bin/echo")
    job = jobs.BenchJob(title="x", kind="loss", settings={}, turns=1)
    with pytest.raises(RuntimeError, match="no result"):
        jobs.run_job(job, lambda _: None)
    monkeypatch.setattr(jobs, "_message", lambda _: json.loads(said))
    with pytest.raises(InputError, match="no such thing"):
        jobs.run_job(job, lambda _: None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stepp"], ["'stepp'", "choose from step"]),
        (["--rounds", "1"], ["--rounds 1", "at least 2"]),
        (["--cifar", "nowhere"], ["--cifar nowhere", "generated images"]),
        (["--jpeg", "nowhere"], ["--jpeg nowhere"]),
        (["--out", "nowhere/bench.json"], ["--out nowhere/bench.json"]),
        (["--out", "bench.md"], ["--out bench.md", "use .json"]),
    ],
)
def test_bad_input_is_one_line(arguments, words, capfd):
    with pytest.raises(SystemExit) as ended:
        program.main(arguments)
    shown = capfd.readouterr().err
    assert ended.value.code == 2
    assert len(shown.strip().splitlines()) == 1
    assert all(word in shown for word in words)


@pytest.mark.parametrize(("option", "words"), [("cifar", "lacks a complete cifar10"), ("jpeg", "")])
def test_a_folder_without_the_images_is_refused_before_anything_is_measured(
    option, words, tmp_path, capfd
):
    with pytest.raises(SystemExit) as ended:
        program.main(["loss", "--quick", f"--{option}", str(tmp_path)])
    shown = capfd.readouterr()
    assert ended.value.code == 2
    assert "Part 1" not in shown.out
    assert str(tmp_path) in shown.err
    assert words in shown.err
