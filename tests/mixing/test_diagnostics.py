import math

import pytest
import torch
from hypothesis import given, strategies as st

from hardmix import (
    KEY,
    QUERY,
    Contrast,
    MemoryQueue,
    MixPlan,
    MochiLoss,
    contrast,
    false_negatives_top,
    false_parents,
    matching_probability,
    plan_mochi,
    proxy_accuracy,
)
from hardmix.mixing.diagnostics import harder_points, similarity_histogram, top_of
from reference import unit

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 12))
SEEDS = st.integers(0, 2**16)


def outcome_of(positive, real, synthetic=None) -> Contrast:
    """Return what `contrast` would report for these similarities."""
    positive, real = torch.tensor(positive), torch.tensor(real)
    synthetic = real[:, :0] if synthetic is None else torch.tensor(synthetic)
    return Contrast(positive.mean(), positive, positive, real, synthetic)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(sizes=SIZES, seed=SEEDS, temperature=st.sampled_from([0.01, 0.2, 5.0]), masked=st.booleans())
def test_matching_probability_is_the_softmax_sorted_per_query_and_averaged(
    sizes, seed, temperature, masked
):
    positive = torch.rand(sizes[0], generator=seeded(seed), dtype=torch.float64) * 2 - 1
    real = torch.rand(sizes, generator=seeded(seed + 1), dtype=torch.float64) * 2 - 1
    exclude = torch.rand(sizes, generator=seeded(seed + 2)) < 0.4 if masked else None
    batch, number = sizes
    expected = [0.0] * number
    for row in range(batch):
        shown = [n for n in range(number) if exclude is None or not exclude[row, n]]
        logits = torch.stack([positive[row], *real[row, shown]]) / temperature
        ranked = sorted(logits.softmax(dim=0)[1:].tolist(), reverse=True)
        for rank, probability in enumerate(ranked):
            expected[rank] += probability / batch
    outcome = Contrast(positive.mean(), positive, positive, real, real[:, :0], temperature)
    got = matching_probability(outcome, exclude, top=number)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))
    assert got.sum() <= 1 + 1e-12


def test_matching_probability_and_the_keys_own_sum_to_one():
    query, key, negatives = unit(4, 6), unit(4, 6), unit(20, 6)
    outcome = contrast(query, key, negatives, temperature=0.2)
    own = (-outcome.per_query).exp().mean()
    assert matching_probability(outcome, top=20).sum() + own == pytest.approx(1.0)


def test_matching_probability_shows_the_top_ranks_only_but_counts_all():
    outcome = contrast(unit(4, 6), unit(4, 6), unit(20, 6), temperature=0.2)
    everything = matching_probability(outcome, top=20)
    assert len(everything) == 20
    torch.testing.assert_close(matching_probability(outcome, top=5), everything[:5])


def test_the_top_are_1024_of_16384_and_a_sixteenth_of_a_shorter_queue():
    assert [top_of(number) for number in (65536, 16384, 2048, 40, 3)] == [1024, 1024, 128, 2, 1]
    outcome = contrast(unit(4, 6), unit(4, 6), unit(40, 6), temperature=0.2)
    assert len(matching_probability(outcome)) == 2
    false = torch.rand(4, 40, generator=seeded(0)) < 0.5
    assert false_negatives_top(outcome.real, false) == false_negatives_top(outcome.real, false, 2)


def test_the_hardest_point_of_each_kind_is_compared_with_the_hardest_negative():
    """Sec. 4.3, by hand: column 0 and 1 are pairs, 2 and 3 are mixed with the query."""
    plan = MixPlan(
        base=torch.tensor([[0, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, -1]]),
        partner=torch.tensor([[1, 0, -1, -1]]).repeat(3, 1),
        share=torch.full((3, 4), 0.4),
    )
    real = [[0.5, 0.1], [0.5, 0.1], [0.5, 0.9]]
    points = [[0.4, 0.3, 0.6, 0.2], [0.55, 0.3, 0.6, 0.2], [0.4, 0.3, 0.6, float("-inf")]]
    outcome = outcome_of([0.9] * 3, real, points)
    assert harder_points(outcome, plan) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    exclude = torch.tensor([[False, False], [False, False], [False, True]])
    assert harder_points(outcome, plan, exclude).with_query == 1
    without = plan._replace(partner=plan.partner.clamp(min=0))
    assert harder_points(outcome, without).with_query.isnan()


