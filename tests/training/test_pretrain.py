"""Pre-training end to end, on tiny real data."""

import dataclasses
import json
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import ranks
from hardmix.commands import main as cli
from hardmix.data.loading import open_loader
from hardmix.errors import InputError
from hardmix.methods.base import Materials, Method, TrainingPosition, build_method
from hardmix.methods.mixing_schedule import MixingSchedule, choose_strategy
from hardmix.mixing.strategies import plan_points
from hardmix.runs.folder import Run
from hardmix.runtime.console import Meter
from hardmix.runtime.device import choose_compute
from hardmix.runtime.signals import StopRequest
from hardmix.settings.config import MixConfig, PretrainConfig
from hardmix.settings.recipes import RECIPES
from hardmix.training import step as training_step
from hardmix.training.pretrain import pretrain, start
from hardmix.training.setup import Own, prepare
from hardmix.training.step import compute_gradients

pytestmark = pytest.mark.slow


def tiny(method="mochi", oracle=False, *, train=None, **more) -> PretrainConfig:
    return ranks.tiny(method, oracle, train={"log_every": 2} | (train or {}), **more)


@pytest.fixture
def folder(tmp_path):
    """Twelve small photographs of noise in two class folders."""
    for index in range(12):
        file = tmp_path / "images" / f"class{index % 2}" / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 255, (40, 50, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(file)
    return tmp_path / "images"


@pytest.mark.parametrize("method", ["moco-v1", "moco-v2", "mochi", "supervised"])
def test_every_method_trains_and_writes_its_run(method, tmp_path):
    run = pretrain(tiny(method), tmp_path / "run")
    lines = run.metrics()
    assert {"config.json", "metrics.jsonl", "checkpoints", "encoder.safetensors"} <= {
        file.name for file in run.path.iterdir()
    }
    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6, 8, 10, 12]
    assert all(math.isfinite(line["loss"]) for line in lines if "loss" in line)
    assert 0 <= lines[-1]["knn"] <= 1
    assert json.loads((run.results / "pretrain.json").read_text())["steps"] == 12


def test_mixing_starts_after_its_warm_up(tmp_path):
    lines = pretrain(tiny("mochi"), tmp_path / "run").metrics()
    mixed = {line["epoch"]: "synthetic_one_false" in line for line in lines if "loss" in line}
    assert mixed == {0: False, 1: True}


