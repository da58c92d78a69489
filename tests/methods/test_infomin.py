"""InfoMin's jigsaw on MoCo: a second query for the same key, resumed, on two processes, refused."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from hardmix.data.loading import open_loader
from hardmix.data.views import ViewKind
from hardmix.errors import InputError, UnfinishedError
from hardmix.methods.base import Materials, build_method, method_class
from hardmix.runtime.device import choose_compute
from hardmix.settings.methods import jigsaw_sizes, method_title
from hardmix.settings.recipes import RECIPES
from hardmix.settings.saved import settings, with_settings
from hardmix.training.pretrain import pretrain
from method_cases import AT, batch_of, given_embeddings, slow_softmax, unit
from ranks import all_ranks, group_norm_trunk, signal_after, state_of, tiny


def infomin(weight=0.5, method="mochi", **more):
    """Two epochs of three steps, with points in the second one."""
    train = {"knn_every": 0, "log_every": 2, "precision": "fp32"}
    data = {"num_images": 48, "workers": 0, "augmentation": "infomin"}
    mix = {"num_hardest": 16, "num_pairs": 8, "num_with_query": 4, "warm_up_epochs": 1}
    groups = {"train": train, "data": data, "mix": mix, "loss": {"jigsaw": weight}}
    return tiny(method, **groups, **more)


def with_small_crops(**more):
    """With multi-crop as well (test_multi_crop.py)."""
    return with_settings(infomin(**more), {"data.small_crops": 2})


def built(config):
    torch.manual_seed(7)
    return build_method(config, Materials(choose_compute("cpu", "fp32"), num_images=48))


def test_sizes_are_the_published_ones_and_in_proportion():
    assert jigsaw_sizes(224) == (255, 64)
    assert jigsaw_sizes(32) == (36, 9)
    assert method_class("moco-v2").view_kinds(infomin()) == (
        ViewKind(2),
        ViewKind(1, 36, (0.6, 1.0), "plain"),
    )


@pytest.mark.parametrize("weight", [0.5, 0.25])
def test_the_loss_is_that_of_both_queries_by_their_weights(weight, monkeypatch):
    """PyContrast: (1 - beta) L(q, k) + beta L(q_jig, k), with the same keys and queue."""
    query, jigsaw = (unit(16, 128, seed=each).requires_grad_() for each in (1, 2))
    method = built(infomin(weight, "moco-v2"))
    given_embeddings(monkeypatch, method, (query.float(), jigsaw.float()))
    batch = batch_of(size=36, views=3)
    batch = batch._replace(views=(*(each[..., :32, :32] for each in batch.views[:2]), batch.key))
    outcome = method.loss(batch, AT)
    key, queue = outcome.key.double(), method.memory.keys.double()
    tau = method.config.train.temperature
    terms = [slow_softmax(each, key, queue, tau) for each in (query, jigsaw)]
    slow = (1 - weight) * terms[0] + weight * terms[1]
    torch.testing.assert_close(outcome.loss.double(), slow, rtol=1e-5, atol=1e-5)
    both = [torch.autograd.grad(each, [query, jigsaw]) for each in (outcome.loss, slow)]
    for ours, expected in zip(*both, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-6)
    assert method.describe([outcome])["jigsaw_loss"] == pytest.approx(terms[1].item(), rel=1e-4)


def test_without_a_weight_it_is_moco_and_with_one_views_and_weights_stay():
    """A pair of runs with and without: the same first views, and the same encoder at the start."""
    plain, with_tiles = built(infomin(0.0)), built(infomin())
    ours = with_tiles.pair.query.state_dict()
    for name, tensor in plain.pair.query.state_dict().items():
        assert torch.equal(tensor, ours[name])
    assert {name.split(".")[0] for name in ours} == {"trunk", "head", "tile_head", "join"}
    batches = []
    for config in (plain.config, with_tiles.config):
        kinds = method_class("mochi").view_kinds(config)
        _, loader = open_loader(config.data, config.train, torch.device("cpu"), kinds)
        batches.append(next(iter(loader.epoch(0))))
    assert len(batches[1].views) == 3
    for first, second in zip(*(each.views[:2] for each in batches), strict=True):
        assert torch.equal(first, second)


def test_a_resumed_run_is_the_unbroken_one(tmp_path, monkeypatch):
    pretrain(with_small_crops(), tmp_path / "unbroken")
    signal_after(monkeypatch, {5})
    with pytest.raises(UnfinishedError):
        pretrain(with_small_crops(), tmp_path / "run")
    pretrain(with_small_crops(), tmp_path / "run", resume=True)
    assert state_of(tmp_path / "run") == state_of(tmp_path / "unbroken")


def train_one(folder):
    pretrain(with_small_crops(model={"key_bn_splits": 2}), folder, trunk=group_norm_trunk())


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    for ranks in (1, 2):
        all_ranks(train_one, tmp_path / str(ranks), ranks=ranks)
    one, two = (
        load_file(sorted((tmp_path / name / "checkpoints").glob("*.safetensors"))[-1])
        for name in "12"
    )
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=5e-4)


def test_its_title_and_the_papers_row_say_so():
    config = with_settings(
        RECIPES["imagenet1k"].build("moco-v2", False),
        {"data.augmentation": "infomin", "loss.jigsaw": 0.5},
    )
    assert method_title(settings(config)) == "MoCo-v2 with InfoMin Aug. + jigsaw"


def test_it_is_refused_where_it_cannot_be():
    for name in ("simclr", "unmix", "co2", "instdis", "pirl", "pcl", "swav", "byol"):
        with pytest.raises(InputError, match=r"loss\.jigsaw=0\.5 with method=.*loss\.jigsaw to 0"):
            tiny(name, loss={"jigsaw": 0.5})
    with pytest.raises(InputError, match=r"data\.image_size=16.*20 pixels"):
        tiny("moco-v2", loss={"jigsaw": 0.5}, data={"image_size": 16})
    with pytest.raises(InputError, match=r"loss\.jigsaw=2"):
        dataclasses.replace(tiny("moco-v2").loss, jigsaw=2)