def test_matching_probability_is_nought_where_all_are_excluded():
    outcome = outcome_of([0.1], [[0.5, 0.6]])
    exclude = torch.ones(1, 2, dtype=torch.bool)
    assert matching_probability(outcome, exclude, top=2).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("real", "synthetic", "accuracy", "mixed"),
    [
        pytest.param([0.4, 0.1], None, 1.0, 1.0, id="key first"),
        pytest.param([0.6, 0.1], None, 0.0, 0.0, id="a negative first"),
        pytest.param([0.5, 0.1], None, 0.0, 0.0, id="a tie is lost"),
        pytest.param([0.4, 0.1], [0.3, 0.45], 1.0, 1.0, id="over the points too"),
        pytest.param([0.4, 0.1], [0.3, 0.6], 1.0, 0.0, id="a point first"),
        pytest.param([0.4, 0.1], [0.3, 0.5], 1.0, 0.0, id="a tie with a point is lost"),
        pytest.param([0.6, 0.1], [0.3, 0.2], 0.0, 0.0, id="points cannot help"),
        pytest.param([0.4, 0.1], [-math.inf, -math.inf], 1.0, 1.0, id="no point could be made"),
        pytest.param([0.4, 0.1], [-math.inf, 0.6], 1.0, 0.0, id="one point could be made"),
    ],
)
def test_proxy_accuracy_wants_the_key_strictly_first(real, synthetic, accuracy, mixed):
    points = None if synthetic is None else [synthetic]
    assert proxy_accuracy(outcome_of([0.5], [real], points)) == (accuracy, mixed)


def test_proxy_accuracy_does_not_look_at_excluded_negatives():
    outcome = outcome_of([0.5, 0.5], [[0.6, 0.1], [0.6, 0.1]], [[0.2], [0.7]])
    exclude = torch.tensor([[True, False], [True, False]])
    assert proxy_accuracy(outcome) == (0.0, 0.0)
    assert proxy_accuracy(outcome, exclude) == (1.0, 0.5)
    assert proxy_accuracy(outcome, torch.ones_like(exclude)) == (1.0, 0.5)


GRID = st.sampled_from([-math.inf, -1.0, -0.5, 0.0, 0.5, 1.0])


@given(data=st.data(), sizes=SIZES, points=st.integers(0, 4))
def test_proxy_accuracy_is_the_direct_count_also_among_many_ties(data, sizes, points):
    def draw(width, values=GRID):
        row = st.lists(values, min_size=width, max_size=width)
        return data.draw(st.lists(row, min_size=sizes[0], max_size=sizes[0]))

    positive = [row[0] for row in draw(1, st.sampled_from([-1.0, 0.0, 0.5]))]
    real, synthetic, exclude = draw(sizes[1]), draw(points), draw(sizes[1], st.booleans())
    won = won_mixed = 0
    for own, row, made, hidden in zip(positive, real, synthetic, exclude, strict=True):
        first = all(own > value for value, out in zip(row, hidden, strict=True) if not out)
        won += first
        won_mixed += first and all(own > value for value in made)
    got = proxy_accuracy(outcome_of(positive, real, synthetic), torch.tensor(exclude))
    assert got.real == pytest.approx(won / sizes[0])
    assert got.mixed == pytest.approx(won_mixed / sizes[0])


@given(sizes=SIZES, top=st.integers(1, 20), seed=SEEDS)
def test_false_negatives_top_is_the_direct_count(sizes, top, seed):
    similarity = torch.rand(sizes, generator=seeded(seed))
    false_negative = torch.rand(sizes, generator=seeded(seed + 1)) < 0.3
    flags = []
    for row, false in zip(similarity.tolist(), false_negative.tolist(), strict=True):
        ranked = sorted(range(sizes[1]), key=lambda n: -row[n])
        flags += [false[n] for n in ranked[:top]]
    got = false_negatives_top(similarity, false_negative, top)
    assert got == pytest.approx(sum(flags) / len(flags))


