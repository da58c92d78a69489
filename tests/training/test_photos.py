"""The recipe photos on real folders: it looks, measures and chooses once, and says why."""

import dataclasses
import json
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

import hardmix.data.sources as sources
import hardmix.settings.fitting_rules as fitting_rules
import hardmix.training.fitting as fitting
import hardmix.training.pretrain as loop
import hardmix.training.state as state
import ranks
from hardmix.commands import main as cli
from hardmix.runs.folder import Run
from hardmix.settings.recipes import photos
from hardmix.settings.saved import settings, with_settings
from hardmix.training.fitting import look, look_at, open_folder_images, told_by_colour
from hardmix.training.setup import Own
from hardmix.training.state import TimeLimit, Training

pytestmark = pytest.mark.slow


def picture(generator, height=40, width=48, colour=None):
    """Noise around a colour."""
    base = torch.randint(0, 200, (3, 1, 1), generator=generator) if colour is None else colour
    noise = torch.randint(0, 40, (3, height, width), generator=generator)
    return (base + noise).clamp(0, 255).to(torch.uint8)


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for number in range(60):
        file = tmp_path / "photos" / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        pixels = picture(generator).permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(file)
    return tmp_path / "photos"


def run_command(*words):
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, words)])
    return ended.value.code


def test_colours_of_their_own_tell_images_apart_and_equal_ones_do_not():
    generator = torch.Generator().manual_seed(0)
    own = [picture(generator) for _ in range(60)]
    same = [picture(generator, colour=torch.full((3, 1, 1), 99)) for _ in range(60)]
    assert told_by_colour(own) > 0.7
    assert told_by_colour(same) < 0.3
    things = [torch.randint(0, 200, (3, 1, 1), generator=generator) for _ in range(30)]
    several = [picture(generator, colour=things[number // 3]) for number in range(90)]
    assert told_by_colour(several) > 0.7  # three photographs of each thing
    assert told_by_colour(own[:1]) == 0.0
    dot = torch.zeros(3, 1, 1, dtype=torch.uint8)  # has no halves
    assert told_by_colour([*own, dot]) == told_by_colour(own)
    assert told_by_colour([dot, dot]) == 0.0


def test_a_look_finds_number_sizes_and_colours(folder):
    for number in range(3):
        Image.new("RGB", (900, 700 + number)).save(folder / f"large{number}.jpg")
    config = with_settings(photos(), {"data.root": str(folder)})
    facts = look(config, open_folder_images(config, Own()), Own())
    assert (facts.images, facts.short_side, facts.labelled, facts.tests) == (63, 40, False, 0)
    assert facts.colour > 0.6
    sides, pictures = look_at(fitting.open_images(config.data, "train", 0))
    assert sorted(sides)[-3:] == [700, 701, 702]  # of the files, though decoded at a smaller size
    assert max(max(each.shape) for each in pictures) < 200


def test_a_folder_becomes_an_encoder_with_reasons_and_a_verdict(
    folder, tmp_path, capfd, monkeypatch
):
    listed = []
    source = sources.SOURCES["folder"]

    def count(config, split, seed):
        listed.append(split)
        return source.open(config, split, seed)

    monkeypatch.setitem(sources.SOURCES, "folder", source._replace(open=count))
    out = tmp_path / "run"
    words = ("--minutes", 0.05, "--data.workers", 0, "--train.queue-size", 5)
    assert run_command("pretrain", "photos", "--data.root", folder, "--out", out, *words) == 0
    said = capfd.readouterr().out
    in_a_line = re.sub(r"[│\s]+", " ", said)  # a narrow table breaks its lines
    for words in ("Chosen for 60 images and 0.05 minutes", "recognised by their colours", "yours"):
        assert words in in_a_line
    for command in ("report", "explore", "neighbours"):
        assert f"\n  hardmix {command} {out}" in said
    assert listed == ["train"]  # once, to look, to measure and to train
    saved = Run(out).config()
    assert saved.choose == ()
    assert (saved.train.queue_size, saved.train.batch_size) == (5, 8)
    assert saved.train.exclude_same_image
    record = json.loads((out / "fitting.json").read_text())
    assert record["choices"]["train.queue_size"]["why"] == "yours"
    assert record["choices"]["train.epochs"]["value"] == saved.train.epochs
    assert record["images"]["images"] == 60
    verdict = json.loads((out / "results" / "verdict.json").read_text())
    assert f"Verdict: {verdict['text']}" in said.replace("\n", " ")
    assert verdict["measure"] == "views"


def test_a_slower_run_ends_in_time_with_what_it_has_and_can_be_resumed(
    folder, tmp_path, monkeypatch, capfd
):
    out = tmp_path / "run"
    monkeypatch.setattr(TimeLimit, "reached", lambda limit: limit.steps >= 10)
    monkeypatch.setattr(fitting_rules, "MOST_EPOCHS", 3)
    words = ("--minutes", 5, "--data.workers", 0)
    assert run_command("pretrain", "photos", "--data.root", folder, "--out", out, *words) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "The 5 minutes are over in epoch 2 of 3" in said
    assert "Verdict:" in said
    run = Run(out)
    assert run.encoder_file.exists()
    assert json.loads((run.results / "pretrain.json").read_text())["steps"] == 10
    assert run_command("pretrain", "--out", out, "--resume") == 0
    steps = json.loads((run.results / "pretrain.json").read_text())["steps"]
    assert steps == 3 * (60 // run.config().train.batch_size)


def test_the_limit_leaves_time_for_the_verdict_and_more_when_steps_are_slow(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(state.time, "monotonic", lambda: now[0])
    limit = TimeLimit(end=600.0, step=1.0, after=60.0, started=0.0)
    for seconds, steps, reached in (
        *((500, 500, False), (540, 540, True)),
        *((340, 85, False), (380, 95, True)),  # four times as slow: the verdict will take 240 s
    ):
        now[0], limit.steps = float(seconds), steps
        assert limit.reached() is reached


@pytest.mark.parametrize(("alone", "chosen"), [(0.05, 1), (0.5, 2)])
def test_one_thread_is_used_where_it_is_faster(alone, chosen, monkeypatch):
    threads = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: threads.__setitem__(0, number))
    seconds = {1: alone, 2: 0.1}
    monkeypatch.setattr(fitting, "_step_seconds", lambda *_: seconds[threads[0]])
    training = Mock(spec=Training)
    training.compute = SimpleNamespace(device=torch.device("cpu"))
    assert fitting._fastest(training, 1.0) == (min(alone, 0.1), chosen)
    assert threads == [chosen]


def refuse(*_, **__):
    raise AssertionError("measured again")


def test_a_resume_never_measures_again(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(TimeLimit, "reached", lambda _: False)
    # --config does not repeat the number of threads, by which sums are rounded.
    monkeypatch.setattr(fitting, "_fastest", lambda *_: (0.05, torch.get_num_threads()))
    config = with_settings(photos(), {"data.root": str(folder), "data.workers": 0})
    config = dataclasses.replace(config, minutes=0.05)
    run = loop.pretrain(config, tmp_path / "run")
    monkeypatch.setattr(loop, "fit_run", refuse)
    before = settings(run.config())
    assert run_command("pretrain", "--out", run.path, "--resume") == 0
    loop.pretrain(config, run.path, resume=True)  # by its recipe, as a program would
    assert settings(run.config()) == before
    recorded = json.loads((run.results / "pretrain.json").read_text())["command"]
    assert "--resume" not in recorded  # the command that started it, not the last one
    again = tmp_path / "again"
    saved = ("--config", run.config_file)
    assert run_command("pretrain", *saved, "--out", again) == 0
    losses = [[line.get("loss") for line in Run(each).metrics()] for each in (run.path, again)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("number", "words"), [(3, "there are 3 images"), (0, "empty folder")])
def test_too_few_images_get_one_clear_message(number, words, tmp_path, capfd):
    (tmp_path / "few").mkdir()
    for each in range(number):
        Image.new("RGB", (40, 40)).save(tmp_path / "few" / f"{each}.png")
    out = tmp_path / "run"
    assert run_command("pretrain", "photos", "--data.root", tmp_path / "few", "--out", out) == 2
    error = capfd.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_shards_are_refused(capfd, tmp_path):
    out = tmp_path / "run"
    words = ("--data.root", tmp_path / "a-{0..3}.tar", "--data.num-images", 100)
    assert run_command("pretrain", "photos", *words, "--out", out) == 2
    assert "shards are a stream" in capfd.readouterr().err


def train_photos(folder, out):
    config = with_settings(
        photos(), {"data.root": str(folder), "data.workers": 0, "train.device": "cpu"}
    )
    loop.pretrain(dataclasses.replace(config, minutes=0.05), out)


def test_two_processes_choose_the_same(folder, tmp_path):
    ranks.all_ranks(train_photos, folder, tmp_path / "run")
    saved = Run(tmp_path / "run").config()
    assert saved.choose == ()
    assert saved.train.batch_size % 2 == 0
    assert json.loads((tmp_path / "run" / "fitting.json").read_text())["machine"]["processes"] == 2
    verdict = json.loads((tmp_path / "run" / "results" / "verdict.json").read_text())
    assert verdict["images"] == 60
