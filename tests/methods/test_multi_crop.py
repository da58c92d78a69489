"""Multi-crop on MoCo and MoCHi: small crops are further queries for the image's key.

tests/methods/test_infomin.py resumes such a run, and trains it on two processes.
"""

import dataclasses

import pytest
import torch

from gpu_events import gpu
from hardmix.data.image_set import ImageSet
from hardmix.data.loading import open_loader
from hardmix.data.views import ViewKind
from hardmix.errors import InputError
from hardmix.methods.base import Materials, build_method, method_class
from hardmix.runs.folder import Run
from hardmix.runtime.device import choose_compute
from hardmix.runtime.signals import StopRequest
from hardmix.settings.methods import METHOD_FACTS, small_crop_size
from hardmix.settings.saved import with_settings
from hardmix.training import setup
from hardmix.training.pretrain import pretrain
from hardmix.training.step import take_step
from method_cases import AT, batch_of, given_embeddings, slow_softmax, unit
from ranks import tiny
from small_methods import small


def cropped(number=3, method="mochi", **more):
    return small(method, mixed=method == "mochi", data={"small_crops": number}, **more)


def built(config):
    torch.manual_seed(7)
    return build_method(config, Materials(choose_compute("cpu", "fp32"), num_images=48))


def batch_in(config):
    kinds = method_class(config.method).view_kinds(config)
    _, loader = open_loader(config.data, config.train, torch.device("cpu"), kinds)
    return next(iter(loader.epoch(0)))


def test_small_crops_are_swavs_in_proportion_and_come_last():
    assert (small_crop_size(224), small_crop_size(32)) == (96, 14)
    config = cropped(6, loss={"jigsaw": 0.5})
    kinds = method_class("mochi").view_kinds(config)
    assert kinds[0] == ViewKind(2)
    assert kinds[-1] == ViewKind(6, 14, (0.05, 0.14))
    assert [view.shape[-1] for view in batch_in(config).views] == [32, 32, 36] + 6 * [14]


def test_the_loss_is_that_of_the_query_plus_the_mean_of_the_small_ones(monkeypatch):
    query, *crops = (unit(16, 128, seed=each).requires_grad_() for each in range(1, 5))
    method = built(cropped(3, "moco-v2"))
    given_embeddings(monkeypatch, method, query.float(), torch.cat(crops).float())
    outcome = method.loss(batch_of(views=5), AT)
    key, queue = outcome.key.double(), method.memory.keys.double()
    tau = method.config.train.temperature
    terms = [slow_softmax(each, key, queue, tau) for each in crops]
    slow = slow_softmax(query, key, queue, tau) + sum(terms) / 3
    torch.testing.assert_close(outcome.loss.double(), slow, rtol=1e-5, atol=1e-5)
    both = [torch.autograd.grad(each, [query, *crops]) for each in (outcome.loss, slow)]
    for ours, expected in zip(*both, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-6)
    small_loss = method.describe([outcome])["small_loss"]
    assert small_loss == pytest.approx(float(sum(terms).detach()) / 3, rel=1e-4)


def test_every_small_crop_has_points_of_its_own(monkeypatch):
    method = built(cropped(2))
    plans, compare = [], method.compare

    def watched(*arguments, **options):
        outcome = compare(*arguments, **options)
        plans.append(outcome.plan)
        return outcome

    monkeypatch.setattr(method, "compare", watched)
    method.loss(batch_in(method.config), AT)
    assert [plan.base.shape for plan in plans] == 3 * [(16, 12)]
    assert not torch.equal(plans[1].share, plans[2].share)


def test_the_key_and_the_first_views_do_not_depend_on_them():
    with_crops, without = (built(cropped(number)) for number in (2, 0))
    batches = [batch_in(method.config) for method in (with_crops, without)]
    assert [len(batch.views) for batch in batches] == [4, 2]
    for one, other in zip(*(batch.views[:2] for batch in batches), strict=True):
        assert torch.equal(one, other)
    keys = [
        method.loss(batch, AT).key
        for method, batch in zip((with_crops, without), batches, strict=True)
    ]
    assert torch.equal(*keys)


def test_nothing_waits_for_a_gpu(tmp_path):
    pixels = torch.randint(0, 256, (96, 3, 40, 36), dtype=torch.uint8)
    images = ImageSet("x", torch.arange(96) % 5, tuple("abcde"), tensor=pixels)
    train = {"device": "cuda", "precision": "fp32", "log_every": 1000}
    data = {"name": "own", "small_crops": 2}
    config = tiny("mochi", mix={"warm_up_epochs": 0}, train=train, data=data)
    with gpu() as log:
        training = setup.prepare(config, Run(tmp_path), setup.Own(images=images), StopRequest())
        batches = training.loader.epoch(0)
        for _ in range(3):
            log.clear()
            take_step(training, next(batches), 0)
            training.step, training.position = training.step + 1, training.position + 1
        assert [entry.what for entry in log.synchronisations] == ["Event.synchronize"]
        assert (log.blocking_copies, log.mixed_devices) == ([], [])


def test_they_are_refused_where_they_cannot_be(tmp_path):
    for name in METHOD_FACTS.keys() - {"moco-v1", "moco-v2", "mochi"}:
        with pytest.raises(InputError, match=rf"data\.small_crops=2 with method={name}: only MoCo"):
            with_settings(small(name), {"data.small_crops": 2})
    with pytest.raises(InputError, match=r"data\.small_crops=-1"):
        dataclasses.replace(tiny("moco-v2").data, small_crops=-1)

    class OneSize(torch.nn.Module):
        def forward(self, images):
            assert images.shape[-1] == 32, "images of 32 pixels only"
            return images.mean(dim=(2, 3))

    with pytest.raises(InputError, match="images of 32 pixels only"):
        pretrain(cropped(2, "moco-v2"), tmp_path / "run", trunk=OneSize())