def test_a_saved_config_runs_again_to_the_same_losses(tmp_path):
    first = pretrain(tiny(), tmp_path / "a")
    second = pretrain(first.config(), tmp_path / "b")

    def without_speed(run: Run) -> list[dict]:
        return [{k: v for k, v in line.items() if "second" not in k} for line in run.metrics()]

    assert without_speed(first) == without_speed(second)
    weights = [load_file(run.encoder_file) for run in (first, second)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_another_seed_is_another_run(tmp_path):
    losses = [
        pretrain(tiny(train={"seed": seed}), tmp_path / str(seed)).metrics()[0]["loss"]
        for seed in (0, 1)
    ]
    assert losses[0] != losses[1]


def test_a_stopped_run_resumed_ends_as_the_unbroken_one(tmp_path):
    whole = pretrain(tiny(), tmp_path / "whole")
    half = tiny(train={"stop_epoch": 1})
    pretrain(half, tmp_path / "half")
    resumed = pretrain(tiny(), tmp_path / "half", resume=True)
    weights = [load_file(run.encoder_file) for run in (whole, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert whole.metrics()[-2]["loss"] == resumed.metrics()[-2]["loss"]


def test_more_epochs_make_the_learning_rate_jump_back_up(tmp_path):
    def rates(run: Run) -> dict[int, float]:
        return {line["epoch"]: line["lr"] for line in run.metrics() if "lr" in line}

    before = rates(pretrain(tiny(), tmp_path / "run"))
    longer = tiny(train={"epochs": 8, "stop_epoch": 3})
    after = rates(pretrain(longer, tmp_path / "run", resume=True))
    assert after[1] == before[1] < before[0]
    assert after[2] > before[1]


def moco(**more) -> tuple[Method, list]:
    config = tiny(**more)
    method = build_method(config, Materials(choose_compute("cpu"))).train()
    _, loader = open_loader(config.data, config.train, torch.device("cpu"))
    return method, list(loader.epoch(0))


def test_key_encoder_starts_bit_equal_and_never_gets_gradients():
    method, batches = moco()
    query, key = method.pair.query.state_dict(), method.pair.key.state_dict()
    assert all(torch.equal(query[name], key[name]) for name in query)
    compute_gradients(method, batches[0], TrainingPosition(0, 0))
    assert all(parameter.grad is None for parameter in method.pair.key.parameters())
    (group,) = method.parameter_groups()
    assert all(parameter.grad is not None for parameter in group["params"])


def test_the_queue_is_read_before_it_is_written():
    method, batches = moco(train={"exclude_same_image": False})
    for step, batch in enumerate(batches[:3]):
        outcomes = compute_gradients(method, batch, TrainingPosition(step, 0))
        assert int(method.memory.filled) == 16 * step
        own = torch.cat([outcome.key for outcome in outcomes])
        assert not torch.isclose(method.memory.keys @ own.T, torch.ones(())).any()
        assert outcomes[-1].contrast.real.shape == (16, 64)
        method.after_step(batch, outcomes)
        slots = slice(16 * step, 16 * step + 16)
        assert torch.equal(method.memory.ids[slots], batch.ids)
        assert torch.equal(method.memory.labels[slots], batch.labels)


def test_the_oracle_excludes_the_querys_class_and_the_same_image_mask_the_image():
    method, batches = moco(oracle=True, train={"exclude_same_image": True})
    method.memory.enqueue(torch.randn(64, 128), torch.arange(64) % 12, torch.arange(64))
    exclude = method._exclude(batches[0])
    for row, (label, image) in enumerate(zip(batches[0].labels, batches[0].ids, strict=True)):
        same = (method.memory.labels == label) | (method.memory.ids == image)
        assert torch.equal(exclude[row], same)


def test_a_step_is_described_by_the_queue_it_saw_not_by_the_one_it_wrote():
    method, batches = moco(train={"exclude_same_image": False})
    method.memory.enqueue(torch.randn(64, 128), torch.arange(64) % 12, torch.arange(64))
    outcomes = compute_gradients(method, batches[0], TrainingPosition(50, 5))
    described, hardness = method.describe(outcomes), method.hardness(outcomes)
    method.after_step(batches[0], outcomes)
    method.memory.labels.fill_(int(batches[0].labels[0]))
    assert method.describe(outcomes) == described
    assert method.hardness(outcomes) == hardness


def test_with_the_oracle_no_synthetic_point_has_a_false_parent(tmp_path):
    run = pretrain(tiny(oracle=True, mix={"warm_up_epochs": 0}), tmp_path / "run")
    lines = [line for line in run.metrics() if "synthetic_one_false" in line]
    assert len(lines) > 2
    names = ("synthetic_one_false", "synthetic_both_false", "synthetic_query_false")
    assert {line[name] for line in lines for name in names} == {0.0}
    assert any(line["false_negatives_top"] > 0 for line in lines)


def test_accumulated_gradients_have_the_same_shape_and_enqueue_every_key():
    method, batches = moco(train={"accumulate": 4}, model={"key_bn_splits": 2})
    outcomes = compute_gradients(method, batches[0], TrainingPosition(0, 0))
    assert len(outcomes) == 4
    method.after_step(batches[0], outcomes)
    assert int(method.memory.filled) == 16


def test_prefill_fills_the_queue_before_the_first_step(tmp_path):
    config = tiny(train={"queue_start": "prefill"})
    training = prepare(config, Run(tmp_path / "run"), Own(), StopRequest())
    start(training, resume=False)
    assert training.method.memory.unfilled() is None


def test_strategies_get_their_own_options():
    mix = dataclasses.replace(tiny().mix, strategy="fixed-percentage", percentage=80.0)
    falling = choose_strategy(dataclasses.replace(mix, percentage_end=0.0)).strategy
    fixed = choose_strategy(mix).strategy
    assert fixed.keywords == {"percentage": 80.0, "percentage_end": None}
    assert falling.keywords == {"percentage": 80.0, "percentage_end": 0.0}
    softmax = dataclasses.replace(mix, strategy="softmax-sampled", sampling_temperature=0.5)
    assert choose_strategy(softmax).strategy.keywords == {"sampling_temperature": 0.5}


def test_a_percentage_changes_with_the_epochs():
    mix = MixConfig(
        num_hardest=16,
        num_pairs=40,
        num_with_query=20,
        strategy="fixed-percentage",
        percentage=80.0,
        percentage_end=0.0,
    )
    falling = MixingSchedule(tiny(mix=dataclasses.asdict(mix), train={"epochs": 10}))
    query, key, negatives = torch.randn(4, 8), torch.randn(4, 8), torch.randn(60, 8)

    def number_of_points(loss, **options):
        generator = torch.Generator().manual_seed(3)
        _, plan = loss.contrast(query, key, negatives, generator=generator, **options)
        return (plan.base >= 0).sum(dim=1).tolist()

    for epoch, percentage in ((0, 80.0), (5, 40.0), (10, 0.0), (20, 0.0)):
        constant = dataclasses.replace(mix, percentage=percentage, percentage_end=None)
        schedule = MixingSchedule(tiny(mix=dataclasses.asdict(constant)))
        expected = number_of_points(schedule.loss)
        assert number_of_points(falling.loss, progress=falling.progress(epoch)) == expected
        assert (sum(expected) > 0) == (percentage > 0)


@pytest.mark.parametrize("recipe", ["imagenet100", "imagenet1k"])
def test_the_papers_recipes_take_real_steps_on_a_small_imagenet(recipe, tmp_path, capfd):
    from hardmix.data.imagenet100 import SYNSETS

    names = [*SYNSETS, "n00000001"] if recipe == "imagenet100" else SYNSETS[:4]
    for number, synset in enumerate(names):
        for split in ("train", "val"):
            file = tmp_path / "imagenet" / split / synset / "0.jpg"
            file.parent.mkdir(parents=True)
            Image.new("RGB", (70, 60), (number, 100, 200)).save(file)
    config = RECIPES[recipe].build("mochi", False)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(
            config.data,
            root=str(tmp_path / "imagenet"),
            image_size=64,
            workers=0,
            num_images=4,
        ),
        mix=dataclasses.replace(config.mix, num_hardest=4, num_pairs=4, warm_up_epochs=0),
        train=dataclasses.replace(
            config.train, batch_size=2, queue_size=8, epochs=1, knn_every=0, device="cpu"
        ),
        model=dataclasses.replace(config.model, key_bn_splits=1),
    )
    run = pretrain(config, tmp_path / "run")
    assert run.metrics()[-1]["step"] == 2
    said = "the paper's 100 classes" in capfd.readouterr().out
    assert said == (recipe == "imagenet100")
    import torchvision

    model = torchvision.models.resnet50()
    missing, unexpected = model.load_state_dict(load_file(run.encoder_file), strict=False)
    assert set(missing) == {"fc.weight", "fc.bias"}
    assert not unexpected


def test_a_users_own_trunk_is_trained(tmp_path):
    trunk = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 24))
    before = trunk[1].weight.clone()
    run = pretrain(tiny("moco-v2"), tmp_path / "run", trunk=trunk)
    assert set(load_file(run.encoder_file)) == {"1.weight", "1.bias"}
    assert not torch.equal(trunk[1].weight, before)


