"""A save that is killed at each of its file calls: what is left is the state before or after."""

import os
import shutil

import torch

from hardmix.runs.checkpoints import load_newest
from hardmix.runs.folder import Run
from hardmix.runtime.files import remove_leftovers
from hardmix.training.pretrain import pretrain


def saves_of(config, folder):
    """Train, and return what was saved: step, tensors and facts."""
    saved, save = [], Run.save_checkpoint

    def noted(self, step, tensors, facts):
        saved.append((step, {name: tensor.clone() for name, tensor in tensors.items()}, facts))
        return save(self, step, tensors, facts)

    Run.save_checkpoint = noted
    try:
        pretrain(config, folder)
    finally:
        Run.save_checkpoint = save
    return saved


def saved_twice(saves):
    """Return the saves of a step between two epochs: one before and one after the epoch's end."""
    steps = [step for step, _, _ in saves]
    return [index for index, step in enumerate(steps) if steps.count(step) == 2]


def same(one, other):
    """Return whether tensors have the same names and bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _equal(one, other):
    if one is None or other is None:
        return one is other
    return one.manifest == other.manifest and same(one.tensors, other.tensors)


def names(run):
    """Return the names in a run's folder of checkpoints."""
    return sorted(file.name for file in run.checkpoints.iterdir())


def linked(run, place):
    """Copy a run by links: its files are replaced, never changed."""
    shutil.copytree(run.path, place, copy_function=os.link)
    return Run(place)


def kill_everywhere(before, save, folder, killed_at):
    """Return at how many calls a save was killed; each time it is checked what is left.

    killed_at(call, run, save) saves, and returns whether it was killed at that call.
    """
    after, call = linked(before, folder / "after"), 0
    after.save_checkpoint(*save)
    states = [load_newest(each.checkpoints) for each in (before, after)]
    while killed_at(call + 1, run := linked(before, folder / "killed"), save):
        call += 1
        found = run.load_checkpoint()
        assert found is None or found.broken == [], f"call {call}: {found.broken}"
        assert any(_equal(found, state) for state in states), f"call {call}: another state"
        run.save_checkpoint(*save)
        remove_leftovers(run.checkpoints)
        assert names(run) == names(after), f"call {call}: {names(run)}"
        shutil.rmtree(run.path)
    shutil.rmtree(run.path)
    shutil.rmtree(after.path)
    return call
