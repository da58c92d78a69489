"""Cases that several tests of the loss share."""

import torch
from hypothesis import strategies as st

from hardmix import KEY, QUERY, MixPlan
from reference import unit


@st.composite
def any_plan(draw):
    """Any plan, also ones no strategy makes: kinds mixed in a column, missing points, factors."""
    batch, dim = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    width, points = draw(st.integers(1, 25)), draw(st.integers(0, 12))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    base = torch.randint(-1, width, (batch, points))
    partner = torch.randint(-2, width, (batch, points))
    if draw(st.booleans()):
        half = points // 2
        partner[:, :half] = partner[:, :half].clamp(min=0)
        partner[:, half:] = QUERY if draw(st.booleans()) else KEY
    share = torch.rand(batch, points, dtype=torch.float64) * 0.98 + 0.01
    factor = torch.rand(batch, points, dtype=torch.float64) + 0.1
    scale, weight = (factor if draw(st.booleans()) else None for _ in range(2))
    plan = MixPlan(base, partner, share, scale, weight)
    exclude = torch.rand(batch, width) < draw(st.sampled_from([0.0, 0.4, 1.0]))
    vectors = unit(batch, dim), unit(batch, dim), unit(width, dim)
    return *vectors, plan, exclude if draw(st.booleans()) else None
