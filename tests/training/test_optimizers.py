"""Optimizers by name: their formulas, their learning rate, their groups, and their whole state."""

import dataclasses
import hashlib
import json
import math
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hardmix.errors import InputError, UnfinishedError
from hardmix.models.encoders import build_encoder
from hardmix.runs.checkpoints import optimizer_tensors, restore_optimizer
from hardmix.runs.folder import Run
from hardmix.settings.config import ModelConfig, OptimizerConfig
from hardmix.settings.named_choices import OptimizerName
from hardmix.training.optimizers import (
    OPTIMIZERS,
    TRUST,
    build_optimizer,
    clip_gradients,
    parameters_of,
    set_learning_rate,
)
from hardmix.training.pretrain import pretrain
from ranks import all_ranks, manifest_of, signal_after, state_of, tensors_file, tiny

pytestmark = pytest.mark.slow

NAMES = list(get_args(OptimizerName))


def test_every_name_has_an_optimizer():
    assert list(OPTIMIZERS) == NAMES


def layers(seed=0):
    """Return a weight, a bias, a layer of zeros and one whose gradient is 0."""
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator)
    return [weight, bias, torch.zeros(2, 2), torch.randn(2, 2, generator=generator)]


def gradients_of(step, shapes):
    generator = torch.Generator().manual_seed(100 + step)
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [*found[:3], torch.zeros_like(found[3])]


def by_hand(name, start, config, rates, *, plain=()):
    """Return the update computed slowly in float64; `plain` layers are not decayed."""
    weights = [each.double().clone() for each in start]
    first = [torch.zeros_like(each) for each in weights]
    second = [torch.zeros_like(each) for each in weights]
    for step, lr in enumerate(rates):
        for n, slope in enumerate(gradients_of(step, [each.shape for each in weights])):
            decay = 0.0 if n in plain else config.weight_decay
            w = weights[n]
            if name == "adamw":  # Loshchilov and Hutter (2019), Algorithm 2
                beta1, beta2 = config.betas
                first[n] = beta1 * first[n] + (1 - beta1) * slope
                second[n] = beta2 * second[n] + (1 - beta2) * slope**2
                mean = first[n] / (1 - beta1 ** (step + 1))
                square = second[n] / (1 - beta2 ** (step + 1))
                weights[n] = w - lr * (mean / (square.sqrt() + 1e-8) + decay * w)
                continue
            local = 1.0
            length, steep = math.sqrt((w**2).sum()), math.sqrt(((slope + decay * w) ** 2).sum())
            if name == "lars" and n not in plain and length > 0 and steep > 0:
                local = TRUST * length / steep  # SimCLR's lars_optimizer.py
            first[n] = config.momentum * first[n] + local * (slope + decay * w)
            weights[n] = w - lr * first[n]
    return weights


@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_follows_its_formula(name, weight_decay, decay_all):
    config = OptimizerConfig(
        name=name,
        lr=0.5,
        momentum=0.8,
        betas=(0.7, 0.9),
        weight_decay=weight_decay,
        decay_all=decay_all,
    )
    start, rates = layers(), [0.5, 0.4, 0.1, 0.3]
    parameters = [nn.Parameter(each.clone()) for each in start]
    optimizer = build_optimizer([{"params": parameters}], config)
    for step, lr in enumerate(rates):
        slopes = gradients_of(step, [each.shape for each in start])
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.grad = slope.float()
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    expected = by_hand(name, start, config, rates, plain=() if decay_all else (1,))
    for parameter, right in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().double(), right, rtol=1e-5, atol=1e-6)


def test_a_layers_step_by_lars_is_in_proportion_to_its_weights():
    moved = []
    for scale in (1.0, 10.0):
        parameter = nn.Parameter(scale * layers()[0])
        before = parameter.detach().clone()
        config = OptimizerConfig(name="lars", lr=1.0, weight_decay=0.0)
        optimizer = build_optimizer([{"params": [parameter]}], config)
        parameter.grad = 1e3 * torch.ones_like(parameter)
        optimizer.step()
        moved.append(float((parameter.detach() - before).norm() / before.norm()))
    assert moved == pytest.approx([TRUST] * 2, rel=1e-3)


