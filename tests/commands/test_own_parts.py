"""Strategies, parts of the loss and evaluations by name, 'mypackage:function', and who may ask."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

import hardmix
from hardmix.commands import main as cli
from hardmix.errors import InputError, UnnamedCodeError
from hardmix.runtime.own_code import allowing
from hardmix.settings.saved import with_settings
from ranks import tiny

pytestmark = pytest.mark.slow

PARTS = """
import hardmix
import torch

def halves(candidates):
    plan = hardmix.strategies.plan_points(candidates)
    return plan._replace(share=torch.full_like(plan.share, 0.5))

def twice(logits, exclude):
    return torch.full_like(logits.real, 0.7)

def without_key(masses):
    return masses.negatives - masses.key

def nearly_the_same(logits):
    return logits.real * logits.temperature > 0.5

def centroids(evaluated):
    train, labels, test, test_labels = evaluated.split_features(evaluated.encoder)
    means = torch.stack([train[labels == label].mean(dim=0) for label in labels.unique()])
    return hardmix.accuracy_of(-torch.cdist(test, means), test_labels)

def knn(evaluated):
    return centroids(evaluated)

def number(evaluated):
    return 0.5
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """The module in the folder where commands are started."""
    (tmp_path / "my_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    sys.modules.pop("my_parts", None)


SHORT = {"train": {"epochs": 1}, "mix": {"warm_up_epochs": 0}}


@pytest.mark.parametrize(
    ("setting", "function", "argument"),
    [
        ("mix.strategy", "halves", "strategy"),
        ("loss.weights", "twice", "weights"),
        ("loss.denominator", "without_key", "denominator"),
        ("loss.filter", "nearly_the_same", "filter_negatives"),
    ],
)
def test_a_part_by_name_trains_as_the_function_itself_and_only_if_it_is_allowed(
    parts, setting, function, argument
):
    name = f"my_parts:{function}"
    config = with_settings(tiny(**SHORT), {setting: name})
    with pytest.raises(UnnamedCodeError, match=rf"{setting}='{name}'.*allow_code"):
        hardmix.pretrain(config, "named")
    assert not (parts / "named").exists()
    with allowing(name):
        named = hardmix.pretrain(config, "named")
    own = getattr(sys.modules["my_parts"], function)
    passed = hardmix.pretrain(tiny(**SHORT), "passed", **{argument: own})
    plain = hardmix.pretrain(tiny(**SHORT), "plain")
    first, second, other = (load_file(run.encoder_file) for run in (named, passed, plain))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)
    group, _, field = setting.partition(".")
    assert json.loads(named.config_file.read_text())[group][field] == name
    wrong = with_settings(config, {setting: "my_parts:halve"})
    with (
        allowing("my_parts:halve"),
        pytest.raises(InputError, match=r"no function 'halve'.*halves"),
    ):
        hardmix.pretrain(wrong, "wrong")
    assert not (parts / "wrong").exists()


SMALL = "--data.num-images 48 --train.batch-size 16 --train.queue-size 32 --mix.num-hardest 16"
SMALL += " --train.knn-every 0 --train.epochs 1"


def command(capfd, words):
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    return ended.value.code, (shown.out + shown.err).replace("\n", " ")


def test_commands_take_functions_that_are_typed_and_name_those_that_are_not(parts, capfd):
    typed = "--mix.strategy my_parts:halves --loss.weights my_parts:twice"
    assert command(capfd, f"pretrain demo {typed} {SMALL} --out run")[0] == 0
    code, shown = command(capfd, "pretrain --config run/config.json --out other")
    assert code == 2
    assert "--allow-code my_parts:" in shown
    assert not (parts / "other").exists()
    longer = "pretrain --out run --resume --train.epochs 2"
    assert command(capfd, longer)[0] == 2
    assert command(capfd, f"{longer} {typed}")[0] == 0
    code, shown = command(capfd, f"pretrain demo --loss.weights hlc {SMALL} --out typo")
    assert code == 2
    assert "loss.weights='hlc' is unknown: choose one of hcl" in shown
    assert not (parts / "typo").exists()

    assert command(capfd, "my_parts:centroids run --data.num-images 96")[0] == 0
    result = json.loads((parts / "run/results/centroids.json").read_text())
    assert 0 < result["top1"] <= result["top5"]
    for words, sentence in {
        "my_parts:knn run": "would overwrite results of knn",
        "my_parts:number run": "returned float: it must return an Accuracy",
        "my_parts:centroid run": "defines no function 'centroid'",
        "centroid run": "there is no command 'centroid'",
    }.items():
        code, shown = command(capfd, words)
        assert (code, sentence in shown) == (2, True), shown
