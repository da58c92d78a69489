"""Nothing that people or files name can drive the terminal."""

import io
import re

import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from rich.console import Console

from hardmix.commands import main as cli
from hardmix.runtime import console
from hardmix.runtime.console import (
    complain,
    complain_at_length,
    progress,
    say,
    table,
    visible,
    warn,
)

CLEAR = "\x1b[2J\x1b[H"
ODD = f"a{CLEAR}\r\n\x07\x9b31m\u202egnp[bold]:bomb:é\udce9"
SHOWN = r"a\x1b[2J\x1b[H\r\n\x07\x9b31m\u202egnp[bold]:bomb:é\udce9"


def harmless(text: str) -> bool:
    return all(letter.isprintable() or letter in "\n" for letter in text)


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_any_text_is_one_line_without_control_characters(text):
    shown = visible(text)
    shown.encode()  # a file name that is not UTF-8 can be printed
    assert len(shown.splitlines()) <= 1
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in shown)


@given(st.text(alphabet=st.characters(exclude_categories=("C", "Z"))))
def test_letters_of_all_languages_stay(text):
    assert visible(text) == text


@pytest.mark.parametrize("way", [say, warn, complain], ids=lambda way: way.__name__)
def test_every_line_is_made_visible(way, capfd):
    way(ODD)
    shown = "".join(capfd.readouterr())
    assert SHOWN in shown
    assert len(shown.splitlines()) == 1
    assert harmless(shown)


def test_tables_take_nothing_for_markup_or_control(capfd):
    table(ODD, ["", ODD], [[ODD, "[/]"]])
    shown = capfd.readouterr().out
    assert "[/]" in shown
    assert ":bomb:" in shown
    assert harmless(shown)


def test_progress_is_made_visible(capfd, monkeypatch):
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    with progress(f"reading {ODD}", 2) as meter:
        meter.advance(1, ODD)
    shown = capfd.readouterr().out
    assert SHOWN in shown
    assert harmless(shown)


def test_a_traceback_keeps_its_lines(capfd):
    complain_at_length(f"one\ntwo {CLEAR}\n")
    assert capfd.readouterr().err == "one\ntwo " + r"\x1b[2J\x1b[H" + "\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["pretrain", "demo", "--out", "RUN", f"--{CLEAR}", CLEAR],
        ["pretrain", "demo", "--out", "RUN", "--data.root", CLEAR],
        ["pretrain", "demo", "--out", f"RUN/{CLEAR}", "--resume"],
        ["knn", CLEAR],
        ["report", CLEAR],
        ["import", CLEAR, "--out", "RUN"],
        [CLEAR],
    ],
    ids=lambda words: " ".join(words)[:20].replace("\x1b", ""),
)
def test_what_a_user_types_is_repeated_visibly(arguments, tmp_path, capfd):
    with pytest.raises(SystemExit) as done:
        cli.main([word.replace("RUN", str(tmp_path / "run")) for word in arguments])
    shown = "".join(capfd.readouterr())
    assert done.value.code == 2
    assert r"\x1b" in shown
    assert harmless(shown)


def test_a_run_of_oddly_named_images_in_an_odd_folder_is_told_visibly(tmp_path, capfd):
    images = tmp_path / f"im{CLEAR}ages"
    for index in range(12):
        file = images / f"class{index % 2}{CLEAR}" / f"{index}{CLEAR}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(0, 255, (40, 50, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(file)
    file.write_bytes(b"no image")
    sizes = ["--train.batch-size", "4", "--train.queue-size", "8", "--mix.num-hardest", "4"]
    sizes += ["--train.epochs", "1", "--data.workers", "0", "--model.key-bn-splits", "2"]
    out = tmp_path / f"run{CLEAR}"
    with pytest.raises(SystemExit) as done:
        cli.main(["pretrain", "demo", "--data.root", str(images), "--out", str(out), *sizes])
    shown = "".join(capfd.readouterr())
    assert not done.value.code
    assert "Skipped 1 unreadable" in shown
    assert harmless(shown)


def frames(monkeypatch, width, *advances):
    """Return the lines that a terminal of this width shows."""
    screen = io.StringIO()
    monkeypatch.setattr(console, "_out", Console(file=screen, force_terminal=True, width=width))
    with progress("", 9000) as meter:
        for advance in advances:
            meter.advance(*advance)
            meter._bar.refresh()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())  # without colours
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", plain).splitlines()


PROGRESS = (
    *("epoch 123 of 400", "loss 12.3, guessing 7.63"),
    *("12% of keys recognised", "12345 images/s"),
)


def test_the_progress_of_a_long_run_fits_80_columns(monkeypatch):
    lines = frames(monkeypatch, 80, (2700, *PROGRESS))
    (shown,) = {line for line in lines if "epoch" in line}
    assert len(shown) <= 80
    assert shown.startswith("epoch 123 of 400; loss 12.3, guessing 7.63 ")
    assert re.search(r"-:--:--|\d:\d\d:\d\d", shown)
    wide = [line for line in frames(monkeypatch, 140, (2700, *PROGRESS)) if "epoch" in line]
    assert all("; ".join(PROGRESS) in line for line in wide)


def test_without_a_terminal_progress_is_a_sentence(monkeypatch, capfd):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with progress("", 800) as meter:
        now[0] = 60.0
        meter.advance(50, "epoch 10 of 400", "loss 4.5, guessing 6.2")
    with progress("reading", 4000) as meter:
        now[0] += 90.0
        meter.advance(2000)
    assert capfd.readouterr().out.splitlines() == [
        "epoch 10 of 400, 15 min left; loss 4.5, guessing 6.2",
        "reading: 2,000 of 4,000, 1 min left",
    ]


def test_the_bar_moves_without_new_words(monkeypatch):
    monkeypatch.setattr(console, "_out", Console(file=io.StringIO(), force_terminal=True, width=80))
    with progress("", 9000) as meter:
        meter.advance(1, *PROGRESS)
        for done in (3000, 6000):
            meter.advance(done)
            (task,) = meter._bar.tasks
            assert task.completed == done
            assert task.description == "; ".join(PROGRESS[:2])
