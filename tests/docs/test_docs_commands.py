"""Every command of the documents is run, each in a folder that holds what its words stand for.

It is run as it stands, with words at its end that make it small; of what torchrun or srun would
start many times, once (tests/training/test_two_processes.py starts real processes). A new command
of the documents is run by itself. If it fails here though it is right, one of three must know it:
THINGS in tests/support/doc_things.py (what a word stands for), `smaller` (how it gets short), or
NOT_RUN (why it cannot be run).
"""

import hashlib
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from torchvision.datasets import CIFAR10

from doc_commands import DOCS, DOCUMENTS, commands, ways_to_type
from doc_things import MAKERS, lay_out, thing_of
from hardmix.commands import main as cli

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

NOT_RUN = {
    r"import hf:": "asks the Hugging Face Hub: tests/weights/test_hub.py has one of its own",
    r"watch (?!--help)": "serves until Ctrl-C: tests/report/test_watch.py starts and ends it",
}
"""Patterns of commands that are not run here, each with the reason."""

HELP = {"--help", "--help-all"}
"""Options that only print."""

ELSEWHERE = ("getting-started.md", "reproduce.md")
"""Commands in the blocks of these pages, and the same ones on others, are run one after the other:
by test_docs.py beside this at their full size, and by test_reproduce.py with two processes."""

PRETRAIN = {
    "--train.epochs": "1",
    "--train.batch-size": "8",
    "--train.queue-size": "32",
    "--train.device": "cpu",
    "--mix.num-hardest": "8",
    "--mix.num-pairs": "4",
    "--mix.num-with-query": "2",
    "--mix.warm-up-epochs": "0",
    "--data.num-images": "16",
    "--data.workers": "0",
    "--data.image-size": "32",
    "--model.backbone": "small",
}
HARMLESS = ("--data.image-size", "--model.backbone")
"""Options that are not changed if a document sets them: a few images cost little at any size."""

DETECT = "--iterations 2 --trials 1 --warm-up 1 --batch-size 2 --sides 48 64 --test-side 64"
DETECT += " --regions 8 --proposals 10 --precise-bn 1 --test-every 0 --data.workers 0 --device cpu"
SWEEP = "--epochs 1 --num-images 130 --seeds 1 --device cpu"
TOY = "--num-memory 64 --num-hardest 16 --num-pairs 8 --num-with-query 4"


def smaller(words: tuple[str, ...]) -> list[str]:
    """Return the options that make a command small: the last value of an option counts."""
    match words[0]:
        case "pretrain":
            return smaller_pretrain(words)
        case "demo":
            return ["--epochs", "1", "--data.num-images", "160"]
        case "detect":
            return DETECT.split()
        case "finetune":
            return ["--epochs", "1", "--batch-size", "16"]
        case "linear" if "--preset" in words:
            return ["--epochs", "1", "--batch-size", "16"]
        case "sweep" if {"shapes", "cifar10"} & set(words):
            return [*SWEEP.split(), *(() if "--only" in words else ("--only", "MoCo-v2"))]
        case "sweep":  # of the paper's scale only the plan: its runs take days on GPUs
            return ["--dry-run"]
        case "toy":
            return TOY.split()
    return []


def smaller_pretrain(words: tuple[str, ...]) -> list[str]:
    if "--config" in words:
        return []
    if "photos" in words:  # it makes itself small
        return ["--minutes", "0.03", "--data.workers", "0", "--train.device", "cpu"]
    if "--resume" in words and "auto" not in words:  # a finished run of one epoch goes on
        return ["--train.epochs", "2"]
    named = {word for word in HARMLESS if word in words}
    more = [part for name, value in PRETRAIN.items() if name not in named for part in (name, value)]
    needs_root = "demo" not in words and "--data.root" not in words
    return [*more, "--data.root", "DIR"] if needs_root else more


@pytest.fixture(scope="module")
def things(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that makes a thing when it is first requested."""
    folder = tmp_path_factory.mktemp("things")

    def get(name: str) -> Path:
        path, top = folder / name, name.split("/")[0]
        if not (folder / top).exists():
            MAKERS[top](folder / top)
        return path

    return get


@pytest.fixture
def _our_cifar(things, monkeypatch):
    """Make torchvision take our files for the published ones."""
    folder = things("cifar") / CIFAR10.base_folder
    md5 = {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", md5["data_batch_1"]]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": md5["batches.meta"]})


def two_runs(words: tuple[str, ...]) -> list[str]:
    """Return the words with two different runs if RUN stands there twice."""
    first = words.index("RUN") if "RUN" in words else 0
    return ["RUN-2" if word == "RUN" and n > first else word for n, word in enumerate(words)]


def typed(words: tuple[str, ...]) -> list[str]:
    """Return all words of a command as it is run."""
    return [*two_runs(words), *([] if HELP & set(words) else smaller(words))]


def meaning(words: list[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the same value for commands that do the same, in any order and with any names."""
    name, options = "", {"": ()}
    for word in words:
        if word.startswith("--"):
            name, options[word] = word, ()
        else:
            options[name] += (thing_of(word, words) or word,)
    if "--out" in options:
        options["--out"] = (Path(*options["--out"]).suffix,)
    return tuple(sorted(options.items()))


def commands_to_run() -> dict[str, list[str]]:
    """Return the words of each command by its place; of commands that do the same, the first."""
    elsewhere, found = set(), {}
    for command in commands():
        for words in ways_to_type(command.text):
            key = meaning(typed(words))
            if command.document in ELSEWHERE and command.in_block:
                elsewhere.add(key)
            elif not any(re.match(start, command.text) for start in NOT_RUN):
                found.setdefault(key, (f"{command.place} {' '.join(words)}", typed(words)))
    return dict(value for key, value in found.items() if key not in elsewhere)


@pytest.mark.usefixtures("_our_cifar")
@pytest.mark.parametrize("words", [pytest.param(v, id=k) for k, v in commands_to_run().items()])
def test_a_command_of_the_documents_ends_well_and_writes_its_files(
    words, things, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    lay_out(words, things)
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 0, f"{capfd.readouterr().err}\n{__doc__}"
    if "--out" in words and not (HELP | {"--dry-run"}) & set(words):
        assert Path(words[words.index("--out") + 1]).exists()


def test_every_reason_not_to_run_a_command_is_needed():
    texts = [command.text for command in commands()]
    assert all(any(re.match(start, text) for text in texts) for start in NOT_RUN)
    assert len(commands_to_run()) > 60


def test_make_targets_extras_and_scripts_that_the_documents_name_exist():
    """They install from the network or take long: what they name is looked at instead."""
    root = DOCS.parent
    text = "\n".join(file.read_text() for file in [*DOCUMENTS, root / "CONTRIBUTING.md"])
    targets = set(re.findall(r"(?:^ {4}|`)make ([a-z]+)", text, re.MULTILINE))
    assert "demo" in targets
    planned = ["make", "--dry-run", *sorted(targets)]
    subprocess.run(planned, cwd=root, check=True, stdout=subprocess.DEVNULL)
    extras = set(re.findall(r"pip install '[^'\[]*\[([a-z]+)\]'", text))
    known = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert extras <= known["optional-dependencies"].keys()
    scripts = set(re.findall(r"`python (\S+\.py)", text))
    assert all((root / script).is_file() for script in scripts)
