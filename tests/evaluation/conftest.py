"""The detection data beside the project, unpacked; tests that need them are skipped without."""

import subprocess
import sys

import pytest

from places import SHARED


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    if not (SHARED / "unpack.py").exists():
        pytest.skip(f"detection data are not here: {SHARED}/unpack.py")
    out = tmp_path_factory.mktemp("detection")
    command = [sys.executable, SHARED / "unpack.py", out, "bccd-voc", "coco-mini"]
    subprocess.run(command, check=True)
    return out
