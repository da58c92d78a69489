"""The seam for methods: tables that agree, and a method of a few lines that the loop trains."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hardmix.commands import main as cli
from hardmix.data.loading import open_loader
from hardmix.errors import InputError, UnfinishedError
from hardmix.methods.base import (
    Materials,
    Method,
    StepOutcome,
    TrainingPosition,
    build_method,
    method_class,
)
from hardmix.runs.folder import Run, read_config
from hardmix.runtime.device import choose_compute
from hardmix.settings.facts import setting
from hardmix.settings.methods import METHOD_FACTS, NO_NEGATIVES, MethodFacts, MethodOptions
from hardmix.settings.recipes import PRESETS, RECIPES
from hardmix.settings.saved import check_same_run, settings, to_json
from hardmix.training.optimizers import build_optimizer
from hardmix.training.pretrain import pretrain
from hardmix.training.step import compute_gradients
from ranks import group_norm_trunk, signal_after, state_of, tiny


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyOptions(MethodOptions):
    """Options of the toy method."""

    weight: float = 0.5
    """Weight of the place."""
    note_every: int = setting(1, resume=True, identity=False)
    """Steps between two notes."""


class Toy(Method):
    """Features of two views near each other, and near 1 and a little of what a bank remembers."""

    options: ToyOptions

    def __init__(self, config, materials):
        super().__init__(config, materials)
        self.trunk = materials.trunk or group_norm_trunk()
        self.register_buffer("bank", torch.zeros(32))

    def networks(self):
        return {"trunk": self.trunk}

    def loss(self, part, at):
        first, second = (self.network("trunk")(view) for view in (part.query, part.key))
        near = (first - second).square().mean()
        place = (first - 1 - 0.1 * self.bank).square().mean()
        return StepOutcome(near + self.options.weight * place)

    def after_step(self, batch, outcomes):
        with torch.no_grad():
            self.bank.lerp_(self.trunk(batch.query).mean(dim=0), 0.5)

    def replicated(self):
        return {"bank": self.bank}

    def describe(self, outcomes):
        return {"bank": float(self.bank.mean())}


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(sys.modules, "hardmix.methods.toys", SimpleNamespace(Toy=Toy))
    facts = MethodFacts("Toy", "toys.Toy", ToyOptions, unused=(*NO_NEGATIVES, "model.*"))
    monkeypatch.setitem(METHOD_FACTS, "toy", facts)


def test_every_method_has_a_class_facts_and_the_same_options():
    assert METHOD_FACTS.keys() >= PRESETS.keys()
    for name, facts in METHOD_FACTS.items():
        kind = method_class(name)
        assert issubclass(kind, Method)
        assert kind.__annotations__.get("options") is facts.options, name
        assert facts.title
    titles = [facts.title for facts in METHOD_FACTS.values()]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", ["moco-v1", "moco-v2", "mochi", "supervised"])
def test_a_method_keeps_a_trunk_that_is_part_of_its_networks(name):
    config = tiny(name)
    method = build_method(config, Materials(choose_compute("cpu"), num_classes=3))
    (network,) = method.networks().values()
    trained = {id(each) for group in method.parameter_groups() for each in group["params"]}
    assert {id(each) for each in method.trunk.parameters()} < trained
    assert trained == {id(each) for each in network.parameters()}
    assert (method.memory is not None) == config.uses("train.queue_size")
    assert set(method.replicated()) == (
        set()
        if method.memory is None
        else {f"queue's {each}" for each, _ in method.memory.named_buffers()}
    )


def test_a_method_of_ten_lines_trains_and_describes_itself(tmp_path):
    run = pretrain(tiny("toy"), tmp_path / "run")
    lines = [line for line in run.metrics() if "loss" in line]
    assert [line["step"] for line in lines] == [4, 6, 8, 12]
    assert all("bank" in line for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert run.config().options == ToyOptions()
    checkpoint = load_file(sorted(run.checkpoints.glob("*.safetensors"))[-1])
    assert checkpoint["objective.bank"].shape == (32,)
    assert not run.hardness_file.exists()  # it has no negatives
    assert any("knn" in line for line in run.metrics())


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 7])
def test_it_resumes_bit_equal_with_what_it_registered(step, tmp_path, monkeypatch):
    whole = state_of(pretrain(tiny("toy"), tmp_path / "whole").path)
    signal_after(monkeypatch, {step})
    with pytest.raises(UnfinishedError):
        pretrain(tiny("toy"), tmp_path / "run")
    pretrain(tiny("toy"), tmp_path / "run", resume=True)
    assert state_of(tmp_path / "run") == whole


def test_the_loop_accumulates_its_gradients():
    """If a loss is a mean over images, its parts' gradients add up to the whole batch's."""
    config = tiny("toy")
    _, loader = open_loader(config.data, config.train, torch.device("cpu"))
    batch = next(iter(loader.epoch(0)))
    gradients = []
    for parts in (1, 4):
        config = tiny("toy", train={"accumulate": parts})
        method = build_method(config, Materials(choose_compute("cpu", "fp32"))).train()
        outcomes = compute_gradients(method, batch, TrainingPosition(0, 0))
        assert len(outcomes) == parts
        assert not any(outcome.loss.requires_grad for outcome in outcomes)
        gradients.append([each.grad for each in method.trunk.parameters()])
    for whole, summed in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, summed, rtol=1e-4, atol=1e-7)


def test_a_method_may_scale_the_learning_rate_of_its_parts(tmp_path, monkeypatch):
    class TwoRates(Toy):
        def parameter_groups(self):
            first, *others = self.trunk.parameters()
            return [{"params": [first], "lr_factor": 0.0}, {"params": others}]

    monkeypatch.setattr(sys.modules["hardmix.methods.toys"], "Toy", TwoRates)
    before = next(group_norm_trunk().parameters()).clone()
    run = pretrain(tiny("toy"), tmp_path / "run")
    after = load_file(run.encoder_file)
    assert torch.equal(after["0.weight"], before)
    assert not torch.equal(
        after["3.weight"], dict(group_norm_trunk().named_parameters())["3.weight"]
    )
    optimizer = build_optimizer(
        [{"params": [nn.Parameter(before)], "lr_factor": 2.0}], tiny().optimizer
    )
    assert optimizer.param_groups[0]["lr_factor"] == 2.0


def test_its_options_are_settings_like_others(tmp_path):
    config = tiny("toy")
    changed = dataclasses.replace(config, options=ToyOptions(weight=2.0))
    assert settings(changed)["toy.weight"] == 2.0
    file = tmp_path / "config.json"
    file.write_bytes(to_json(changed))
    assert read_config(file) == changed
    with pytest.raises(InputError, match=r"toy\.weight cannot change from 0\.5 to 2\.0"):
        check_same_run(config, changed)
    check_same_run(config, dataclasses.replace(config, options=ToyOptions(note_every=9)))
    values = json.loads(file.read_text())
    values["options"]["wait"] = 1
    file.write_text(json.dumps(values))
    with pytest.raises(InputError, match="unknown setting 'wait'"):
        read_config(file)
    with pytest.raises(InputError, match="do not belong to the method mochi"):
        dataclasses.replace(config, method="mochi")


def test_its_options_are_on_the_command_line_by_its_name(tmp_path, capfd):
    small = "--data.num-images 48 --train.batch-size 16 --train.epochs 1 --train.knn-every 0"
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        cli.main(f"pretrain demo --method toy --toy.weight 3 --out {out} {small}".split())
    assert ended.value.code == 0, capfd.readouterr().err
    assert Run(out).config().options == ToyOptions(weight=3.0)
    capfd.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["pretrain", "demo", "--method", "toy", "--help"])
    shown = capfd.readouterr().out
    assert "--toy.weight" in shown
    assert "Weight of the place." in shown
    assert "--mix." not in shown
    assert "--model." not in shown


def test_moco_presets_differ_in_settings_alone():
    assert method_class("moco-v1") is method_class("moco-v2") is method_class("mochi")
    v2, mochi = (RECIPES["demo"].build(name, False) for name in ("moco-v2", "mochi"))
    assert dataclasses.replace(v2, method="mochi") == mochi
