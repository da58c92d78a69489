"""Every method through the whole loop: resumed, on two processes, evaluated, exported."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from hardmix.analysis.gallery import look_at_queue
from hardmix.commands import main as cli
from hardmix.data.loading import open_loader
from hardmix.errors import InputError, UnfinishedError
from hardmix.evaluation.trained_encoder import load_encoder
from hardmix.methods.base import Materials, TrainingPosition, build_method, method_class
from hardmix.report.page import write_report
from hardmix.runs.folder import Run
from hardmix.runtime.device import choose_compute
from hardmix.settings.methods import METHOD_FACTS, method_title
from hardmix.settings.recipes import RECIPES
from hardmix.settings.saved import settings
from hardmix.training.optimizers import build_optimizer
from hardmix.training.pretrain import pretrain
from hardmix.training.step import compute_gradients
from ranks import all_ranks, group_norm_trunk, lines_of, signal_after, state_of, tiny
from small_methods import small

pytestmark = pytest.mark.slow

OTHERS = [
    name for name in METHOD_FACTS if name not in ("moco-v1", "moco-v2", "mochi", "supervised")
]
MIXED = [name for name in OTHERS if not METHOD_FACTS[name].no_mixing]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run of every method, with points where it can have them."""
    folder = tmp_path_factory.mktemp("methods")
    for name in OTHERS:
        pretrain(small(name, mixed=name in MIXED), folder / name)
    return folder


@pytest.mark.parametrize("name", METHOD_FACTS)
def test_every_recipe_has_it_and_its_title_says_what_is_mixed(name):
    for recipe in RECIPES.values():
        config = recipe.build(name, False)
        assert config.method == name
        assert config.mixes == (name == "mochi")
    config = small(name, mixed=True) if name in MIXED else tiny(name)
    title = method_title(settings(config))
    assert title.startswith(METHOD_FACTS[name].title)
    points = f"MoCHi ({config.mix.num_hardest}, 8, 4)"
    assert (points in title) == (name in (*MIXED, "mochi"))


@pytest.mark.parametrize("name", OTHERS)
def test_a_trunk_is_part_of_the_networks_and_the_rest_is_replicated_or_follows(name):
    method = build_method(small(name), Materials(choose_compute("cpu", "fp32"), num_images=48))
    trained = {id(each) for group in method.parameter_groups() for each in group["params"]}
    assert {id(each) for each in method.trunk.parameters()} < trained
    assert trained == {id(p) for net in method.networks().values() for p in net.parameters()}
    assert (method.memory is not None) == method.config.uses("train.queue_size")
    inside = {id(each) for net in method.networks().values() for each in net.buffers()}
    following = {"pair.key", "target", "key.", "encoder.trunk.to_lab"}
    outside = {
        id(each): name
        for name, each in method.named_buffers()
        if id(each) not in inside and not any(name.startswith(each) for each in following)
    }
    replicated = {id(each) for each in method.replicated().values()}
    assert [name for each, name in outside.items() if each not in replicated] in ([], ["clustered"])


@pytest.mark.parametrize("name", OTHERS)
def test_steps_on_one_batch_lower_its_loss(name):
    config = small(name)
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, name="sgd", lr=0.02)
    )
    kinds = method_class(name).view_kinds(config)
    images, loader = open_loader(config.data, config.train, torch.device("cpu"), kinds)
    materials = Materials(choose_compute("cpu", "fp32"), num_images=48, images=images)
    method = build_method(config, materials).train()
    method.begin_epoch(1)
    batch = next(iter(loader.epoch(0)))
    assert len(batch.views) == sum(kind.number for kind in kinds)
    optimizer = build_optimizer(method.parameter_groups(), config.optimizer)
    losses = []
    for _ in range(8):  # the same step again: queue, bank and draws stay
        optimizer.zero_grad()
        (outcome,) = compute_gradients(method, batch, TrainingPosition(3, 1))
        losses.append(float(outcome.loss))
        optimizer.step()
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize("name", OTHERS)
def test_a_resumed_run_is_the_unbroken_one(name, runs, tmp_path, monkeypatch):
    """Bank, prototypes and queues included: stopped within the second epoch."""
    signal_after(monkeypatch, {5})
    config = small(name, mixed=name in MIXED)
    with pytest.raises(UnfinishedError):
        pretrain(config, tmp_path / "run")
    pretrain(config, tmp_path / "run", resume=True)
    assert state_of(tmp_path / "run") == state_of(runs / name)


TOGETHER = [name for name in OTHERS if name not in ("cmc", "pcl")]
"""Methods that take a trunk without batch norm, and round alike on any number of processes."""


def shared(name):
    """SGD at a low rate: LARS at 2.0 would make rounding visible after six steps."""
    sgd = {"name": "sgd", "lr": 0.03, "warm_up_epochs": 0}
    model, train = {"key_bn_splits": 2}, {"probe": True}
    return small(name, mixed=name in MIXED, model=model, optimizer=sgd, train=train)


