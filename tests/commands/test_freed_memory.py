"""Memory that a command frees is used again, and not cleared again by the system."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from hardmix.commands.main import keep_freed_memory
import torch

if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(10):
    torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2**24)  # 64 MB, as a layer of a network
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="about glibc"),
]


def test_large_blocks_are_not_cleared_again():
    plain, kept = (
        int(subprocess.check_output([sys.executable, "-c", FAULTS, mode])) for mode in ("", "kept")
    )
    assert kept < plain / 10
