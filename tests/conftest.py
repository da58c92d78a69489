"""Every shape and dtype in a signature is enforced while the tests run (jaxtyping, beartype)."""

import os
from pathlib import Path

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent

jaxtyping.install_import_hook(["hardmix", "benchmarks"], "typecheck.check")

settings.register_profile(
    "hardmix", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("hardmix")

import torch  # noqa: E402  (after the hook, as everything that imports hardmix)

SLOW = (
    "data/test_cache.py",
    "data/test_own_views.py",
    "data/test_video_frames.py",
    "data/test_workers.py",
    "integrations/test_lightly.py",
    "integrations/test_lightning.py",
    "integrations/test_sentence_transformers.py",
    "mixing/test_embedding_space.py",
    "runtime/test_cuda_only_group.py",
    "runtime/test_device.py",
    "runtime/test_profile.py",
    "weights/test_export.py",
    "weights/test_foreign.py",
    "weights/test_initial.py",
)
"""Whole commands, several processes, browsers: `make quick` leaves them out."""


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if item.path.relative_to(TESTS).as_posix() in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else torch.get_num_threads())


@pytest.fixture
def unchecked_types():
    """Lets wrong shapes reach our own checks, whose words users see."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
