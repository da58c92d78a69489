"""Every shape and dtype in a signature is enforced while the tests run (jaxtyping, beartype)."""

import os
from pathlib import Path

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent

jaxtyping.install_import_hook("hardmix", "typecheck.check")

settings.register_profile(
    "hardmix", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("hardmix")

import torch  # noqa: E402  (after the hook, as everything that imports hardmix)

SLOW = (
    "analysis/test_analyses.py",
    "analysis/test_figures.py",
    "bench/test_bench.py",
    "commands/test_leftovers.py",
    "commands/test_own_backbone.py",
    "data/test_cache.py",
    "data/test_own_views.py",
    "data/test_video_frames.py",
    "data/test_workers.py",
    "docs/test_docs.py",
    "docs/test_docs_commands.py",
    "docs/test_examples.py",
    "docs/test_extending.py",
    "evaluation/test_detect.py",
    "evaluation/test_detection_c4.py",
    "evaluation/test_evaluations_on_gpu.py",
    "evaluation/test_neighbours.py",
    "evaluation/test_run_evaluations.py",
    "explore/test_explore_command.py",
    "explore/test_feature_gallery.py",
    "integrations/test_lightly.py",
    "integrations/test_lightning.py",
    "integrations/test_sentence_transformers.py",
    "methods/test_every_method.py",
    "mixing/test_embedding_space.py",
    "mixing/test_loss.py",
    "report/test_explore_browser.py",
    "report/test_report.py",
    "report/test_report_browser.py",
    "report/test_watch.py",
    "runtime/test_cuda_only_group.py",
    "runtime/test_device.py",
    "runtime/test_profile.py",
    "sweep/test_claims.py",
    "sweep/test_gpus.py",
    "sweep/test_own_grids.py",
    "sweep/test_sweep.py",
    "training/test_killed_saves.py",
    "training/test_learning.py",
    "training/test_nan_guard.py",
    "training/test_optimizers.py",
    "training/test_photos.py",
    "training/test_pretrain.py",
    "training/test_resume.py",
    "training/test_two_processes.py",
    "training/test_checkpoint_writer.py",
    "training/test_unsaved.py",
    "training/test_verdict.py",
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
