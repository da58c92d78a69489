"""loss.filter=same-cluster: clusters of the images in place of labels, through the whole loop."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from hardmix.data.loading import open_loader
from hardmix.errors import InputError, UnfinishedError
from hardmix.methods.base import Materials, TrainingPosition, build_method, method_class
from hardmix.methods.clusters import ImageClusters
from hardmix.mixing.queue import UNKNOWN, MemoryQueue
from hardmix.runtime.device import choose_compute
from hardmix.training.pretrain import pretrain
from ranks import all_ranks, signal_after, state_of, tiny

FILTER = {"filter": "same-cluster", "clusters": 5}


def small(method="mochi", epochs=3, **more):
    """Three epochs of three steps: the clusters are made twice."""
    train = {"epochs": epochs, "knn_every": 0, "precision": "fp32", "log_every": 2}
    data = {"num_images": 48, "workers": 0}
    return tiny(method, loss=FILTER | more.pop("loss", {}), train=train, data=data, **more)


def newest(run):
    return load_file(sorted((run / "checkpoints").glob("*.safetensors"))[-1])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    run = tmp_path_factory.mktemp("clusters") / "run"
    pretrain(small(), run)
    return run


def test_the_mask_is_that_of_the_last_clusters_of_the_keys_images():
    config = small()
    compute = choose_compute("cpu", "fp32")
    clusters = ImageClusters(config, Materials(compute, num_images=6))
    memory = MemoryQueue(5, 4)
    memory.enqueue(torch.randn(4, 4), ids=torch.tensor([2, 0, 5, 1]))
    ids = torch.tensor([0, 3])
    assert not clusters.same_cluster(ids, memory).any()  # before the first clusters
    clusters.number.copy_(torch.tensor([1, 0, 1, 0, 1, UNKNOWN]))
    expected = [[True, True, False, False, False], [False, False, False, True, False]]
    assert clusters.same_cluster(ids, memory).tolist() == expected
    clusters.forget()
    assert not clusters.same_cluster(ids, memory).any()


def test_the_loss_of_a_step_leaves_the_cluster_out():
    config = small()
    method = build_method(config, Materials(choose_compute("cpu", "fp32"), num_images=48))
    _, loader = open_loader(
        config.data, config.train, torch.device("cpu"), method_class("mochi").view_kinds(config)
    )
    batch = next(iter(loader.epoch(0)))
    method.memory.enqueue(torch.randn(64, config.model.dim), ids=torch.arange(64) % 48)
    method.clusters.number.copy_(torch.arange(48) % 5)
    outcome = method.loss(batch, TrainingPosition(step=9, epoch=1))
    expected = batch.ids[:, None] % 5 == (torch.arange(64) % 48) % 5
    assert torch.equal(outcome.exclude, expected)
    assert not expected.gather(1, outcome.plan.base).any()


def test_every_image_has_a_cluster_of_the_last_epoch(unbroken):
    saved = newest(unbroken)
    numbers = saved["objective.clusters.number"]
    assert numbers.min() >= 0
    assert numbers.unique().numel() > 1
    assert int(saved["objective.clusters.epoch"]) == 2  # of epochs 0, 1, 2


@pytest.mark.parametrize("step", [{5}, {6}])
def test_a_resumed_run_is_the_unbroken_one(step, unbroken, tmp_path, monkeypatch):
    """It may stop within an epoch, whose clusters are not made again, or between two."""
    signal_after(monkeypatch, step)
    with pytest.raises(UnfinishedError):
        pretrain(small(), tmp_path / "run")
    pretrain(small(), tmp_path / "run", resume=True)
    assert state_of(tmp_path / "run") == state_of(unbroken)


def train_and_resume(config, folder):
    pretrain(config, folder / "whole")
    half = dataclasses.replace(config, train=dataclasses.replace(config.train, stop_epoch=1))
    pretrain(half, folder / "resumed")
    pretrain(config, folder / "resumed", resume=True)


def test_two_processes_cluster_once_and_resume_bit_equal(tmp_path):
    all_ranks(train_and_resume, small(epochs=2, model={"key_bn_splits": 2}), tmp_path)
    assert state_of(tmp_path / "whole") == state_of(tmp_path / "resumed")
    assert newest(tmp_path / "whole")["objective.clusters.number"].min() >= 0


def test_without_it_nothing_is_saved(tmp_path):
    config = small(loss={"filter": "none"})
    method = build_method(config, Materials(choose_compute("cpu", "fp32"), num_images=6))
    assert not [name for name in method.state_dict() if "clusters" in name]


def test_what_cannot_be_is_refused_in_words():
    with pytest.raises(InputError, match=r"same-cluster with method=simclr.*share-of-positive"):
        small("simclr")
    with pytest.raises(InputError, match=r"loss.clusters=1 "):
        small(loss={"clusters": 1})
    compute = choose_compute("cpu", "fp32")
    with pytest.raises(InputError, match=r"loss.clusters=5 exceeds the 4 images"):
        ImageClusters(small(), Materials(compute, num_images=4))
    with pytest.raises(InputError, match=r"shards are a stream"):
        ImageClusters(small(), Materials(compute))