def test_false_negatives_are_counted_in_an_oracle_run_too():
    memory = MemoryQueue.prefilled(unit(50, 4, dtype=torch.float32), labels=torch.arange(50) % 5)
    query, key = unit(2, 3, 4, dtype=torch.float32)
    oracle = memory.same_class(torch.tensor([0, 1, 2]))
    loss = MochiLoss(10, 30, 30)
    outcome, plan = loss.contrast(query, key, memory, oracle)
    plain, _ = loss.contrast(query, key, memory)
    assert false_negatives_top(outcome.real, oracle, top=50) == pytest.approx(0.2)
    assert torch.equal(
        false_negatives_top(outcome.real, oracle, 9), false_negatives_top(plain.real, oracle, 9)
    )
    assert false_parents(plan, oracle) == (0.0, 0.0, 0.0)


def counted_false_parents(plan: MixPlan, false_negative) -> list[float]:
    at_least_one, both, with_query = [], [], []
    for row in range(plan.base.shape[0]):
        for column in range(plan.base.shape[1]):
            base, partner = int(plan.base[row, column]), int(plan.partner[row, column])
            if base == -1:
                continue
            first = bool(false_negative[row, base])
            if partner in (QUERY, KEY):
                with_query.append(first)
            else:
                second = bool(false_negative[row, partner])
                at_least_one.append(first or second)
                both.append(first and second)
    return [sum(f) / len(f) if f else math.nan for f in (at_least_one, both, with_query)]


def assert_counted(plan: MixPlan, false_negative) -> None:
    got = [float(share) for share in false_parents(plan, false_negative)]
    assert got == pytest.approx(counted_false_parents(plan, false_negative), nan_ok=True)


@given(sizes=SIZES, points=st.integers(0, 9), seed=SEEDS)
def test_false_parents_of_any_plan_are_the_direct_count(sizes, points, seed):
    batch, number = sizes
    base = torch.randint(-1, number, (batch, points), generator=seeded(seed))
    partner = torch.randint(-2, number, (batch, points), generator=seeded(seed + 1))
    false_negative = torch.rand(sizes, generator=seeded(seed + 2)) < 0.5
    assert_counted(MixPlan(base, partner, torch.rand(batch, points)), false_negative)


@given(
    seed=SEEDS, allowed=st.floats(0, 1), num_pairs=st.integers(0, 9), num_query=st.integers(0, 9)
)
def test_false_parents_of_mochis_plan_are_the_direct_count(seed, allowed, num_pairs, num_query):
    similarity = torch.rand(5, 6, generator=seeded(seed))
    plan = plan_mochi(
        similarity,
        num_hardest=4,
        num_pairs=num_pairs,
        num_with_query=num_query,
        exclude=torch.rand(5, 6, generator=seeded(seed + 1)) > allowed,
        generator=seeded(seed),
    )
    assert_counted(plan, torch.rand(5, 6, generator=seeded(seed + 2)) < 0.5)


def test_a_share_of_no_points_is_nan():
    false_negative = torch.ones(1, 3, dtype=torch.bool)
    share = torch.full((1, 1), 0.5)
    pair = MixPlan(torch.tensor([[0]]), torch.tensor([[1]]), share)
    shares = false_parents(pair, false_negative)
    assert (shares.pairs_at_least_one, shares.pairs_both) == (1.0, 1.0)
    assert math.isnan(shares.with_query)
    for partner in (QUERY, KEY):
        shares = false_parents(pair._replace(partner=torch.tensor([[partner]])), false_negative)
        assert shares.with_query == 1.0
        assert math.isnan(shares.pairs_at_least_one)
        assert math.isnan(shares.pairs_both)
    none = pair._replace(base=torch.tensor([[-1]]))
    assert all(math.isnan(share) for share in false_parents(none, false_negative))


def test_a_histogram_counts_every_finite_similarity_once():
    values = torch.tensor([[-1.0, 1.0, 0.01], [-torch.inf, 1.0000001, -0.99]])
    counts = similarity_histogram(values)
    assert (len(counts), sum(counts)) == (80, 5)
    assert (counts[0], counts[40], counts[79]) == (2, 1, 2)
