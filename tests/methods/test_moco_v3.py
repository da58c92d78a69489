"""MoCo v3 against the published rule in float64, and its presets.

tests/methods/test_every_method.py trains, resumes and exports it, also on two processes.
"""

import dataclasses

import pytest
import torch
from torch import nn

import moco_v3_reference as published
from hardmix.commands import main as cli
from hardmix.data.views import ViewKind
from hardmix.methods.base import Materials, TrainingPosition, build_method, method_class
from hardmix.methods.moco_v3 import patch_projection
from hardmix.runs.folder import Run
from hardmix.runtime.device import choose_compute
from hardmix.settings.recipes import RECIPES, for_backbone
from method_cases import AT, batch_of, given_embeddings, unit
from small_methods import small

VIT = "timm:vit_tiny_patch16_224?img_size=32&patch_size=8&depth=1&embed_dim=48&num_heads=2"


def built(**more):
    torch.manual_seed(7)
    config = small("moco-v3", **more)
    return build_method(config, Materials(choose_compute("cpu", "fp32"), num_images=48))


def test_the_loss_and_its_gradient_are_the_published_ones(monkeypatch):
    queries = [unit(16, 128, seed=each).requires_grad_() for each in (1, 2)]
    method, batch = built(train={"temperature": 0.3}), batch_of()
    with torch.no_grad():
        keys = [nn.functional.normalize(method.key(view).double()) for view in batch.views]
    method = built(train={"temperature": 0.3})  # batch norm has moved
    given_embeddings(monkeypatch, method, *(query.float() for query in queries))
    outcome = method.loss(batch, AT)
    slow = published.symmetric_loss(*queries, *keys, 0.3)
    torch.testing.assert_close(outcome.loss.double(), slow, rtol=1e-5, atol=1e-6)
    both = [torch.autograd.grad(each, queries) for each in (outcome.loss, slow)]
    for ours, expected in zip(*both, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-7)
    assert method.describe([outcome])["false_negatives_top"] >= 0


def test_keys_follow_by_a_momentum_that_rises_to_one():
    for progress in (0.0, 0.25, 1.0):
        method = built(model={"key_momentum": 0.9})
        trained = [*method.query.trunk.parameters(), *method.query.projector.parameters()]
        followers = list(method.key.parameters())
        assert all(torch.equal(*pair) for pair in zip(followers, trained, strict=True))
        with torch.no_grad():
            for parameter in trained:
                parameter.add_(torch.randn_like(parameter))
        before = [each.double() for each in followers]
        method.begin_step(TrainingPosition(3, 1, progress=progress))
        m = published.momentum(0.9, progress)
        for old, new, query in zip(before, followers, trained, strict=True):
            expected = m * old + (1 - m) * query.double()
            torch.testing.assert_close(new.double(), expected, rtol=1e-5, atol=1e-6)
            assert not new.requires_grad


@pytest.mark.parametrize("backbone", ["small", VIT])
def test_heads_are_those_of_the_authors_for_each_kind_of_trunk(backbone):
    pytest.importorskip("timm", reason="needs pip install 'hardmix[timm]'")
    method, vit = built(model={"backbone": backbone}), backbone == VIT
    query, images = method.query.double(), batch_of().views[0].double()
    weights = [
        [layer.weight for layer in head if isinstance(layer, nn.Linear)]
        for head in (query.projector, query.predictor)
    ]
    width = query.trunk(images).shape[1]
    shapes = [[tuple(weight.shape) for weight in head] for head in weights]
    first, last = (64, width), (128, 64)
    assert shapes == [[first, (64, 64), last] if vit else [first, last], [(64, 128), last]]
    assert not [name for name, _ in query.projector.named_parameters() if name == "0.bias"]
    expected = published.queries(query.trunk.eval()(images), *weights, vit)
    torch.testing.assert_close(query(images), expected.float(), rtol=1e-4, atol=1e-5)