def test_norms_and_biases_alone_are_not_decayed():
    encoder = build_encoder(ModelConfig(backbone="small", dim=16), image_size=32)
    names = {id(parameter): name for name, parameter in encoder.named_parameters()}
    norms = {
        f"{name}.{each}"
        for name, layer in encoder.named_modules()
        if isinstance(layer, nn.BatchNorm2d)
        for each in ("weight", "bias")
    }
    biases = {name for name in names.values() if name.endswith("bias")}
    config = OptimizerConfig(weight_decay=0.1, decay_all=False)
    groups = [{"params": list(encoder.parameters()), "lr_factor": 3.0}]
    decayed, plain = build_optimizer(groups, config).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {names[id(each)] for each in plain["params"]} == norms | biases
    assert {names[id(each)] for each in decayed["params"]} == set(names.values()) - norms - biases
    assert decayed["lr_factor"] == plain["lr_factor"] == 3.0
    (all_of_them,) = build_optimizer(
        groups, dataclasses.replace(config, decay_all=True)
    ).param_groups
    assert all_of_them["weight_decay"] == 0.1
    assert len(all_of_them["params"]) == len(names)


def rates_of(optimizer_options, epochs=6, steps=4):
    config = tiny(train={"epochs": epochs}, optimizer=optimizer_options)
    optimizer = build_optimizer([{"params": [nn.Parameter(torch.ones(2))]}], config.optimizer)
    found = []
    for epoch in range(epochs):
        for step in range(steps):
            set_learning_rate(optimizer, config, epoch, step / steps)
            found.append(optimizer.param_groups[0]["lr"])
    return found


def test_the_learning_rate_rises_step_by_step_and_then_follows_its_schedule():
    found = rates_of({"lr": 0.8, "warm_up_epochs": 2, "schedule": "cosine"})
    assert found[:9] == pytest.approx([0.8 * step / 8 for step in range(9)])
    after = [0.8 * 0.5 * (1 + math.cos(math.pi * (epoch - 2) / 4)) for epoch in range(2, 6)]
    assert found[8::4] == pytest.approx(after)
    assert found[8:] == [rate for rate in found[8::4] for _ in range(4)]  # once an epoch
    assert max(found) == pytest.approx(0.8)
    stairs = rates_of({"lr": 0.8, "warm_up_epochs": 1.5, "schedule": "step", "milestones": (3, 5)})
    assert stairs[:6] == pytest.approx([0.8 * step / 6 for step in range(6)])
    assert stairs[6::4] == pytest.approx([0.8, 0.8, 0.08, 0.08, 0.008])


def test_without_a_warm_up_the_rate_is_official_mocos():
    cosine = [0.8 * 0.5 * (1 + math.cos(math.pi * epoch / 6)) for epoch in range(6)]
    assert rates_of({"lr": 0.8, "schedule": "cosine"})[::4] == cosine


def test_gradients_are_clipped_together_and_only_where_they_are_longer():
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    for limit, factor in [(1.0, 0.2), (10.0, 1.0), (None, 1.0)]:
        for parameter, length in zip(parameters, (3.0, 4.0), strict=True):
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[0] = length
        clip_gradients(parameters, OptimizerConfig(clip=limit))
        clipped = [float(parameter.grad[0]) for parameter in parameters]
        assert clipped == pytest.approx([3.0 * factor, 4.0 * factor], rel=1e-5)


def test_a_clipped_run_moves_no_further_than_the_limit_allows(tmp_path):
    train = {"epochs": 1, "knn_every": 0, "precision": "fp32"}
    options = {"momentum": 0.0, "weight_decay": 0.0, "lr": 0.5, "clip": 1e-3}
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8))
    before = trunk[1].weight.detach().clone()
    pretrain(tiny("moco-v2", train=train, optimizer=options), tmp_path / "run", trunk=trunk)
    moved = float((trunk[1].weight.detach() - before).norm())
    assert 0 < moved <= 6 * 0.5 * 1e-3 * 1.001  # of six steps


