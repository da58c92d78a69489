"""A save that is killed between any two of its file calls costs nothing, with every method.

PCL and loss.filter=same-cluster save a step twice with different tensors: after its epoch, and
again after the clusters of the next.
"""

import pytest
import torch

from file_calls import FileCalls, Killed, kill
from hardmix.runs.checkpoints import load_newest
from hardmix.runs.folder import Run
from hardmix.runtime.files import remove_leftovers
from killed_saves import kill_everywhere, linked, names, same, saved_twice, saves_of
from ranks import tensors_file
from small_methods import EVERY, SAME_CLUSTER, small

pytestmark = pytest.mark.slow


def killed_at(call, run, save):
    """Save as a process that is killed at a file call: nothing happens after it."""
    with pytest.MonkeyPatch.context() as patch:
        FileCalls(patch, call, kill)
        try:
            run.save_checkpoint(*save)
        except Killed:
            return True
    return False


@pytest.mark.parametrize("name", EVERY)
def test_a_save_killed_at_any_file_call_leaves_the_state_before_or_after(name, tmp_path):
    config = small(name, mixed=name == "mochi", train={"save_minutes": 1e-9})
    saves = saves_of(config, tmp_path / "run")
    twice = saved_twice(saves)
    one, other = (saves[index][1] for index in twice)
    assert same(one, other) == (name not in ("pcl", SAME_CLUSTER))
    before = Run(tmp_path / "before")
    before.path.mkdir()
    for index, save in enumerate(saves[: twice[1] + 1]):
        if index in twice:
            assert kill_everywhere(before, save, tmp_path, killed_at) >= 8
        before.save_checkpoint(*save)


def test_a_last_save_that_was_killed_is_completed_by_resuming(tmp_path):
    """The kill comes before best.json names the best checkpoint, or older ones are deleted."""
    best = {"checkpoint": "step-00000002", "epoch": 1, "knn": 0.5}
    before = Run(tmp_path / "before")
    before.path.mkdir()
    for step in (0, 1):
        before.save_checkpoint(step, {"weights": torch.ones(step + 2)}, {"best": None})
    save = (2, {"weights": torch.ones(9)}, {"best": best})
    after = linked(before, tmp_path / "after")
    after.save_checkpoint(*save)
    manifest, completed, call = load_newest(after.checkpoints).manifest, 0, 1
    while killed_at(call, run := linked(before, tmp_path / f"{call}"), save):
        if run.load_checkpoint().manifest == manifest:
            completed += 1
            remove_leftovers(run.checkpoints)
            assert names(run) == names(after)
        call += 1
    assert completed >= 4


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
