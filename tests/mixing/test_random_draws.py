"""A row's random numbers are a function of seed, row and column: uniform, and quick to make."""

import pytest
import torch

from hardmix.mixing.random_draws import uniform_numbers, uniform_rows
from hardmix.runtime.random_numbers import seed_of
from pretended_gpu import pretended_gpu


def test_a_rows_numbers_depend_on_seed_row_and_column_alone():
    whole = uniform_rows(5, 0, 12, 7)
    parts = [uniform_rows(5, first, 4, 7) for first in (0, 4, 8)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(uniform_rows(6, 0, 12, 7), whole)
    assert torch.equal(uniform_rows(5, 0, 12, 7, device="cpu"), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_are_uniform_and_independent(dtype):
    number = 500 * 1001
    values = uniform_rows(seed_of("test"), 0, 500, 1001, dtype)
    assert values.dtype == dtype
    assert values.min() >= 0
    assert values.max() < 1
    centred = values.double() - 0.5
    # Five standard errors, of means of products of uniform numbers with variance 1/12.
    assert abs(float(centred.mean())) < 5 / (12 * number) ** 0.5
    neighbours = [
        (centred[:, 1:], centred[:, :-1]),
        (centred[1:], centred[:-1]),
        (centred, uniform_rows(seed_of("other"), 0, 500, 1001, dtype).double() - 0.5),
    ]
    for first, second in neighbours:
        assert abs(float((first * second).mean())) < 5 / (12 * first.numel() ** 0.5)
    bins = torch.histc(values.double(), 256, 0, 1)
    chi_squared = float(((bins - number / 256) ** 2 / (number / 256)).sum())
    assert abs(chi_squared - 255) < 5 * (2 * 255) ** 0.5


def test_rows_take_nine_launches_on_a_device_and_no_waiting():
    with pretended_gpu() as log:
        uniform_rows(5, 0, 4096, 16, device="cuda")
        assert len(log.launches) == 9
        assert not log.blocking_copies
        assert not log.synchronisations


def test_a_seed_in_a_tensor_is_the_seed():
    assert torch.equal(uniform_rows(torch.tensor(5), 8, 4, 7), uniform_rows(5, 8, 4, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["the default generator", "a generator"])
def test_a_seeded_generator_repeats_its_numbers_and_never_within_a_run(dtype, given):
    like = torch.zeros(64, 3, dtype=dtype)

    def two():
        generator = torch.Generator() if given else None
        (torch if generator is None else generator).manual_seed(5)
        return [uniform_numbers(like, 33, generator) for _ in range(2)]

    first, second = two()
    again, _ = two()
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    for drawn in (first, second):
        assert drawn.shape == (64, 33)
        assert drawn.dtype == dtype
        assert 0 <= drawn.min() < 0.1
        assert 0.9 < drawn.max() < 1