def test_points_are_made_of_other_images_keys_only():
    method = built(mixed=True)
    outcome = method.loss(batch_of(), AT)
    assert outcome.plan.base.shape == (16, 12)
    for row, parents in enumerate(torch.cat([outcome.plan.base, outcome.plan.partner], dim=1)):
        assert row not in parents.tolist()
    assert 0 < method.describe([outcome])["synthetic_mass"] < 1


def test_a_transformers_patches_keep_their_random_weights(tmp_path, capfd):
    pytest.importorskip("timm", reason="needs pip install 'hardmix[timm]'")
    words = f"pretrain demo --method moco-v3 --model.backbone {VIT} --out {tmp_path / 'run'}"
    words += " --data.num-images 32 --train.batch-size 16 --train.epochs 1 --train.knn-every 0"
    words += " --moco-v3.hidden 32 --train.no-verdict --train.device cpu"
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 0, capfd.readouterr().err
    run = Run(tmp_path / "run")
    config = run.config()
    assert (config.optimizer.name, config.optimizer.weight_decay) == ("adamw", 0.1)
    torch.manual_seed(0)
    frozen, free = (
        build_method(
            dataclasses.replace(
                config, options=dataclasses.replace(config.options, freeze_patches=freeze)
            ),
            Materials(choose_compute("cpu", "fp32")),
        )
        for freeze in (True, False)
    )
    trained = run.load_checkpoint().tensors
    key, query = (
        trained[f"objective.{name}.patch_embed.proj.weight"] for name in ("key.0", "query.trunk")
    )
    assert torch.equal(key, query)  # neither of both has moved
    blocks = [
        trained[f"objective.{name}.blocks.0.mlp.fc1.weight"] for name in ("key.0", "query.trunk")
    ]
    assert not torch.equal(*blocks)
    assert not patch_projection(frozen.trunk).weight.requires_grad
    assert patch_projection(free.trunk).weight.requires_grad
    assert patch_projection(built().trunk) is None


def test_presets_are_the_authors():
    resnet = RECIPES["imagenet1k"].build("moco-v3", False)
    assert (resnet.optimizer.name, resnet.optimizer.lr) == ("lars", pytest.approx(0.6 * 16))
    assert (resnet.optimizer.weight_decay, resnet.optimizer.warm_up_epochs) == (1e-6, 10)
    assert (resnet.train.batch_size, resnet.train.temperature, resnet.data.min_scale) == (
        4096,
        1,
        0.2,
    )
    assert method_class("moco-v3").view_kinds(resnet) == (
        ViewKind(),
        ViewKind(augmentation="byol-second"),
    )
    assert (resnet.model.dim, resnet.model.key_momentum, resnet.options.hidden) == (256, 0.99, 4096)
    vit = for_backbone(resnet, "timm:vit_small_patch16_224")
    assert (vit.optimizer.name, vit.optimizer.lr) == ("adamw", pytest.approx(1.5e-4 * 16))
    assert (vit.optimizer.weight_decay, vit.optimizer.warm_up_epochs) == (0.1, 40)
    assert (vit.train.temperature, vit.data.min_scale) == (0.2, 0.08)
    assert vit.model.backbone == "timm:vit_small_patch16_224"
    mochi = RECIPES["imagenet1k"].build("mochi", False)
    assert for_backbone(mochi, "resnet18").optimizer == mochi.optimizer


def test_syncos_points_join_too():
    config = small("moco-v3", mixed=True)
    counts = {"num_extrapolated": 4, "num_noisy": 2, "num_perturbed": 2, "num_adversarial": 2}
    mix = dataclasses.replace(config.mix, strategy="synco", **counts)
    method = build_method(
        dataclasses.replace(config, mix=mix), Materials(choose_compute("cpu", "fp32"))
    )
    outcome = method.loss(batch_of(), AT)
    assert outcome.contrast.synthetic.shape == (16, 8 + 4 + 4 + 2 + 2 + 2)
    outcome.loss.backward()
