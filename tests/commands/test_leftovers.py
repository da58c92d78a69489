"""Half-written files of a killed command are removed by the next one, wherever it wrote."""

import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hardmix.commands import main as cli
from hardmix.data.shards import open_shard_set
from hardmix.runtime.files import temporary_of, write_atomically
from hardmix.settings.config import DataConfig
from hardmix.training.pretrain import pretrain
from ranks import start, tiny, wait

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return pretrain(tiny("moco-v2"), tmp_path_factory.mktemp("leftovers") / "run").path


def killed(where, job, *arguments):
    """Do it, and die by a signal when a temporary file of this folder is synced."""

    def kill(number):
        file = Path(os.readlink(f"/proc/self/fd/{number}"))
        if file.suffix == ".tmp" and file.parent.name == where:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(number)

    fsync, os.fsync = os.fsync, kill
    job(*arguments)


def kill_and_repeat(folders, where, job, *arguments):
    """Return the folders with half-written files after the killed job, and after the next."""
    left = []
    for patch in ((killed, where), ()):
        assert wait(start(*patch, job, *arguments, ranks=1)) == [-9 if patch else 0]
        left.append([file.parent.name for each in folders for file in each.rglob(".*.tmp")])
    return left


def command(words):
    cli.main(words)


def index(root, cache):
    os.environ["XDG_CACHE_HOME"] = cache
    open_shard_set(root, DataConfig(root=root, image_size=8, workers=0))


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["knn", "{run}"], "results"),
        (["analyze", "{run}"], "figures"),
        (["explore", "{run}", "--out", "{out}/explore/page.html"], "explore"),
        (["report", "{run}", "--out", "{out}/pages/report.html"], "pages"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_a_command_removes_what_the_killed_one_left(words, where, run, tmp_path):
    for name in ("explore", "pages"):
        (tmp_path / name).mkdir()
    filled = [word.format(run=run, out=tmp_path) for word in words]
    assert kill_and_repeat([run, tmp_path], where, command, filled) == [[where], []]


def test_a_first_start_removes_the_config_that_the_killed_one_left(tmp_path):
    config = tiny("moco-v2", train={"epochs": 1, "knn_every": 0})
    assert kill_and_repeat([tmp_path], "run", pretrain, config, tmp_path / "run") == [["run"], []]


def test_an_index_removes_that_of_a_killed_process(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("x.png"))
    job = (index, str(tmp_path / "a.tar"), str(tmp_path / "cache"))
    assert kill_and_repeat([tmp_path], "hardmix", *job) == [["hardmix"], []]


def test_only_files_of_dead_processes_of_this_machine_are_removed(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    own = temporary_of(tmp_path / "a")
    name = own.name.replace(f"-{os.getpid()}.", f"-{child.pid}.")
    dead = own.with_name(name)
    elsewhere = own.with_name(re.sub("hardmix-[0-9a-f]{8}", "hardmix-00000000", name))
    foreign = tmp_path / ".notes.99.tmp"
    for file in (own, dead, elsewhere, foreign):
        file.write_bytes(b"half")
    write_atomically(tmp_path / "b", b"whole")
    assert set(tmp_path.iterdir()) == {own, elsewhere, foreign, tmp_path / "b"}


def test_a_name_is_not_too_long_for_a_file_system(tmp_path):
    write_atomically(Path(tmp_path / ("a" * 200)), b"whole")
