"""The help shows the settings that have an effect, and needs no torch."""

import subprocess
import sys

import pytest

from hardmix.commands import argv, main as cli
from hardmix.commands.options import FIRST, NOT_EVALUATED
from hardmix.settings.methods import METHOD_FACTS
from hardmix.settings.saved import FACTS


def help_of(capfd, *words, option="--help"):
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, option])
    assert ended.value.code == 0
    return capfd.readouterr().out


def options_in(text):
    """Dotted names of the settings that a help shows."""
    found = {word.strip("│,|[]") for word in text.split() if word.lstrip("│[").startswith("--")}
    names = {word.removeprefix("--").removeprefix("no-").replace("-", "_") for word in found}
    return {name for name in names if name in FACTS}


@pytest.mark.parametrize("method", METHOD_FACTS)
def test_the_help_of_a_method_shows_the_settings_it_uses_and_no_others(method, capfd):
    words = ("pretrain", "demo", "--method", method)
    shown = options_in(help_of(capfd, *words, option="--help-all"))
    used = {name for name in FACTS if METHOD_FACTS[method].uses(name)}
    hidden = {"recipe", "choose"}  # the first word of the command, and what follows from it
    assert shown == used - hidden - {"minutes"}
    plain = ("moco-v1", "moco-v2", "supervised", "swav", "byol")
    assert any(name.startswith("mix.") for name in shown) == (method not in plain)


def test_only_the_recipe_that_chooses_takes_a_time_budget(capfd):
    text = help_of(capfd, "pretrain", "photos")
    assert "minutes" in options_in(text)
    assert "chooses many of them when the run starts" in " ".join(text.split())


def test_the_help_of_pretrain_shows_the_twenty_settings_people_change(capfd):
    text = help_of(capfd, "pretrain", "demo")
    assert options_in(text) == set(FIRST) - {"minutes"}
    assert len(FIRST) == 21
    assert len(text.splitlines()) < 80
    assert "--help-all" in text
    everything = help_of(capfd, "pretrain", option="--help-all")
    assert options_in(everything) > set(FIRST) - {"minutes"}


def test_the_help_groups_all_commands_by_their_reader(capfd):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    lines = capfd.readouterr().out.splitlines()
    assert [line[:-1] for line in lines if line.endswith(":")] == list(cli.GROUPS)
    shown = {line.split()[0] for line in lines if line.startswith("  ")}
    assert shown == cli.COMMANDS.keys() - {"version"}


@pytest.mark.parametrize("command", ["knn", "features", "neighbours", "explore"])
def test_the_help_of_an_evaluation_omits_data_settings_without_effect(command, capfd):
    shown = options_in(help_of(capfd, command))
    assert shown == {name for name in FACTS if name.startswith("data.")} - set(NOT_EVALUATED)


def test_without_a_recipe_the_help_is_that_of_the_method_too(capfd):
    assert "--mix." not in help_of(capfd, "pretrain", "--method", "supervised")
    assert "--mix.num-pairs" in help_of(capfd, "pretrain")


def test_a_setting_that_the_method_does_not_use_is_accepted_all_the_same(tmp_path, capfd):
    """A command line that compares methods stays the same except for --method."""
    words = "--mix.num-pairs 8 --data.num-images 32 --train.batch-size 16 --train.epochs 1"
    words += f" --train.knn-every 0 --train.queue-size 32 --out {tmp_path / 'run'}"
    with pytest.raises(SystemExit) as ended:
        cli.main(["pretrain", "demo", "--method", "supervised", *words.split()])
    assert ended.value.code == 0, capfd.readouterr().err


@pytest.mark.parametrize(
    "words", [["--help"], [], ["pretrain", "--help"], ["pretrain", "demo", "--help"], ["recipes"]]
)
def test_no_help_needs_torch(words):
    program = (
        "import sys\n"
        "from hardmix.commands.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "    assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--cached", ["--cached", "True"]),
        ("--no-cached", ["--cached", "False"]),
        ("--cached False --seed 1", ["--cached", "False", "--seed", "1"]),
        ("--seed 1 --cached", ["--seed", "1", "--cached", "True"]),
    ],
)
def test_an_option_that_may_be_unset_works_as_a_flag(given, expected):
    assert argv.scan(given.split(), cached=("True", "False", "None")).words == expected
