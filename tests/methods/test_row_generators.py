"""A query's random numbers are the same, whichever process draws them."""

import torch

from hardmix.methods.mixing_schedule import RowDraws, RowsGenerator
from hardmix.runtime.random_numbers import seed_of


def test_every_call_of_a_rows_generator_gives_others_and_a_seed_all_of_them():
    def drawn():
        generator = RowsGenerator()
        generator.manual_seed(3)
        return [generator.uniform_rows(4, 5, torch.float32, "cpu") for _ in range(2)]

    first, second = drawn()
    assert not torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip([first, second], drawn(), strict=True))


def test_draws_for_a_graph_are_the_generators():
    generator = RowsGenerator()
    generator.manual_seed(seed_of("mixing", 3))
    generator.part = 2
    draws = RowDraws(seed_of("mixing", 3), part=2)
    for dtype in (torch.float32, torch.float64):
        expected = generator.uniform_rows(4, 5, dtype, "cpu")
        assert torch.equal(draws.uniform_rows(4, 5, dtype, "cpu"), expected)