def train_all(folder):
    for name in OTHERS:
        config = shared(name)
        whole = {} if name == "cmc" else {"trunk": group_norm_trunk()}
        pretrain(config, folder / name, **whole)


def train_and_resume(folder):
    train_all(folder)
    for name in OTHERS:
        config = shared(name)
        trunk = None if name == "cmc" else group_norm_trunk
        half = dataclasses.replace(config, train=dataclasses.replace(config.train, stop_epoch=1))
        pretrain(half, folder / f"{name}-resumed", trunk=trunk and trunk())
        pretrain(config, folder / f"{name}-resumed", trunk=trunk and trunk(), resume=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    all_ranks(train_and_resume, folder)
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    all_ranks(train_all, folder, ranks=1)
    return folder


def newest(run):
    return load_file(sorted((run / "checkpoints").glob("*.safetensors"))[-1])


@pytest.mark.parametrize("name", TOGETHER)
def test_two_processes_train_as_one_does(name, one, two):
    """Batch norm of heads is that of all processes; trunks here have none."""
    alone, both = newest(one / name), newest(two / name)
    assert alone.keys() == both.keys()
    for tensor in alone:
        torch.testing.assert_close(
            alone[tensor], both[tensor], rtol=0, atol=5e-4, msg=f"{tensor} differs"
        )
    for first, second in zip(lines_of(one / name), lines_of(two / name), strict=True):
        assert first == pytest.approx(second, abs=1e-3)


@pytest.mark.parametrize("name", OTHERS)
def test_two_processes_resume_bit_equal(name, two):
    assert state_of(two / name) == state_of(two / f"{name}-resumed")


def test_pcl_repeats_with_faiss(tmp_path):
    pytest.importorskip("faiss", reason="needs pip install 'hardmix[faiss]'")
    config = small("pcl")
    config = dataclasses.replace(
        config, options=dataclasses.replace(config.options, kmeans="faiss")
    )
    for name in ("one", "two"):
        pretrain(config, tmp_path / name)
    assert state_of(tmp_path / "one") == state_of(tmp_path / "two")


@pytest.mark.parametrize("name", OTHERS)
def test_it_is_evaluated_and_exported_like_any_other(name, runs, tmp_path, capfd):
    run = runs / name
    for words in (
        f"knn {run} --data.num-images 48",
        f"features {run} --out {tmp_path / 'features.npy'}",
        f"export {run} --format safetensors --out {tmp_path / 'encoder.safetensors'}",
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(words.split())
        assert ended.value.code == 0, capfd.readouterr().err
    assert 0 <= json.loads((Run(run).results / "knn.json").read_text())["top1"] <= 1
    images = torch.randn(2, 3, 32, 32)
    assert load_encoder(run)(images).shape == (2, 256)
    if Run(run).config().uses("train.queue_size"):
        figures, _ = look_at_queue(Run(run))
        assert len(figures) == 1


def test_one_report_shows_them_all(runs, tmp_path):
    page = write_report([runs / name for name in OTHERS], tmp_path / "report.html").read_text()
    for name in OTHERS:
        assert METHOD_FACTS[name].title in page


@pytest.mark.parametrize("name", ["swav", "byol"])
def test_mixing_is_refused_where_there_are_no_negatives(name, tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        cli.main(["pretrain", "demo", "--method", name, "--mix.num-pairs", "8", "--out", "x"])
    assert ended.value.code == 2
    words = " ".join(capfd.readouterr().err.split())
    assert "--mix.num-pairs" in words
    assert "no negatives to mix" in words
    with pytest.raises(InputError, match="no negatives to mix"):
        pretrain(tiny(name), tmp_path / "run", strategy=lambda _: None)


def test_settings_that_a_method_cannot_have_are_refused(tmp_path):
    for name in ("simclr", "swav"):
        with pytest.raises(
            InputError, match=r"train\.accumulate=2 with method=.*train\.accumulate to 1"
        ):
            small(name, train={"accumulate": 2})
    with pytest.raises(InputError, match=r"num_hardest=99 exceeds the 30 other views"):
        tiny("simclr", mix={"num_hardest": 99})
    with pytest.raises(InputError, match=r"num_hardest=16 exceeds the 15 other views"):
        tiny("moco-v3")
    with pytest.raises(InputError, match="mixed-with-key"):
        tiny("cmc")
    with pytest.raises(InputError, match="lab-resnet50 or lab-small"):
        pretrain(small("cmc", model={"backbone": "small"}), tmp_path / "cmc")
    for name in ("instdis", "pcl"):
        with pytest.raises(InputError, match="stream without numbers"):
            build_method(small(name), Materials(choose_compute("cpu")))
    options = dataclasses.replace(small("pcl").options, clusters=(4, 64))
    with pytest.raises(InputError, match="exceeds the 48 images"):
        pretrain(dataclasses.replace(small("pcl"), options=options), tmp_path / "pcl")
    with pytest.raises(InputError, match=r"pirl\.tile_size=20 exceeds a third"):
        dataclasses.replace(small("pirl").options, tile_size=20)