def command(capfd, *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as done:
        cli.main([str(word) for word in arguments])
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    return done.value.code or 0, shown.out + shown.err


SMALL_RUN = ["--train.batch-size", "4", "--train.queue-size", "8", "--mix.num-hardest", "4"]
SMALL_RUN += ["--mix.num-pairs", "4", "--mix.num-with-query", "2", "--train.epochs", "1"]
SMALL_RUN += ["--data.workers", "0", "--train.log-every", "1", "--model.key-bn-splits", "2"]


def test_a_folder_of_images_becomes_an_encoder(folder, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    where = ["--data.root", folder, "--out", tmp_path / "run"]
    code, shown = command(capfd, "pretrain", "demo", *where, *SMALL_RUN)
    assert code == 0
    assert "encoder.safetensors" in shown
    assert "hardmix explore" in shown
    code, shown = command(
        capfd, "pretrain", "--config", where[-1] / "config.json", "--out", "my run"
    )
    assert [line for line in shown.splitlines() if line.startswith("  hardmix")]
    assert all("'my run'" in line for line in shown.splitlines() if line.startswith("  hardmix"))
    code, shown = command(capfd, "pretrain", "demo", *where, *SMALL_RUN)
    assert code == 2
    assert "already contains a run" in shown
    code, shown = command(
        capfd, "pretrain", "--out", tmp_path / "run", "--resume", "--train.epochs", "2"
    )
    assert code == 0
    assert "Resuming from step 3" in shown
    code, shown = command(capfd, "pretrain", "cifar10", "--out", tmp_path / "run", "--resume")
    assert code == 2
    assert "started from the recipe 'demo', not 'cifar10'" in shown
    config = tmp_path / "run" / "config.json"
    code, _ = command(capfd, "pretrain", "--config", config, "--out", tmp_path / "again")
    assert code == 0


def test_a_corrupt_image_is_skipped_named_and_counted(folder, tmp_path, capfd):
    (folder / "class0" / "2.png").write_bytes(b"<html>not an image</html>")
    where = ["--data.name", "folder", "--data.root", folder, "--out", tmp_path / "run"]
    code, shown = command(capfd, "pretrain", "demo", *where, *SMALL_RUN, "--train.knn-every", "0")
    assert code == 0
    assert "Skipped 1 unreadable" in shown
    assert "2.png" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pretrain"], ["needs a recipe", "imagenet100"]),
        (["pretrain", "cifar"], ["no recipe 'cifar'", "choose one of cifar10"]),
        (["pretrain", "demo", "--method", "simcrl"], ["no method 'simcrl'", "simclr"]),
        (["pretrain", "demo", "--out", "OUT", "--mix.num-hardest", "99999"], ["99999", "2048"]),
        (["pretrain", "demo", "--out", "OUT", "--data.root", "/no/such"], ["/no/such"]),
        (
            ["pretrain", "demo", "--out", "OUT", "--model.backbone", "resnet5"],
            ["resnet5", "resnet50"],
        ),
        (["pretrain", "demo", "--out", "OUT", "--data.name", "cifr"], ["cifr", "cifar10"]),
        (["pretrain", "demo", "--out", "OUT", "--train.batch-size", "99996"], ["99996", "10000"]),
        (["pretrain", "demo", "--out", "OUT", "--data.num-images", "1"], ["1"]),
        (["pretrain", "--config", "/no/file.json", "--out", "OUT"], ["/no/file.json"]),
        (["pretrain", "--out", "OUT", "--resume"], ["config.json"]),
        (
            ["pretrain", "demo", "--recipe", "imagenet100", "--out", "OUT"],
            ["--recipe is not an option", "hardmix pretrain demo --out RUN"],
        ),
        (["knn", "/no/run"], ["/no/run", "not a run"]),
        (["imagenet100", "--imagenet", "/no/such", "--out", "OUT"], ["/no/such"]),
    ],
)
def test_bad_input_is_one_message_status_2_and_no_folder(arguments, words, tmp_path, capfd):
    out = tmp_path / "out"
    code, shown = command(capfd, *[str(out) if word == "OUT" else word for word in arguments])
    assert code == 2
    assert all(word in shown for word in words)
    assert not out.exists()


