"""The online probe: what it learns from, that it changes nothing, and that it resumes.

tests/methods/test_every_method.py trains it on two processes, too.
"""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import normalize

from gpu_events import gpu
from hardmix.data.image_set import ImageSet
from hardmix.data.loading import open_loader
from hardmix.errors import InputError, UnfinishedError
from hardmix.methods.base import Materials, TrainingPosition, build_method, method_class
from hardmix.report.page import write_report
from hardmix.runs.folder import Run
from hardmix.runtime.device import choose_compute
from hardmix.runtime.signals import StopRequest
from hardmix.settings.methods import METHOD_FACTS
from hardmix.training import setup
from hardmix.training.online_probe import OnlineProbe
from hardmix.training.pretrain import pretrain
from hardmix.training.state import settle
from hardmix.training.step import take_step
from ranks import signal_after, state_of, tensors_file, tiny
from small_methods import small

CPU = torch.device("cpu")


def probing(name="mochi", **train):
    return small(name, mixed=name == "mochi", train={"probe": True} | train)


def labelled_images(labels):
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, 256, (len(labels), 3, 32, 32), dtype=torch.uint8, generator=generator)
    return ImageSet("mine", torch.tensor(labels), tuple("abcd"), tensor=pixels)


def test_it_is_momentum_sgd_on_the_cross_entropy_of_labelled_images_only():
    probe = OnlineProbe(6, 3, CPU)
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.zeros(3, 6).double(), torch.zeros(3).double()
    speed = [torch.zeros(3, 6).double(), torch.zeros(3).double()]
    right = known = 0
    for _ in range(4):
        features = torch.randn(5, 6, generator=generator)
        labels = torch.tensor([0, -1, 2, 1, -1])
        probe._parts.extend([features[:2], features[2:]])  # two parts of a batch
        probe.learn(labels, torch.zeros(()))
        slopes = [torch.zeros(3, 6).double(), torch.zeros(3).double()]
        for row, label in zip(normalize(features.double(), dim=1), labels.tolist(), strict=True):
            if label >= 0:
                logits = weight @ row + bias
                error = logits.softmax(dim=0) - torch.eye(3).double()[label]
                slopes[0] += torch.outer(error, row) / 3
                slopes[1] += error / 3
                right, known = right + int(logits.argmax() == label), known + 1
        speed = [0.9 * old + new for old, new in zip(speed, slopes, strict=True)]
        weight, bias = weight - 2 * speed[0], bias - 2 * speed[1]
    torch.testing.assert_close(probe.tensors()["weight"].double(), weight, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(probe.tensors()["bias"].double(), bias, rtol=1e-4, atol=1e-6)
    assert float(probe.take_accuracy()) == pytest.approx(right / known)
    assert probe.take_accuracy().isnan()


def test_a_step_whose_gradients_are_broken_teaches_it_nothing():
    probe = OnlineProbe(6, 3, CPU)
    probe._parts.append(torch.full((4, 6), torch.nan))
    probe.learn(torch.tensor([0, 1, 2, 0]), torch.ones(()))
    assert all(not value.any() for value in probe.tensors().values())


@pytest.mark.parametrize("name", METHOD_FACTS)
def test_it_hears_the_features_of_the_first_views(name):
    """In evaluation mode, so that batch norm treats an image alike in any batch."""
    config = small(name)
    kinds = method_class(name).view_kinds(config)
    images, loader = open_loader(config.data, config.train, CPU, kinds)
    classes = len(images.classes)
    materials = Materials(choose_compute("cpu", "fp32"), None, None, 48, classes, images)
    method = build_method(config, materials)
    batch = next(iter(loader.epoch(0)))
    probe = OnlineProbe(256, classes, CPU)
    probe.listen_to(method.trunk)
    with probe.hears(batch.query), torch.no_grad():
        method.eval().loss(batch, TrainingPosition(0, 0))
    (heard,) = probe._parts
    torch.testing.assert_close(heard, method.trunk(batch.views[0]), rtol=1e-4, atol=1e-5)
    probe.close()
    assert not method.trunk._forward_hooks


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a probe, in two parts of a batch, and with a few images without a label."""
    labels = [-1 if index % 6 == 0 else index % 4 for index in range(48)]
    return pretrain(
        probing(accumulate=2), tmp_path_factory.mktemp("probe"), images=labelled_images(labels)
    )


def objective(run):
    tensors = load_file(tensors_file(run.checkpoints))
    return {name: each for name, each in tensors.items() if not name.startswith("probe.")}


def without_probe(run):
    return [
        {k: v for k, v in line.items() if "second" not in k and k != "probe_accuracy"}
        for line in run.metrics()
    ]


def test_encoder_optimizer_and_logs_are_those_of_a_run_without_it(run, tmp_path):
    config = run.config()
    plain = dataclasses.replace(config, train=dataclasses.replace(config.train, probe=False))
    labels = [-1 if index % 6 == 0 else index % 4 for index in range(48)]
    other = pretrain(plain, tmp_path / "run", images=labelled_images(labels))
    mine, theirs = objective(run), objective(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert without_probe(run) == without_probe(other)


def test_its_accuracy_is_in_the_metrics_and_has_a_curve(run, tmp_path):
    lines = [line for line in run.metrics() if "loss" in line]
    assert all(0 <= line["probe_accuracy"] <= 1 for line in lines)
    assert (
        "Accuracy of the online probe"
        in write_report([run.path], tmp_path / "page.html").read_text()
    )


def test_it_learns_what_the_features_tell(tmp_path):
    """Images of four brightnesses, whose colours stay: most are soon classified correctly."""
    labels = [index % 4 for index in range(48)]
    pixels = (torch.tensor(labels) * 80)[:, None, None, None].expand(48, 3, 32, 32).byte()
    images = ImageSet("grey", torch.tensor(labels), tuple("abcd"), tensor=pixels.contiguous())
    config = small(
        "moco-v2",
        data={"augmentation": "plain"},
        train={"probe": True, "epochs": 6, "verdict": False},
    )
    learnt = pretrain(config, tmp_path / "run", images=images)
    accuracies = [line["probe_accuracy"] for line in learnt.metrics() if "loss" in line]
    assert accuracies[0] < 0.5 < accuracies[-1]


def test_it_resumes_bit_for_bit_within_a_log_interval(tmp_path, monkeypatch):
    config = probing(log_every=3)
    whole = state_of(pretrain(config, tmp_path / "whole").path)
    signal_after(monkeypatch, {5})
    with pytest.raises(UnfinishedError):
        pretrain(config, tmp_path / "run")
    pretrain(config, tmp_path / "run", resume=True)
    assert state_of(tmp_path / "run") == whole


def test_it_may_be_turned_on_when_a_run_is_resumed(tmp_path):
    half = small("moco-v2", train={"stop_epoch": 1})
    pretrain(half, tmp_path / "run")
    pretrain(probing("moco-v2"), tmp_path / "run", resume=True)
    logged = ["probe_accuracy" in line for line in Run(tmp_path / "run").metrics()]
    assert logged[-1]
    assert not logged[0]


def test_it_waits_for_no_number_on_a_gpu(tmp_path):
    images = labelled_images([-1 if index % 3 == 0 else index % 4 for index in range(96)])
    train = {"device": "cuda", "precision": "fp32", "log_every": 1000, "probe": True}
    config = tiny("mochi", mix={"warm_up_epochs": 0}, train=train, data={"name": "own"})
    with gpu() as log:
        training = setup.prepare(config, Run(tmp_path), setup.Own(images=images), StopRequest())
        batches = training.loader.epoch(0)
        for _ in range(3):
            log.clear()
            take_step(training, next(batches), 0)
            training.step, training.position = training.step + 1, training.position + 1
        assert [entry.what for entry in log.synchronisations] == ["Event.synchronize"]
        assert (log.blocking_copies, log.mixed_devices) == ([], [])
        settle(training)
        assert training.probe.tensors()["weight"].held.any()


def test_it_is_refused_without_labels(tmp_path):
    images = labelled_images([-1] * 48)
    with pytest.raises(InputError, match="mine has no labels"):
        pretrain(probing("moco-v2"), tmp_path / "run", images=images)
    unlabelled = dataclasses.replace(images, labels=None, classes=None)
    with pytest.raises(InputError, match=r"train\.probe=True .* no labels"):
        pretrain(probing("moco-v2"), tmp_path / "run", images=unlabelled)
    assert not (tmp_path / "run").exists()