@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_it_goes_on_as_if_never_stopped(name, decay_all):
    def fresh():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4))
        model.to(memory_format=torch.channels_last)
        config = OptimizerConfig(name=name, lr=0.1, decay_all=decay_all)
        return model, build_optimizer([{"params": list(model.parameters())}], config)

    def steps(model, optimizer, numbers):
        for number in numbers:
            images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            model(images).pow(3).sum().backward()
            optimizer.step()

    whole = fresh()
    steps(*whole, range(5))
    stopped, again = fresh(), fresh()
    steps(*stopped, range(2))
    again[0].load_state_dict(stopped[0].state_dict())
    saved = {key: value.contiguous() for key, value in optimizer_tensors(stopped[1]).items()}
    restore_optimizer(again[1], saved)
    steps(*again, range(2, 5))
    for right, found in zip(whole[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(right, found)
    held = {key.partition(".")[2] for key in saved}
    assert held == ({"step", "exp_avg", "exp_avg_sq"} if name == "adamw" else {"momentum_buffer"})
    assert len(saved) == len(held) * len(parameters_of(whole[1]))


def short(train=None, **more):
    """Two epochs of three steps."""
    train = {"knn_every": 0, **(train or {})}
    return tiny(data={"num_images": 48}, train=train, **more)


@pytest.mark.parametrize("name", ["lars", "adamw"])
def test_a_run_resumed_in_the_middle_ends_with_the_same_bits(name, tmp_path, monkeypatch):
    """SGD is tested in tests/training/test_resume.py."""
    options = {"name": name, "lr": 0.01, "decay_all": False, "clip": 5.0, "warm_up_epochs": 1.5}
    whole = pretrain(short(optimizer=options), tmp_path / "whole")
    signal_after(monkeypatch, {4})
    with pytest.raises(UnfinishedError):
        pretrain(short(optimizer=options), tmp_path / "half")
    pretrain(short(optimizer=options), tmp_path / "half", resume=True)
    assert state_of(tmp_path / "half") == state_of(whole.path)
    with pytest.raises(InputError, match=rf"optimizer\.name cannot change from {name} to sgd"):
        pretrain(short(), tmp_path / "half", resume=True)


def pretrain_with_adamw(run, **train):
    options = {"name": "adamw", "lr": 0.01, "decay_all": False}
    pretrain(short(optimizer=options, train=train), run, resume="auto")


def stop_after_an_epoch(run):
    pretrain_with_adamw(run, stop_epoch=1)


def test_every_process_gets_the_whole_state_back(tmp_path):
    """Rank 0 reads the checkpoint and sends moments and steps to the other."""
    all_ranks(pretrain_with_adamw, tmp_path / "whole")
    all_ranks(stop_after_an_epoch, tmp_path / "half")
    all_ranks(pretrain_with_adamw, tmp_path / "half")
    assert state_of(tmp_path / "half") == state_of(tmp_path / "whole")


def as_of_before(run: Run) -> None:
    """Rewrite the newest checkpoint as versions with SGD alone did: numbers without names.

    The file of its tensors has the name of its step alone.
    """
    new = tensors_file(run.checkpoints)
    manifest = manifest_of(run.checkpoints)
    tensors = {
        name.removesuffix(".momentum_buffer") if name.startswith("optimizer.") else name: tensor
        for name, tensor in load_file(new).items()
    }
    assert any(name.removeprefix("optimizer.").isdecimal() for name in tensors)
    weights = run.checkpoints / f"step-{manifest['step']:08d}.safetensors"
    save_file(tensors, weights)
    new.unlink()
    manifest |= {"format": 2, "file": weights.name}
    manifest["sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    later = ("name", "betas", "decay_all", "clip", "warm_up_epochs")
    values = json.loads(run.config_file.read_text())
    for config in (values, manifest["config"]):
        config["optimizer"] = {k: v for k, v in config["optimizer"].items() if k not in later}
        del config["data"]["views"], config["train"]["wandb"], config["options"]
    run.config_file.write_text(json.dumps(values))
    facts = {name: value for name, value in manifest.items() if name != "checksum"}
    checksum = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    weights.with_suffix(".json").write_text(json.dumps({**facts, "checksum": checksum}))


def test_a_checkpoint_of_before_with_sgds_momentum_alone_still_loads(tmp_path):
    whole = pretrain(short(), tmp_path / "whole")
    half = pretrain(short(train={"stop_epoch": 1}), tmp_path / "half")
    as_of_before(half)
    pretrain(short(), half.path, resume=True)
    assert state_of(half.path) == state_of(whole.path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"betas": (0.9,)}, ["optimizer.betas=(0.9,)", "two numbers"]),
        ({"betas": (0.9, 1.0)}, ["optimizer.betas=(0.9, 1.0)"]),
        ({"clip": 0.0}, ["optimizer.clip=0.0", "above 0"]),
        ({"warm_up_epochs": -1.0}, ["optimizer.warm_up_epochs=-1.0"]),
        ({"momentum": 1.5}, ["optimizer.momentum=1.5"]),
    ],
)
def test_a_bad_option_is_refused_by_name(options, words):
    with pytest.raises(InputError) as refusal:
        OptimizerConfig(**options)
    assert all(word in str(refusal.value) for word in words)
