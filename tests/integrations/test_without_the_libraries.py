"""The room's names: lazily imported, and without any of the other libraries."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from hardmix import integrations


def test_all_equals_the_namespace_and_what_type_checkers_see():
    tree = ast.parse(Path(integrations.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in guarded.body for alias in node.names}
    assert sorted(integrations.__all__) == sorted(seen) == dir(integrations)
    for name in integrations.__all__:
        assert getattr(integrations, name).__doc__
    with pytest.raises(AttributeError, match="nonsense"):
        integrations.nonsense  # noqa: B018


def test_every_name_is_imported_and_made_without_the_other_libraries():
    program = """
import sys
for name in ("lightly", "lightning", "pytorch_lightning", "sentence_transformers", "open_clip"):
    sys.modules[name] = None  # an import of it fails
from hardmix import integrations
assert "torch" not in sys.modules
import torch
for name in integrations.__all__:
    getattr(integrations, name)
integrations.NTXentLoss(memory_bank_size=(64, 8))
integrations.TwoTowerLoss()
integrations.MomentumContrast(torch.nn.Linear(4, 8), dim=8, queue_size=64)
integrations.MixedNegativesLoss(torch.nn.Linear(4, 8), mini_batch_size=4)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
