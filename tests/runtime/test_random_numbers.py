"""Random numbers are a pure function: uniform, unrelated, and the same for ever."""

import numpy as np
import pytest
import torch

from hardmix.runtime.random_numbers import permutation, seed_of, uniform

N = 100_000
DRAWS = uniform(seed=3, epoch=5, samples=torch.arange(N), view=0, number=4)


def correlation(a, b):
    return float(np.corrcoef(a.flatten().numpy(), b.flatten().numpy())[0, 1])


def test_numbers_are_uniform():
    """Mean, variance and histogram within 4.5 standard errors."""
    assert DRAWS.dtype == torch.float64
    assert DRAWS.min() >= 0
    assert DRAWS.max() < 1
    count = DRAWS.numel()
    assert abs(float(DRAWS.mean()) - 1 / 2) < 4.5 * (1 / 12 / count) ** 0.5
    assert abs(float(DRAWS.var()) - 1 / 12) < 4.5 * (1 / 180 / count) ** 0.5
    bins = torch.histc(DRAWS, 100, 0, 1)
    chi_square = float(((bins - count / 100) ** 2 / (count / 100)).sum())
    assert abs(chi_square - 99) < 4.5 * (2 * 99) ** 0.5


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: DRAWS.roll(1, 0), id="next sample"),
        pytest.param(lambda: DRAWS.roll(1, 1), id="next column"),
        pytest.param(lambda: uniform(3, 5, torch.arange(N), 1, 4), id="other view"),
        pytest.param(lambda: uniform(3, 6, torch.arange(N), 0, 4), id="next epoch"),
        pytest.param(lambda: uniform(4, 5, torch.arange(N), 0, 4), id="next seed"),
        pytest.param(lambda: uniform(3, 5, torch.arange(N) << 32, 0, 4), id="far sample"),
    ],
)
def test_neighbours_are_unrelated(other):
    assert abs(correlation(DRAWS, other())) < 4.5 / DRAWS.numel() ** 0.5


def test_low_bits_are_as_good_as_high_ones():
    low = DRAWS * 2**20 % 1
    assert abs(float(low.mean()) - 1 / 2) < 4.5 * (1 / 12 / low.numel()) ** 0.5
    assert abs(correlation(low, DRAWS)) < 4.5 / low.numel() ** 0.5


def test_a_samples_numbers_depend_on_nothing_beside_it():
    ids = torch.tensor([7, 99_999, 0])
    assert torch.equal(uniform(3, 5, ids, 0, 4), DRAWS[ids])
    assert torch.equal(uniform(3, 5, ids, 0, 2), DRAWS[ids, :2])
    assert uniform(3, -1, torch.tensor([], dtype=torch.int64), 0, 4).shape == (0, 4)


def test_seeds_tell_their_parts_apart_and_fit_a_generator():
    parts = [(), (0,), (1,), (0, 1), (1, 0), (-1,), ("1",), ("order", 0, 0), ("views", 0, 0)]
    seeds = [seed_of(*part) for part in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(True) == seed_of(1)


def test_an_order_visits_everything_and_differs_by_epoch_and_seed():
    orders = [permutation(seed, epoch, 1000) for seed in (0, 1) for epoch in (0, 1)]
    assert all(torch.equal(order.sort().values, torch.arange(1000)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert torch.equal(permutation(1, 1, 1000), orders[3])


def test_every_place_is_equally_likely():
    places = torch.stack([permutation(0, epoch, 10) for epoch in range(3000)])
    counts = torch.stack([(places == i).sum(0) for i in range(10)])
    assert ((counts - 300).abs() < 4.5 * (3000 * 0.1 * 0.9) ** 0.5).all()


def test_the_numbers_are_those_of_every_earlier_version():
    """A run resumed after an update must go on as it began."""
    assert seed_of("order", 0, 0) == 4876581156571347824
    assert uniform(0, 0, torch.tensor([0, 1]), 0, 2).tolist() == [
        [0.8335325499383869, 0.5055085055153434],
        [0.6726192862007854, 0.05962206612459564],
    ]
    assert permutation(0, 0, 8).tolist() == [3, 0, 5, 6, 4, 7, 1, 2]