@pytest.mark.parametrize("kind", ["empty", "one"])
def test_a_folder_with_too_few_images_is_refused(kind, tmp_path, capfd):
    root = tmp_path / "images"
    root.mkdir()
    if kind == "one":
        Image.new("RGB", (40, 40)).save(root / "a.png")
    code, shown = command(
        capfd,
        "pretrain",
        "demo",
        "--data.name",
        "folder",
        "--data.root",
        root,
        "--out",
        tmp_path / "r",
    )
    assert code == 2
    assert str(root) in shown


def test_labels_are_needed_where_they_are_used(tmp_path):
    for index in range(4):
        Image.new("RGB", (40, 40), (index, 0, 0)).save(tmp_path / f"{index}.png")
    data = {"name": "folder", "root": str(tmp_path), "num_images": None, "workers": 0}
    train = {"batch_size": 2, "queue_size": 64}
    for options in ({"oracle": True}, {"method": "supervised"}):
        with pytest.raises(InputError, match="have no labels"):
            pretrain(
                tiny(**options, data=data, train=train, model={"key_bn_splits": 2}),
                tmp_path / "run",
            )


def test_recipes_are_listed_with_place_and_number(capfd):
    code, shown = command(capfd, "recipes")
    assert code == 0
    for word in ("imagenet100", "Table 1", "79.0", "imagenet1k", "Table 2", "cifar10", "demo"):
        assert word in shown


