"""Every example runs with the real library, says something, and does what it claims."""

import runpy
import socket
import sys
from contextlib import suppress
from importlib import import_module

import pytest
import torch

from hardmix import hardest_negatives, load_encoder
from hardmix.strategies import Candidates
from places import ROOT

pytestmark = pytest.mark.slow

FOLDER = ROOT / "examples"
NEEDS = {
    "hugging_face_images": ["datasets"],
    "lightly_moco": ["lightly", "sklearn"],
    "lightning_module": ["lightning", "sklearn"],
    "more_strategies": [],
    "own_strategy": ["sklearn"],
    "plain_pytorch": ["sklearn"],
    "recommender": [],
    "sentence_transformers_loop": ["sentence_transformers", "datasets", "accelerate"],
    "simclr_in_batch": ["sklearn"],
    "supcon_waveforms": [],
    "supervised_oracle": ["sklearn"],
    "two_towers": ["sklearn"],
}
SHARED = {"digits", "purchases", "sentences", "waveforms"}
LONGEST = 75
"""Return the lines of an example, including its docstring and imports."""
LOOPS = {
    *("lightly_moco", "lightning_module", "plain_pytorch", "recommender", "supcon_waveforms"),
    *("sentence_transformers_loop", "two_towers"),
}
"""Loops that somebody has already: under 40 lines each."""


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """No example may ask the network, not even for something it could do without."""
    asked = []

    def refuse(*address, **_):
        asked.append(address)
        raise OSError("the tests have no network")

    with suppress(ImportError):  # as for a user, who has not forbidden it (see conftest.py)
        monkeypatch.setattr(import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    assert asked == []


def example(name: str):
    for library in NEEDS[name]:
        pytest.importorskip(library, reason="pip install 'hardmix[examples]'")
    return import_module(name)


def test_every_example_is_tested_listed_and_short():
    names = {file.stem for file in FOLDER.glob("*.py")} - SHARED
    listed = (FOLDER / "README.md").read_text()
    assert names == set(NEEDS)
    for name in names:
        assert f"[{name}.py]({name}.py)" in listed
        longest = 39 if name in LOOPS else LONGEST
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= longest, name


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_it_runs_from_the_command_line_and_says_what_came_out(name, monkeypatch, capsys, tmp_path):
    for library in NEEDS[name]:
        pytest.importorskip(library, reason="pip install 'hardmix[examples]'")
    of_images = name == "hugging_face_images"
    options = ["--out", str(tmp_path / "run"), "--epochs", "1"] if of_images else ["--steps", "3"]
    monkeypatch.setattr(sys, "argv", [f"examples/{name}.py", *options])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out.splitlines()[-1]
    assert any(character.isdigit() for character in said)


@pytest.mark.parametrize(("name", "factor"), [("recommender", 1.8), ("supcon_waveforms", 1.4)])
def test_recommender_and_supcon_learn(name, factor):
    before, after = example(name).main()
    assert after > factor * before


@pytest.mark.parametrize("name", ["lightly_moco", "plain_pytorch", "simclr_in_batch"])
def test_training_finds_views_that_were_not_found_before(name):
    before, after = example(name).main()
    assert after > 1.4 * before


def test_lightnings_module_learns_and_its_checkpoint_holds_the_queue(tmp_path):
    module = example("lightning_module")
    before, after, trainer = module.main()
    assert after > 1.4 * before
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    encoder = import_module("digits").build_encoder()
    path = tmp_path / "some.ckpt"
    again = module.Mochi.load_from_checkpoint(path, encoder=encoder, dim=64, queue_size=1024)
    memory = trainer.lightning_module.memory
    assert torch.equal(again.memory.keys, memory.keys)
    assert int(again.memory.filled) == len(memory)
    assert int(again.memory.position) == int(memory.position) == 100 * 64 % 1024


def test_two_towers_find_halves_of_digits_never_seen():
    before, after = example("two_towers").main()
    assert before < 0.1
    assert after > 0.5


def test_the_oracle_leaves_no_false_parent_and_gives_a_more_uniform_embedding():
    outcomes = example("supervised_oracle").main(steps=100)
    without, oracle = outcomes["without oracle"], outcomes["with oracle"]
    assert oracle.false_points == 0 < without.false_points
    assert oracle.uniformity < without.uniformity


def test_paraphrases_of_sentences_never_seen_are_found():
    before, after = example("sentence_transformers_loop").main()
    assert before < 0.1
    assert after > 0.2


def test_a_hugging_face_set_gets_the_runs_features_as_a_column(tmp_path):
    images = example("hugging_face_images").main(tmp_path / "run", epochs=1)
    files = sorted((tmp_path / "run-images").rglob("*.png"), key=lambda file: file.name)
    encoder = load_encoder(tmp_path / "run")
    assert len(files) == len(images) == 96
    for row, file in [(images[0], files[0]), (images[95], files[95])]:
        assert file.parent.name == str(row["label"])
        features = encoder(encoder.preprocess(file)[None])[0]
        assert torch.allclose(torch.tensor(row["features"]), features, atol=1e-4)


def test_the_own_strategy_mixes_none_of_the_skipped_and_only_the_next():
    similarity = torch.randn(5, 50)
    exclude = torch.rand(5, 50) < 0.2
    settings = {"num_hardest": 10, "num_pairs": 40, "num_with_query": 20}
    candidates = Candidates(logits=similarity, exclude=exclude, **settings)
    plan = example("own_strategy").plan_semi_hard(candidates, num_skipped=6)
    upper, skipped = (hardest_negatives(similarity, number, exclude) for number in (16, 6))
    for row in range(5):
        wanted = set(upper.positions[row].tolist()) - set(skipped.positions[row].tolist())
        used = set(plan.base[row].tolist()) | set(plan.partner[row, :40].tolist())
        assert used <= wanted


def test_the_own_strategy_makes_fewer_points_of_false_negatives():
    mochi, own = example("own_strategy").main()
    assert own < 0.6 * mochi
