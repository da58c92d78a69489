"""A save that is killed between any two of its file calls costs nothing, with every method.

PCL and loss.filter=same-cluster save a step twice with different tensors: after its epoch, and
again after the clusters of the next.
"""

import os
import shutil

import pytest
import torch

from file_calls import FileCalls, Killed, kill
from hardmix.runs.checkpoints import load_newest
from hardmix.runs.folder import Run
from hardmix.runtime.atomic_files import remove_leftovers
from hardmix.training.pretrain import pretrain
from ranks import tensors_file
from small_methods import EVERY, SAME_CLUSTER, small

BETWEEN = 3
"""The step between two epochs, which is saved twice."""


def saves_of(config, run, monkeypatch):
    """Train with a checkpoint before every step, and return what was saved."""
    saved, save = [], Run.save_checkpoint

    def noted(self, step, tensors, facts):
        saved.append((step, {name: tensor.clone() for name, tensor in tensors.items()}, facts))
        return save(self, step, tensors, facts)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "save_checkpoint", noted)
        pretrain(config, run)
    return saved


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def names(run):
    return sorted(file.name for file in run.checkpoints.iterdir())


def killed_at(call, before, save, place):
    """Return a copy of a run whose save was killed at a file call; None if it has fewer calls."""
    shutil.copytree(before.path, place, copy_function=os.link)
    with pytest.MonkeyPatch.context() as patch:
        FileCalls(patch, call, kill)
        try:
            Run(place).save_checkpoint(*save)
            return None
        except Killed:
            return Run(place)


@pytest.mark.parametrize("name", EVERY)
def test_a_save_killed_at_any_file_call_leaves_the_state_before_or_after(
    name, tmp_path, monkeypatch
):
    config = small(name, mixed=name == "mochi", train={"save_minutes": 1e-9})
    saves = saves_of(config, tmp_path / "run", monkeypatch)
    twice = [index for index, (step, _, _) in enumerate(saves) if step == BETWEEN]
    assert len(twice) == 2
    one, other = (saves[index][1] for index in twice)
    assert same(one, other) == (name not in ("pcl", SAME_CLUSTER))
    before = Run(tmp_path / "before")
    before.path.mkdir()
    for index, save in enumerate(saves[: twice[1] + 1]):
        calls = kill_everywhere(before, save, tmp_path) if index in twice else None
        before.save_checkpoint(*save)
        assert calls is None or calls >= 8


def kill_everywhere(before, save, folder):
    """Return at how many calls a save was killed; each time it is checked what is left."""
    after, call = Run(folder / "after"), 0
    shutil.copytree(before.path, after.path, copy_function=os.link)
    after.save_checkpoint(*save)
    states = [load_newest(each.checkpoints) for each in (before, after)]
    while (run := killed_at(call + 1, before, save, folder / "killed")) is not None:
        call += 1
        found = run.load_checkpoint()
        assert found.broken == []
        assert any(
            found.manifest == state.manifest and same(found.tensors, state.tensors)
            for state in states
        )
        run.save_checkpoint(*save)
        remove_leftovers(run.checkpoints)
        assert names(run) == names(after)
        shutil.rmtree(run.path)
    shutil.rmtree(folder / "killed")
    shutil.rmtree(after.path)
    return call


def test_a_last_save_that_was_killed_is_completed_by_resuming(tmp_path):
    """Before best.json named the best checkpoint, or older ones were deleted."""
    best = {"checkpoint": "step-00000002", "epoch": 1, "knn": 0.5}
    before = Run(tmp_path / "before")
    before.path.mkdir()
    for step in (0, 1):
        before.save_checkpoint(step, {"weights": torch.ones(step + 2)}, {"best": None})
    save = (2, {"weights": torch.ones(9)}, {"best": best})
    after = Run(tmp_path / "after")
    shutil.copytree(before.path, after.path)
    after.save_checkpoint(*save)
    manifest = load_newest(after.checkpoints).manifest
    for call in range(1, 99):
        run = killed_at(call, before, save, tmp_path / f"{call}")
        if run is None:
            return
        if run.load_checkpoint().manifest == manifest:
            remove_leftovers(run.checkpoints)
            assert names(run) == names(after)


def test_a_checkpoint_of_before_that_is_named_by_its_step_alone_is_loaded_and_rotated(tmp_path):
    run = Run(tmp_path)
    run.save_checkpoint(1, {"weights": torch.ones(1)}, {})
    file = tensors_file(run.checkpoints)
    old = run.checkpoints / "step-00000001.safetensors"
    file.rename(old)
    manifest = run.checkpoints / "step-00000001.json"
    text = manifest.read_text().replace(file.name, old.name).replace('"format": 3', '"format": 1')
    manifest.write_text(text)
    assert torch.equal(run.load_checkpoint().tensors["weights"], torch.ones(1))
    run.save_checkpoint(2, {"weights": torch.ones(2)}, {})
    assert old.exists()
    run.save_checkpoint(3, {"weights": torch.ones(3)}, {})
    assert not old.exists()
    assert len(names(run)) == 4
