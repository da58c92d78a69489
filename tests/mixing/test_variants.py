"""Each variant's plan obeys its definition in App. B.2."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, strategies as st

from hardmix import KEY, QUERY, MochiLoss, contrast, hardest_negatives, plan_mochi
from hardmix.losses import Embeddings
from hardmix.settings.named_choices import StrategyName
from hardmix.settings.schedules import decreasing
from hardmix.strategies import (
    STRATEGIES,
    Candidates,
    dropped_negatives,
    plan_beta_weighted,
    plan_fixed_percentage,
    plan_mixed_with_key,
    plan_points,
    plan_softmax_sampled,
)
from mixing_cases import candidates
from reference import unit

SIZES = {"num_hardest": 20, "num_pairs": 30, "num_with_query": 15}


def a_case(batch=5, width=200, dim=16):
    embeddings = Embeddings(unit(batch, dim), unit(batch, dim), unit(width, dim))
    return embeddings.query @ embeddings.negatives.T, embeddings


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def test_the_menu_and_the_table_name_the_same_strategies():
    assert (*STRATEGIES, "own") == get_args(StrategyName)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("num_pairs", "num_with_query"), [(0, 0), (0, 1), (1, 0), (1, 1), (0, 5)])
def test_any_number_of_points_of_either_kind_may_be_asked_for(name, num_pairs, num_with_query):
    _, embeddings = a_case(batch=3, width=40)
    loss = MochiLoss(20, num_pairs, num_with_query, strategy=name)
    outcome, plan = loss.contrast(*embeddings[:3])
    transformed = STRATEGIES[name].transformation is not None
    number = 0 if transformed else num_pairs + num_with_query + 448 * (name == "synco")
    assert outcome.synthetic.shape == (3, number)
    assert outcome.loss.isfinite()
    assert number == 0 or plan.base.shape == (3, number)


@pytest.mark.parametrize("name", STRATEGIES)
@given(seed=st.integers(0, 1000), hidden=st.sampled_from([0.0, 0.9, 0.99, 1.0]))
def test_no_strategy_touches_an_excluded_negative(name, seed, hidden):
    torch.manual_seed(seed)
    _, embeddings = a_case(batch=3, width=40)
    exclude = torch.rand(3, 40) < hidden
    chosen = STRATEGIES[name]
    options = {**SIZES, "exclude": exclude, "rank_by": chosen.rank_by}
    plan = chosen.strategy(candidates(*embeddings, **options))
    transformed = chosen.transformation is not None
    assert plan.base.shape == (3, 0 if transformed else 45 + 448 * (name == "synco"))
    for row in range(3):
        made = plan.base[row] >= 0
        rows = torch.cat([plan.base[row, made], plan.partner[row, made & (plan.partner[row] >= 0)]])
        assert not exclude[row, rows].any()
        assert not (made[:30] & (plan.base[row, :30] == plan.partner[row, :30])).any()
        allowed = int((~exclude[row]).sum())
        assert not made[:30].any() or allowed >= 2
        assert not made[30:].any() or allowed >= 1


def test_ranked_by_key_takes_the_keys_hardest():
    _, embeddings = a_case()
    assert STRATEGIES["ranked-by-key"].rank_by == "key"
    plan = plan_points(candidates(*embeddings, **SIZES, rank_by="key"))
    by_key = hardest_negatives(embeddings.key @ embeddings.negatives.T, 20).positions
    for row in range(5):
        assert set(plan.base[row].tolist()) <= set(by_key[row].tolist())
    assert (plan.partner[:, 30:] == QUERY).all()


def test_mixed_with_key_is_mochi_with_the_key_for_the_query():
    similarity, embeddings = a_case()
    plan = plan_mixed_with_key(candidates(*embeddings, **SIZES, generator=seeded()))
    mochi = plan_mochi(similarity, **SIZES, generator=seeded())
    assert (plan.partner[:, 30:] == KEY).all()
    assert torch.equal(plan.partner[:, :30], mochi.partner[:, :30])
    assert torch.equal(plan.base, mochi.base)
    assert torch.equal(plan.share, mochi.share)


@pytest.mark.parametrize("weighing", ["beta", "one-minus-beta", "log-beta"])
def test_weighted_points_count_by_their_share_of_the_query(weighing):
    _, embeddings = a_case()
    plan = plan_beta_weighted(candidates(*embeddings, **SIZES), weighing=weighing)
    factor = plan.weight if weighing == "log-beta" else plan.scale
    beta = plan.share[:, 30:]
    assert (factor[:, :30] == 1).all()
    assert torch.equal(factor[:, 30:], 1 - beta if weighing == "one-minus-beta" else beta)
    outcome = contrast(*embeddings[:3], plan, temperature=0.2)
    terms = outcome.synthetic / 0.2 * (1 if plan.scale is None else plan.scale)
    terms = terms.exp() * (1 if plan.weight is None else plan.weight)
    total = (outcome.positive / 0.2).exp() + (outcome.real / 0.2).exp().sum(1) + terms.sum(1)
    assert torch.allclose(outcome.per_query, total.log() - outcome.positive / 0.2)


def test_softmax_sampling_draws_each_parent_by_its_probability():
    number, points, tau = 5, 40_000, 0.3
    similarity, embeddings = a_case(batch=2, width=50)
    counts = {"num_hardest": number, "num_pairs": points, "num_with_query": points}
    plan = plan_softmax_sampled(candidates(*embeddings, **counts), sampling_temperature=tau)
    hardest = hardest_negatives(similarity, number).positions
    for row in range(2):
        p = (similarity[row, hardest[row]] / tau).softmax(dim=0)
        i = torch.searchsorted(hardest[row], plan.base[row].contiguous())
        for drawn in (i[:points], i[points:]):
            seen = torch.bincount(drawn, minlength=number) / points
            assert (seen - p).abs().max() < 5 * math.sqrt(0.25 / points)
        j = torch.searchsorted(hardest[row], plan.partner[row, :points].contiguous())
        pair = p[:, None] * p / (1 - p[:, None])
        pair.fill_diagonal_(0.0)
        seen = torch.bincount(i[:points] * number + j, minlength=number**2) / points
        assert (seen - pair.flatten()).abs().max() < 5 * math.sqrt(0.25 / points)


def test_softmax_sampling_survives_a_certain_parent():
    similarity, embeddings = a_case()
    plan = plan_softmax_sampled(candidates(*embeddings, **SIZES), sampling_temperature=1e-6)
    assert (plan.base >= 0).all()
    assert (plan.base[:, :30] != plan.partner[:, :30]).all()
    assert torch.equal(plan.base[:, 30:], similarity.argmax(1, keepdim=True).expand(5, 15))


@pytest.mark.parametrize("tau", [1e-6, 1e-3, 3e-3, 1e-2, 0.1])
def test_softmax_sampling_draws_the_second_parent_from_the_softmax_without_the_first(tau):
    similarity = torch.tensor([[0.9, 0.3, 0.5, 0.49, 0.1], [0.2, 0.21, 0.8, 0.7, 0.79]]).double()
    points = 4000
    counts = {"num_hardest": 5, "num_pairs": points, "num_with_query": 0}
    plan = plan_softmax_sampled(
        Candidates(logits=similarity / 0.25, temperature=0.25, **counts), sampling_temperature=tau
    )
    for row in range(2):
        for first in plan.base[row].unique():
            second = plan.partner[row, plan.base[row] == first]
            masked = similarity[row].clone()
            masked[first] = -math.inf
            p = (masked / tau).softmax(dim=0)
            seen = torch.bincount(second, minlength=5) / len(second)
            assert (seen - p).abs().max() < 5 * math.sqrt(0.25 / len(second))


def synthetic_in_top(plan, similarity, embeddings, row, made) -> int:
    """Synthetic points among the N largest logits, if only the columns `made` exist."""
    points = contrast(*embeddings[:3], plan, temperature=1.0).synthetic[row]
    logits = [(float(value), False) for value in similarity[row].topk(20).values]
    logits += [(float(points[column]), True) for column in made]
    return sum(kind for _, kind in sorted(logits, reverse=True)[:20])


@pytest.mark.parametrize("percentage", [0.0, 10.0, 33.0, 60.0])
@pytest.mark.parametrize(("num_pairs", "num_with_query"), [(60, 60), (10, 60), (40, 5)])
def test_fixed_percentage_stops_as_soon_as_it_is_reached(percentage, num_pairs, num_with_query):
    similarity, embeddings = a_case()
    options = {"num_hardest": 20, "num_pairs": num_pairs, "num_with_query": num_with_query}
    plan = plan_fixed_percentage(
        candidates(*embeddings, **options, generator=seeded()), percentage=percentage
    )
    whole = plan_mochi(similarity, **options, generator=seeded())
    order = []  # alternating: one pair, one with the query
    for turn in range(max(num_pairs, num_with_query)):
        order += [turn] if turn < num_pairs else []
        order += [num_pairs + turn] if turn < num_with_query else []
    target = math.ceil(20 * percentage / 100)
    for row in range(5):
        expected = next(
            (
                number
                for number in range(len(order) + 1)
                if synthetic_in_top(whole, similarity, embeddings, row, order[:number]) >= target
            ),
            len(order),
        )
        made = (plan.base[row] >= 0).nonzero().flatten().tolist()
        assert made == sorted(order[:expected])


def test_a_falling_percentage_makes_fewer_points():
    _, embeddings = a_case()
    counts = {"num_hardest": 20, "num_pairs": 100, "num_with_query": 100}
    made = []
    for epoch in (0, 50, 100):
        options = {**counts, "generator": seeded()}
        percentage = decreasing(epoch, 100, start=60.0, end=0.0)
        plan = plan_fixed_percentage(candidates(*embeddings, **options), percentage=percentage)
        made.append(int((plan.base >= 0).sum()))
        options = {**counts, "generator": seeded(), "progress": epoch / 100}
        by_progress = plan_fixed_percentage(
            candidates(*embeddings, **options), percentage=60.0, percentage_end=0.0
        )
        assert torch.equal(by_progress.base, plan.base)
    assert made[0] > made[1] > made[2] == 0


def test_dropped_negatives_are_the_hardest_or_all():
    similarity, embeddings = a_case()
    exclude = torch.rand(5, 200) < 0.5
    allowed = candidates(*embeddings, **SIZES)
    assert dropped_negatives(allowed, "keep") is None
    assert dropped_negatives(allowed, "drop_all").all()
    dropped = dropped_negatives(candidates(*embeddings, **SIZES, exclude=exclude), "drop_hardest")
    assert (dropped.sum(dim=1) == 20).all()
    assert not (dropped & exclude).any()
    highest_kept = similarity.masked_fill(exclude | dropped, -9).amax(dim=1)
    assert (similarity.masked_fill(~dropped, 9).amin(dim=1) > highest_kept).all()


@given(seed=st.integers(0, 1000), hidden=st.sampled_from([0.9, 0.97, 1.0]))
def test_all_allowed_negatives_are_dropped_where_they_are_fewer_than_n(seed, hidden):
    torch.manual_seed(seed)
    _, embeddings = a_case(batch=4, width=40)
    exclude = torch.rand(4, 40) < hidden
    few = (~exclude).sum(dim=1) <= 20
    dropped = dropped_negatives(candidates(*embeddings, **SIZES, exclude=exclude), "drop_hardest")
    assert torch.equal(dropped[few], ~exclude[few])


def test_ranked_by_key_drops_the_keys_hardest_which_it_mixes():
    similarity, embeddings = a_case()
    loss = MochiLoss(**SIZES, strategy="ranked-by-key", real_negatives="drop_hardest")
    ours, plan = loss.contrast(*embeddings, generator=seeded())
    by_key = hardest_negatives(embeddings.key @ embeddings.negatives.T, 20).positions
    mixed = torch.zeros_like(similarity, dtype=torch.bool).scatter_(1, by_key, True)
    expected = contrast(*embeddings[:3], plan, temperature=0.2, exclude=mixed)
    assert torch.allclose(ours.per_query, expected.per_query)


def test_a_transformation_drops_the_hardest_of_the_vectors_that_it_made():
    _, embeddings = a_case()
    exclude = torch.rand(5, 200) < 0.5
    loss = MochiLoss(**SIZES, strategy="mixed-queue", real_negatives="drop_hardest")
    ours, _ = loss.contrast(*embeddings[:3], exclude, generator=seeded())
    changed, hidden = loss.mixing.transformation.transform(embeddings, exclude, seeded())
    real = changed.query @ changed.negatives.T
    allowed = real.masked_fill(hidden, -9)
    dropped = torch.zeros_like(hidden).scatter_(1, allowed.topk(20, dim=1).indices, True)
    assert torch.equal(ours.exclude, hidden | dropped)