def test_the_demo_in_a_reduced_form(tmp_path, capfd):
    code, shown = command(
        capfd,
        "demo",
        "--out",
        tmp_path / "demo",
        "--epochs",
        "1",
        "--data.num-images",
        "512",
    )
    assert code == 0
    for word in ("raw pixels", "untrained encoder", "moco-v2", "mochi", "k-NN", "linear probe"):
        assert word in shown
    scores = json.loads((tmp_path / "demo" / "demo.json").read_text())["scores"]
    assert all(0 < score["knn"] <= 1 for score in scores.values())
    page = (tmp_path / "demo" / "report.html").read_text()
    assert all(f">{100 * scores[name]['knn']:.1f}<" in page for name in scores)
    places = [page.index(f'id="{each}"') for each in ("neighbours", "map", "results", "gallery")]
    assert places == sorted(places)
    assert page.count('class="plane"') == 2  # a map of each run
    assert str(tmp_path / "demo" / "report.html") in shown


def test_tensorboard_holds_what_metrics_jsonl_holds(tmp_path):
    loaded = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = pretrain(tiny(train={"tensorboard": True}), tmp_path / "run")
    events = loaded.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    for name in ("loss", "proxy_accuracy", "knn"):
        shown = [(each.step, each.value) for each in events.Scalars(name)]
        logged = [(line["step"], line[name]) for line in run.metrics() if name in line]
        assert [step for step, _ in shown] == [step for step, _ in logged]
        assert [value for _, value in shown] == pytest.approx([value for _, value in logged])


@pytest.mark.parametrize(("channels", "ending"), [(1, "npy"), (5, "npy"), (16, "npy"), (5, "tif")])
def test_images_of_other_channels_become_an_encoder(channels, ending, tmp_path, capfd):
    root = tmp_path / "images"
    root.mkdir()
    generator = torch.Generator().manual_seed(0)
    for index in range(12):
        pixels = torch.randint(0, 60000, (40, 50, channels), generator=generator).numpy()
        if ending == "npy":
            np.save(root / f"{index}.npy", pixels.astype(np.uint16))
        else:
            frames = [Image.fromarray(pixels[..., c].astype(np.uint16)) for c in range(channels)]
            frames[0].save(root / f"{index}.tif", save_all=True, append_images=frames[1:])
    where = ["--data.root", root, "--data.channels", channels, "--out", tmp_path / "run"]
    code, shown = command(capfd, "pretrain", "demo", *where, *SMALL_RUN)
    assert code == 0, shown
    weights = load_file(tmp_path / "run" / "encoder.safetensors")
    assert weights["conv1.weight"].shape[1] == channels


def test_hardness_is_recorded_at_a_few_epochs_and_repeats_after_a_resume(tmp_path):
    whole = pretrain(tiny(), tmp_path / "whole").hardness()
    assert [line["epoch"] for line in whole] == [-1, 0, 1]
    first = whole.pop(0)
    assert first.keys() == {"step", "epoch", "matching_probability"}
    assert first["step"] == 0
    assert len(first["matching_probability"]) == 4
    for line in whole:
        assert sum(line["positive"]) == 16
        assert sum(line["hardest"]) == 16 * 16
        probability = line["matching_probability"]
        assert len(probability) == 4  # a sixteenth of the queue
        assert probability == sorted(probability, reverse=True)
    assert "pairs" not in whole[0]  # warm-up
    assert sum(whole[1]["pairs"]) == 16 * 8
    assert sum(whole[1]["with_query"]) == 16 * 4
    pretrain(tiny(train={"stop_epoch": 1}), tmp_path / "stopped")
    resumed = pretrain(tiny(), tmp_path / "stopped", resume=True).hardness()
    assert resumed == [first, *whole]


def test_the_proxy_accuracy_is_that_of_every_step_and_fig_2a_of_a_sample(tmp_path, monkeypatch):
    """With a line for every step, the mean of the lines is what one line for all says."""

    def run(name, every):
        found = pretrain(tiny(train={"log_every": every, "epochs": 1}), tmp_path / name)
        return [line for line in found.metrics() if "loss" in line], found.hardness()

    (lines, every), (once, sample) = run("each", 1), run("once", 100)
    for key in ("proxy_accuracy", "proxy_accuracy_mixed"):
        mean = sum(line[key] for line in lines) / len(lines)
        assert [line[key] for line in once] == [pytest.approx(mean)]
    assert sample == every
    monkeypatch.setattr(training_step, "SAMPLED_STEPS", 1)  # the first step alone
    _, first = run("first", 100)
    assert first[1]["matching_probability"] == first[0]["matching_probability"]
    assert first[1]["matching_probability"] != sample[1]["matching_probability"]
    assert first[0] == sample[0]


