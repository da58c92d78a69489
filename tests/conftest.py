"""Every shape and dtype in a signature is enforced while the tests run (jaxtyping, beartype)."""

import os

# Read by Hugging Face's libraries when any test imports them: nothing is looked for on the hub.
os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings

jaxtyping.install_import_hook(["hardmix", "benchmarks"], "typecheck.check")

settings.register_profile(
    "hardmix", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("hardmix")

import torch  # noqa: E402  (after the hook, as everything that imports hardmix)


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
