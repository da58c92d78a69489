"""Cases that several tests of the loss share."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from hypothesis import strategies as st

from hardmix import KEY, QUERY, MixPlan
from reference import unit


@contextmanager
def device_path(one_piece: bool) -> Iterator[None]:
    """Within, a CPU computes as a GPU would, or as it does."""
    users = [
        module
        for name, module in sys.modules.items()
        if name.startswith("hardmix.mixing.") and hasattr(module, "in_one_piece")
    ]
    patches = [patch.object(each, "in_one_piece", lambda _: one_piece) for each in users]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


@st.composite
def any_plan(draw):
    """Any plan, also ones no strategy makes: kinds mixed in a column, missing points, factors."""
    batch, dim = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    width, points = draw(st.integers(1, 25)), draw(st.integers(0, 12))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    base = torch.randint(-1, width, (batch, points))
    number = draw(st.integers(0, 3))
    vectors = torch.randn(batch, number, dim, dtype=torch.float64) if number else None
    partner = torch.randint(-2 - number, width, (batch, points))
    if draw(st.booleans()):
        half = points // 2
        partner[:, :half] = partner[:, :half].clamp(min=0)
        partner[:, half:] = QUERY if draw(st.booleans()) else KEY
    share = torch.rand(batch, points, dtype=torch.float64) * 0.98 + 0.01
    if draw(st.booleans()):
        share = share - 0.5  # away from the partner
    factor = torch.rand(batch, points, dtype=torch.float64) + 0.1
    scale, weight = (factor if draw(st.booleans()) else None for _ in range(2))
    plan = MixPlan(base, partner, share, scale, weight, vectors)
    exclude = torch.rand(batch, width) < draw(st.sampled_from([0.0, 0.4, 1.0]))
    vectors = unit(batch, dim), unit(batch, dim), unit(width, dim)
    return *vectors, plan, exclude if draw(st.booleans()) else None
