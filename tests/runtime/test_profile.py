"""train.profile tells where the time goes, and changes nothing else."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import ranks
from hardmix.runs.folder import Run
from hardmix.runtime import profile as stopwatch
from hardmix.runtime.profile import Stopwatch, end_step, profiling, start_steps, timed, timed_each
from hardmix.training.pretrain import pretrain

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ALWAYS = {"augment", "query", "key", "loss", "backward", "optimizer", "queue", "rest"}


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: self.now)

    def work(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def check_whole(profile: dict) -> None:
    parts = profile["parts"].values()
    assert all(part["ms"] >= -1e-9 for part in parts)
    assert sum(part["share"] for part in parts) == pytest.approx(1)
    assert sum(part["ms"] for part in parts) == pytest.approx(profile["step_ms"])


def written(run: Run) -> dict:
    return json.loads((run.path / "profile.json").read_text())


def test_parts_are_added_up_per_step_and_what_is_left_is_the_rest(clock):
    with profiling(True, CPU) as watch:
        start_steps()
        for _ in range(stopwatch.SKIPPED + 4):
            with timed("query"):
                clock.work(0.002)
            clock.work(0.001)
            for seconds in (0.003, 0.004):
                with timed("loss"):
                    clock.work(seconds)
            end_step()
        profile = watch.profile()
    assert profile.steps == 4
    assert profile.whole == pytest.approx(10)
    busy = {name: value for name, value in profile.parts.items() if value > 1e-9}
    assert busy == pytest.approx({"query": 2, "loss": 7, "rest": 1})


def test_the_first_steps_and_what_is_between_epochs_do_not_count(clock):
    with profiling(True, CPU) as watch:
        for epoch in range(2):
            clock.work(100)
            start_steps()
            for step in range(stopwatch.SKIPPED):
                with timed("query"):
                    clock.work(50 if epoch == 0 else 0.001)
                end_step()
                assert watch.profile().steps == epoch * (step + 1)
        assert watch.profile().whole == pytest.approx(1)


def test_long_runs_are_added_up_as_they_go(clock):
    watch = Stopwatch(CPU)
    for _ in range(stopwatch.SKIPPED + 2 * stopwatch.SETTLED + 1):
        clock.work(0.001)
        watch.lap()
        assert len(watch._laps) < stopwatch.SETTLED
    assert watch.profile().steps == 2 * stopwatch.SETTLED + 1
    assert watch.profile().whole == pytest.approx(1)


def test_each_item_of_a_loader_is_timed_but_not_what_is_done_with_it(clock):
    def load():
        for number in range(2):
            clock.work(0.005)
            yield number

    with profiling(True, CPU) as watch:
        watch._steps = stopwatch.SKIPPED
        for _ in timed_each("decode", load()):
            clock.work(0.001)
        end_step()
    assert watch.profile().parts["decode"] == pytest.approx(10)
    assert watch.profile().parts["rest"] == pytest.approx(2)


def test_without_a_stopwatch_nothing_is_kept():
    with profiling(False, CPU) as watch:
        assert watch is None
        assert timed("query") is not None
        assert list(timed_each("decode", [1, 2])) == [1, 2]
        start_steps()
        end_step()


@pytest.mark.parametrize("method", ["mochi", "supervised"])
def test_a_profile_has_every_part_and_leaves_the_weights_as_they_are(method, tmp_path, capsys):
    plain = pretrain(ranks.tiny(method), tmp_path / "plain")
    assert not (plain.path / "profile.json").exists()
    assert "ms per step" not in capsys.readouterr().out
    run = pretrain(ranks.tiny(method, train={"profile": True}), tmp_path / "profiled")
    profile = written(run)
    assert profile["steps"] == 12 - stopwatch.SKIPPED
    check_whole(profile)
    assert set(profile["parts"]) == {"waiting", "decode", *ALWAYS}
    never = {"waiting"} | ({"key"} if method == "supervised" else set())
    assert {name for name, part in profile["parts"].items() if part["ms"] == 0} == never
    out = capsys.readouterr().out
    assert all(name in out for name in ("ms per step", *ALWAYS))
    one, other = (load_file(each.path / "encoder.safetensors") for each in (plain, run))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("workers", [0, 1])
def test_files_are_decoded_here_or_waited_for(workers, tmp_path):
    for number in range(24):
        pixels = torch.randint(0, 255, (20, 24, 3), dtype=torch.uint8).numpy()
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
    data = {"name": None, "root": str(tmp_path / "images"), "workers": workers, "num_images": None}
    config = ranks.tiny("moco-v2", data=data, train={"profile": True, "batch_size": 8})
    profile = written(pretrain(config, tmp_path / "run"))
    check_whole(profile)
    parts = profile["parts"]
    assert (parts["waiting"]["ms"] > 0) == (workers == 1)
    assert (parts["decode"]["ms"] > 0) == (workers == 0)
    assert (profile["workers_ms"] > 0) == (workers == 1)


def test_a_run_too_short_to_measure_says_so(tmp_path, capsys):
    train = {"profile": True, "epochs": 1, "batch_size": 48}
    run = pretrain(ranks.tiny("moco-v2", train=train), tmp_path / "run")
    assert not (run.path / "profile.json").exists()
    assert "nothing was measured" in capsys.readouterr().err
