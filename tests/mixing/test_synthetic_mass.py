"""The share of the softmax that synthetic points hold, against the softmax itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardmix.mixing.diagnostics import synthetic_mass
from hardmix.mixing.infonce import Contrast


def outcome_of(batch: int, real: int, points: int, seed: int) -> Contrast:
    generator = torch.Generator().manual_seed(seed)
    positive, negatives, synthetic = (
        2 * torch.rand(shape, generator=generator) - 1
        for shape in ((batch,), (batch, real), (batch, points))
    )
    nothing = torch.zeros(())
    return Contrast(nothing, torch.zeros(batch), positive, negatives, synthetic)


@given(
    batch=st.integers(1, 5),
    real=st.integers(1, 9),
    points=st.integers(0, 9),
    temperature=st.sampled_from([0.05, 0.2, 1.0]),
    seed=st.integers(0, 99),
)
def test_it_is_the_softmax_over_key_negatives_and_points(batch, real, points, temperature, seed):
    outcome = outcome_of(batch, real, points, seed)
    logits = torch.cat([outcome.positive[:, None], outcome.real, outcome.synthetic], dim=1)
    shares = (logits.double() / temperature).softmax(dim=1)
    expected = shares[:, 1 + real :].sum(dim=1).mean()
    assert float(synthetic_mass(outcome, temperature)) == pytest.approx(float(expected), abs=1e-5)


def test_excluded_negatives_hold_nothing():
    outcome = outcome_of(3, 4, 2, 0)
    exclude = torch.zeros(3, 4, dtype=torch.bool)
    exclude[:, 1:] = True
    fewer = outcome._replace(real=outcome.real[:, :1])
    assert torch.equal(synthetic_mass(outcome, 0.2, exclude), synthetic_mass(fewer, 0.2))