def test_a_strategy_of_ones_own_plans_the_points_and_is_recorded(tmp_path, capfd):
    seen, progress = [], []

    def mine(candidates):
        seen.append(candidates.similarity.shape)
        progress.append(float(candidates.progress))
        return plan_points(candidates)

    run = pretrain(tiny(), tmp_path / "run", strategy=mine)
    assert seen == [(16, 64)] * 6  # the second epoch: the first is warm-up
    assert progress == [0.5] * 6  # one of two epochs is done
    assert run.config().mix.strategy == "own"
    with pytest.raises(InputError, match=r"mix\.strategy=own is a function .* pass it again"):
        pretrain(run.config(), run.path, resume=True)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["pretrain", "demo", "--mix.strategy", "own", "--out", str(tmp_path / "other")])
    assert stopped.value.code == 2
    assert "pass it again" in capfd.readouterr().err
    assert not (tmp_path / "other").exists()


def rank_weights(logits, exclude):
    """Return the log of 1 / rank: the hardest negative counts most."""
    rank = logits.real.argsort(dim=1, descending=True).argsort(dim=1) + 1
    return -rank.to(logits.real.dtype).log()


def decoupled_loss(masses):
    return masses.negatives - masses.key


def most_similar(logits):
    return logits.real == logits.real.amax(dim=1, keepdim=True)


OWN_PARTS = {
    "weights": ("weights", rank_weights),
    "denominator": ("denominator", decoupled_loss),
    "filter_negatives": ("filter", most_similar),
}


@pytest.mark.parametrize("argument", OWN_PARTS)
def test_a_part_of_the_loss_of_ones_own_is_used_and_recorded(argument, tmp_path, capfd):
    setting, part = OWN_PARTS[argument]
    calls = []

    def mine(*arguments):
        calls.append(arguments)
        return part(*arguments)

    usual = pretrain(tiny(), tmp_path / "usual")
    run = pretrain(tiny(), tmp_path / "run", **{argument: mine})
    assert len(calls) == 12  # every step of both epochs
    losses = [[line["loss"] for line in each.metrics() if "loss" in line] for each in (usual, run)]
    assert losses[0] != losses[1]
    assert all(math.isfinite(each) for each in losses[1])
    assert getattr(run.config().loss, setting) == "own"
    assert run.config().mix == usual.config().mix
    with pytest.raises(InputError) as refused:
        pretrain(run.config(), run.path, resume=True)
    message = str(refused.value)
    assert f"loss.{setting}=own is a function" in message
    assert f"pass it again, as pretrain(..., {argument}=...)" in message
    flags = ["pretrain", "demo", f"--loss.{setting}", "own", "--out", str(tmp_path / "other")]
    code, shown = command(capfd, *flags)
    assert code == 2
    assert "pass it again" in shown
    assert not (tmp_path / "other").exists()


def test_parts_of_ones_own_resume_to_the_same_run(tmp_path):
    own = {argument: part for argument, (_, part) in OWN_PARTS.items()}
    whole = pretrain(tiny(), tmp_path / "whole", **own)
    pretrain(tiny(train={"stop_epoch": 1}), tmp_path / "parts", **own)
    parts = pretrain(tiny(), tmp_path / "parts", resume=True, **own)
    first, second = (load_file(run.encoder_file) for run in (whole, parts))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_progress_bar_moves_at_every_step(tmp_path, monkeypatch):
    done = []

    class Recorder(Meter):
        def __init__(self):
            pass

        def advance(self, done_: int, *_):
            done.append(done_)

    @contextmanager
    def record(*_):
        yield Recorder()

    monkeypatch.setattr("hardmix.training.pretrain.progress", record)
    pretrain(tiny(train={"epochs": 1, "log_every": 50, "verdict": False}), tmp_path / "run")
    assert done == [1, 2, 3, 4, 5, 6]


def test_a_queue_of_more_than_a_fifth_of_the_images_is_warned_of(tmp_path, capfd):
    for size, warned in ((19, False), (20, True)):
        config = tiny(train={"queue_size": size})
        prepare(config, Run(tmp_path / str(size)), Own(), StopRequest())
        said = capfd.readouterr().err
        assert (f"train.queue_size={size} is more than a fifth of the 96 images" in said) == warned
        assert ("lower train.queue_size to 19 or less" in said) == warned
