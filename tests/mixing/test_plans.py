"""Plans: which negatives are mixed, with whom, in which shares (Sec. 4)."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from hardmix import QUERY, hardest_negatives, materialize, plan_mochi
from hardmix.mixing import ranking
from reference import unit


def sizes(draw) -> tuple[int, int, int]:
    width = draw(st.integers(1, 300))
    return draw(st.integers(1, 5)), width, draw(st.integers(1, width))


@st.composite
def ranked(draw):
    """Similarities with ties, and a mask that may leave fewer than N."""
    batch, width, number = sizes(draw)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    similarity = torch.rand(batch, width, generator=generator)
    if draw(st.booleans()):
        similarity = (similarity * draw(st.integers(1, 20))).round()  # many equal values
    share = draw(st.sampled_from([0.0, 0.3, 0.95, 1.0]))
    exclude = torch.rand(batch, width, generator=generator) < share
    return similarity, number, exclude if draw(st.booleans()) else None


@given(ranked())
def test_hardest_are_the_n_largest_allowed_in_slot_order(case):
    similarity, number, exclude = case
    hardest = hardest_negatives(similarity, number, exclude)
    allowed = similarity if exclude is None else similarity.masked_fill(exclude, -math.inf)
    for row in range(len(similarity)):
        count = int(hardest.count[row])
        chosen = hardest.positions[row, :count]
        assert count == min(number, int((allowed[row] > -math.inf).sum()))
        assert (hardest.positions[row, count:] == -1).all()
        assert (chosen.diff() > 0).all()
        expected = allowed[row].sort(descending=True).values[:count]
        assert torch.equal(similarity[row, chosen].sort(descending=True).values, expected)
        assert exclude is None or not exclude[row, chosen].any()


@given(ranked())
def test_ranking_is_the_same_set_without_numpy(case):
    similarity, number, _ = case
    values = similarity + 1e-4 * torch.rand_like(similarity)  # ties may be broken either way
    by_topk = values.topk(number, dim=1).indices.sort(dim=1).values
    if values.unique().numel() == values.numel():
        assert torch.equal(ranking.largest(values, number)[0], by_topk)


def test_ranking_in_parts_changes_nothing(monkeypatch):
    similarity, exclude = torch.rand(7, 100), torch.rand(7, 100) < 0.9
    whole = [hardest_negatives(similarity, 20, mask) for mask in (None, exclude)]
    monkeypatch.setattr(ranking, "CHUNK_ELEMENTS", 2 * 100)
    parts = [hardest_negatives(similarity, 20, mask) for mask in (None, exclude)]
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a.positions, b.positions)
        assert torch.equal(a.count, b.count)


def test_a_last_bit_does_not_change_what_a_draw_picks():
    similarity = torch.rand(4, 500)
    moved = similarity * (1 + 2**-23)
    plans = [
        plan_mochi(
            values,
            num_hardest=50,
            num_pairs=80,
            num_with_query=40,
            generator=torch.Generator().manual_seed(3),
        )
        for values in (similarity, moved)
    ]
    assert torch.equal(plans[0].base, plans[1].base)
    assert torch.equal(plans[0].partner, plans[1].partner)


@given(ranked(), st.integers(0, 40), st.integers(0, 40))
def test_plan_mixes_only_each_querys_own_allowed_hardest(case, num_pairs, num_with_query):
    similarity, number, exclude = case
    num_pairs = num_pairs if number > 1 else 0
    plan = plan_mochi(
        similarity,
        num_hardest=number,
        num_pairs=num_pairs,
        num_with_query=num_with_query,
        exclude=exclude,
    )
    hardest = hardest_negatives(similarity, number, exclude)
    assert plan.base.shape == (len(similarity), num_pairs + num_with_query)
    assert (plan.partner[:, num_pairs:] == QUERY).all()
    for row in range(len(similarity)):
        own = set(hardest.positions[row, : hardest.count[row]].tolist())
        pairs, alone = plan.base[row, :num_pairs], plan.base[row, num_pairs:]
        if len(own) < 2:
            assert (pairs == -1).all()
        else:
            assert set(pairs.tolist()) <= own
            assert set(plan.partner[row, :num_pairs].tolist()) <= own
            assert (pairs != plan.partner[row, :num_pairs]).all()
        assert set(alone.tolist()) <= (own or {-1})


@pytest.mark.parametrize(
    ("batch", "width", "number"), [(1, 2, 2), (3, 7, 7), (2, 1, 1), (4, 64, 3)]
)
def test_more_points_than_negatives_are_legal(batch, width, number):
    plan = plan_mochi(
        torch.rand(batch, width),
        num_hardest=number,
        num_pairs=100 if number > 1 else 0,
        num_with_query=50,
    )
    assert (plan.base >= 0).all()


def large_plan(**options):
    return plan_mochi(
        torch.rand(64, 400), num_hardest=50, num_pairs=2000, num_with_query=2000, **options
    )


def test_shares_are_uniform_over_their_open_intervals():
    plan = large_plan()
    alpha, beta = 1 - plan.share[:, :2000].double(), plan.share[:, 2000:].double()
    for values, end in [(alpha, 1.0), (beta, 0.5)]:
        assert values.min() > 0
        assert values.max() < end
        # 128,000 draws: five standard errors of the mean, and of a tenth's share.
        assert abs(values.mean() - end / 2) < 5 * end / math.sqrt(12 * values.numel())
        tenths = torch.histc(values, 10, 0, end) / values.numel()
        assert (tenths - 0.1).abs().max() < 5 * math.sqrt(0.09 / values.numel())


def test_draws_differ_between_queries_and_between_points():
    share = large_plan().share.double()
    centred = share - share.mean(dim=1, keepdim=True)
    correlation = torch.corrcoef(centred[:, :2000])
    between_queries = correlation.fill_diagonal_(0.0).abs().max()
    assert between_queries < 6 / math.sqrt(2000)
    between_points = torch.corrcoef(
        torch.stack([share[:, :1999].flatten(), share[:, 1:2000].flatten()])
    )
    assert abs(between_points[0, 1]) < 5 / math.sqrt(64 * 1999)


def test_ranks_picked_differ_between_queries():
    similarity = torch.rand(1, 400).expand(64, 400).contiguous()
    plan = plan_mochi(similarity, num_hardest=50, num_pairs=100, num_with_query=100)
    for column in range(200):
        assert plan.base[:, column].unique().numel() > 10


def test_parents_and_pairs_are_uniform_over_the_hardest():
    number, points = 6, 6000
    plan = plan_mochi(
        torch.rand(40, 90), num_hardest=number, num_pairs=points, num_with_query=points
    )
    hardest = plan.base[:, :points].sort(dim=1).values
    assert hardest[0].unique().numel() == number
    for row in range(40):
        own = plan.base[row].unique()
        i = torch.searchsorted(own, plan.base[row, :points].contiguous())
        j = torch.searchsorted(own, plan.partner[row, :points].contiguous())
        counts = torch.bincount(i * number + j, minlength=number**2).view(number, number)
        assert (counts.diagonal() == 0).all()
        expected = points / (number * (number - 1))
        off = counts[~torch.eye(number, dtype=torch.bool)].double()
        assert (off - expected).abs().max() < 5 * math.sqrt(expected)
        alone = torch.searchsorted(own, plan.base[row, points:].contiguous())
        counts = torch.bincount(alone, minlength=number).double()
        assert (counts - points / number).abs().max() < 5 * math.sqrt(points / number)


def test_the_same_generator_state_gives_the_same_plan_and_another_does_not():
    similarity = torch.rand(4, 100)

    def plan(seed: int):
        generator = torch.Generator().manual_seed(seed)
        return plan_mochi(
            similarity, num_hardest=20, num_pairs=30, num_with_query=10, generator=generator
        )

    assert all(torch.equal(a, b) for a, b in zip(plan(1)[:3], plan(1)[:3], strict=True))
    assert not torch.equal(plan(1).base, plan(2).base)


def test_materialized_points_have_unit_length_and_lie_between_their_parents():
    query, key, negatives = unit(5, 16), unit(5, 16), unit(60, 16)
    plan = plan_mochi(query @ negatives.T, num_hardest=20, num_pairs=30, num_with_query=10)
    points = materialize(plan, query, key, negatives)
    assert torch.allclose(points.norm(dim=-1), torch.ones(5, 40, dtype=torch.float64))
    base = negatives[plan.base]
    closer = torch.einsum("bsd,bsd->bs", points, base)
    with_query = torch.einsum("bsd,bd->bs", points, query)[:, 30:]
    # beta < 0.5: the negative's part is always the larger one.
    assert (closer[:, 30:] > with_query).all()


def test_points_mixed_with_the_query_are_closer_to_it_than_their_negative():
    query, negatives = unit(8, 32), unit(300, 32)
    similarity = query @ negatives.T
    plan = plan_mochi(similarity, num_hardest=100, num_pairs=0, num_with_query=200)
    points = materialize(plan, query, query, negatives)
    after = torch.einsum("bsd,bd->bs", points, query)
    assert (after > similarity.gather(1, plan.base)).all()
