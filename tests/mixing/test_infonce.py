"""Eq. 1 and 2 with synthetic points: the closed form against its definition."""

import math
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch.nn.functional import cross_entropy, normalize

from hardmix import (
    QUERY,
    InputError,
    MemoryQueue,
    MixPlan,
    MochiLoss,
    contrast,
    materialize,
    plan_mochi,
)
from hardmix.integrations.two_tower import TwoTowerLoss
from hardmix.losses import log_mass, logits
from hardmix.mixing.infonce import infonce
from hardmix.mixing.logits import by_coefficients, by_vectors, with_points
from hardmix.mixing.ranking import row_chunks
from hardmix.strategies import STRATEGIES, plan_points
from mixing_cases import any_plan, by_plain_pytorch, candidates, device_path
from reference import loss_and_gradient, unit


@settings(max_examples=300)
@given(any_plan(), st.sampled_from([0.07, 0.2, 1.0]))
def test_loss_and_gradient_equal_the_slow_float64_loops(case, temperature):
    query, key, negatives, plan, exclude = case
    expected, gradient = loss_and_gradient(query, key, negatives, plan, temperature, exclude)
    query.requires_grad_()
    outcome = contrast(query, key, negatives, plan, temperature=temperature, exclude=exclude)
    outcome.per_query.sum().backward()
    assert torch.allclose(outcome.per_query, expected, rtol=1e-10, atol=1e-12)
    assert torch.allclose(query.grad, gradient, rtol=1e-9, atol=1e-10)


def one_case(dtype=torch.float64, batch=6, width=200, dim=32):
    query, key = unit(batch, dim, dtype=dtype), unit(batch, dim, dtype=dtype)
    negatives = unit(width, dim, dtype=dtype)
    plan = plan_mochi(query @ negatives.T, num_hardest=50, num_pairs=80, num_with_query=40)
    return query.requires_grad_(), key, negatives, plan


def materialized(query, key, negatives, plan, temperature, detach=True):
    points = materialize(plan, query.detach() if detach else query, key, negatives)
    logits = torch.cat(
        [
            (query * key).sum(dim=1, keepdim=True),
            query @ negatives.T,
            torch.einsum("bd,bsd->bs", query, points),
        ],
        dim=1,
    )
    return cross_entropy(logits / temperature, torch.zeros(len(query), dtype=torch.long))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)], ids=str
)
def test_backward_equals_autograd_through_materialized_points(dtype, tolerance):
    query, key, negatives, plan = one_case(dtype)
    (ours,) = torch.autograd.grad(
        contrast(query, key, negatives, plan, temperature=0.2).loss, query
    )
    (theirs,) = torch.autograd.grad(materialized(query, key, negatives, plan, 0.2), query)
    assert (ours - theirs).norm() <= tolerance * theirs.norm()


def test_plain_moco_is_cross_entropy_and_its_gradient_is_eq_2():
    query, key, negatives, _ = one_case()
    outcome = contrast(query, key, negatives, temperature=0.2)
    outcome.loss.backward()
    logits = torch.cat([(query * key).sum(dim=1, keepdim=True), query @ negatives.T], dim=1) / 0.2
    assert torch.allclose(outcome.loss, cross_entropy(logits, torch.zeros(6, dtype=torch.long)))
    p = logits.detach().softmax(dim=1)
    eq_2 = -((1 - p[:, :1]) * key - p[:, 1:] @ negatives) / 0.2 / 6
    assert torch.allclose(query.grad, eq_2, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_points_equal_plain_moco_bit_for_bit(dtype):
    query, key, negatives, _ = one_case(dtype)
    none = plan_mochi(query @ negatives.T, num_hardest=50, num_pairs=0, num_with_query=0)
    plain = contrast(query, key, negatives, temperature=0.2)
    empty = contrast(query, key, negatives, none, temperature=0.2)
    assert torch.equal(plain.per_query, empty.per_query)
    assert torch.equal(*(torch.autograd.grad(out.loss, query)[0] for out in (plain, empty)))


@settings(max_examples=50)
@given(any_plan())
def test_mixing_never_lowers_a_querys_loss(case):
    query, key, negatives, plan, exclude = case
    plain = contrast(query, key, negatives, temperature=0.2, exclude=exclude).per_query
    mixed = contrast(query, key, negatives, plan, temperature=0.2, exclude=exclude).per_query
    assert (mixed >= plain - 1e-12).all()


def test_similarities_are_reported_before_the_temperature_and_detached():
    query, key, negatives, plan = one_case()
    outcome = contrast(query, key, negatives, plan, temperature=0.2)
    points = materialize(plan, query.detach(), key, negatives)
    assert torch.allclose(outcome.positive, (query * key).sum(dim=1))
    assert torch.allclose(outcome.real, query @ negatives.T)
    assert torch.allclose(outcome.synthetic, torch.einsum("bd,bsd->bs", query, points))
    rest = [part for part in outcome[2:] if isinstance(part, torch.Tensor)]
    assert len(rest) >= 3
    assert not any(part.requires_grad for part in rest)


def test_an_excluded_negative_takes_no_part_but_is_still_reported():
    query, key, negatives, _ = one_case()
    exclude = torch.zeros(6, 200, dtype=torch.bool)
    exclude[:, 100:] = True
    fewer = contrast(query, key, negatives[:100], temperature=0.2)
    masked = contrast(query, key, negatives, temperature=0.2, exclude=exclude)
    assert torch.allclose(masked.per_query, fewer.per_query)
    assert torch.allclose(masked.real, query @ negatives.T)


def test_a_point_that_cannot_be_made_changes_nothing():
    query, key, negatives, plan = one_case()
    some = plan._replace(base=plan.base.clone())
    some.base[:, ::2] = -1
    kept = MixPlan(*(part[:, 1::2] for part in plan[:3]))
    a = contrast(query, key, negatives, some, temperature=0.2)
    b = contrast(query, key, negatives, kept, temperature=0.2)
    assert torch.allclose(a.per_query, b.per_query)
    assert (a.synthetic[:, ::2] == -math.inf).all()


@pytest.mark.parametrize("temperature", [1e-3, 0.01, 0.07, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_temperature_overflows(temperature, dtype):
    query, key, negatives, plan = one_case(dtype)
    outcome = contrast(query, key, negatives, plan, temperature=temperature)
    outcome.loss.backward()
    assert outcome.per_query.isfinite().all()
    assert query.grad.isfinite().all()
    double = [part.detach().double() for part in (query, key, negatives)]
    double = [normalize(part, dim=1) for part in double]
    exact = contrast(*double, plan, temperature=temperature).per_query
    assert torch.allclose(outcome.per_query.double(), exact, rtol=1e-4, atol=2e-6 / temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_opposite_parents_give_finite_numbers(dtype):
    row = unit(1, 16, dtype=dtype)
    negatives = torch.cat([row, -row, unit(3, 16, dtype=dtype)])
    query = torch.cat([row, -row, unit(1, 16, dtype=dtype)]).requires_grad_()
    base = torch.tensor([[0, 1, 0, 1]]).expand(3, 4)
    partner = torch.tensor([[1, 0, QUERY, QUERY]]).expand(3, 4)
    share = torch.full((3, 4), 0.5, dtype=dtype)
    plan = MixPlan(base, partner, share)
    outcome = contrast(query, unit(3, 16, dtype=dtype), negatives, plan, temperature=0.2)
    outcome.loss.backward()
    assert outcome.loss.isfinite()
    assert outcome.synthetic.abs().max() <= 1
    assert query.grad.isfinite().all()
    assert query.grad.abs().max() < 1e5


@pytest.mark.parametrize("gap", [0.5, 0.1, 0.02])
def test_nearly_opposite_parents_keep_their_digits(gap):
    """1 - 2 share (1 - share) (1 - n.n) would lose them: such sums are measured."""
    row = unit(6, 16, dtype=torch.float32)
    negatives = torch.cat([row, normalize(gap * unit(6, 16, dtype=torch.float32) - row, dim=1)])
    plan = MixPlan(
        torch.arange(6).view(6, 1), torch.arange(6, 12).view(6, 1), torch.full((6, 1), 0.5)
    )
    query, key = unit(6, 16, dtype=torch.float32), unit(6, 16, dtype=torch.float32)
    found = contrast(query, key, negatives, plan, temperature=0.2).synthetic
    exact = (query.double() * materialize(plan, query, key, negatives.double())[:, 0]).sum(dim=1)
    assert torch.allclose(found[:, 0].double(), exact, rtol=1e-4, atol=1e-5)


def test_without_pytorchs_private_operation_the_numbers_are_the_same(monkeypatch):
    query, key, negatives, plan = one_case()
    expected = contrast(query, key, negatives, plan, temperature=0.2)
    monkeypatch.setattr("hardmix.mixing.logits._ROW_DOTS", None)
    found = contrast(query, key, negatives, plan, temperature=0.2)
    assert torch.allclose(found.synthetic, expected.synthetic, atol=1e-14)
    assert torch.allclose(found.per_query, expected.per_query, atol=1e-13)


def test_gradient_through_the_query_inside_a_point_is_autograds():
    query, key, negatives, plan = one_case()
    raw = (3 * query.detach()).requires_grad_()  # normalisation leaves the tangential part only

    def gradient(loss_of_unit_query) -> torch.Tensor:
        return torch.autograd.grad(loss_of_unit_query(normalize(raw, dim=1)), raw)[0]

    ours = gradient(
        lambda q: contrast(q, key, negatives, plan, temperature=0.2, through_query=True).loss
    )
    theirs = gradient(lambda q: materialized(q, key, negatives, plan, 0.2, detach=False))
    constant = gradient(lambda q: contrast(q, key, negatives, plan, temperature=0.2).loss)
    assert torch.allclose(ours, theirs, atol=1e-14)
    assert not torch.allclose(ours, constant, atol=1e-6)


def test_gradients_reach_keys_and_real_negatives_but_pass_no_point():
    query, key, negatives, plan = one_case()
    key.requires_grad_()
    negatives.requires_grad_()
    outcome = contrast(query, key, negatives, plan, temperature=0.2)
    ours = torch.autograd.grad((outcome.per_query * torch.arange(6.0)).sum(), [key, negatives])
    points = materialize(plan, query, key, negatives).detach()
    logits = torch.cat(
        [
            (query * key).sum(dim=1, keepdim=True),
            query @ negatives.T,
            torch.einsum("bd,bsd->bs", query, points),
        ],
        dim=1,
    )
    losses = cross_entropy(logits / 0.2, torch.zeros(6, dtype=torch.long), reduction="none")
    theirs = torch.autograd.grad((losses * torch.arange(6.0)).sum(), [key, negatives])
    assert all(torch.allclose(a, b, atol=1e-13) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_and_half_inputs_are_computed_in_float32(half):
    query, key, negatives, plan = one_case(torch.float32)
    exact = contrast(query, key, negatives, plan, temperature=0.2)
    with torch.autocast("cpu", dtype=half):
        inside = contrast(query, key, negatives, plan, temperature=0.2)
    assert torch.equal(exact.per_query, inside.per_query)
    assert inside.real.dtype == torch.float32
    rounded = query.detach().to(half).requires_grad_()
    outcome = contrast(rounded, key.to(half), negatives, plan, temperature=0.2)
    outcome.loss.backward()
    assert outcome.loss.dtype == torch.float32
    assert rounded.grad.dtype == half
    assert torch.allclose(outcome.per_query, exact.per_query, atol=5e-2)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_backward_inside_autocast_is_computed_in_float32(half):
    vectors = one_case(torch.float32)
    query, key, negatives, plan = [part.requires_grad_() for part in vectors[:3]] + [vectors[3]]
    wanted = [query, key, negatives]
    loss = contrast(query, key, negatives, plan, temperature=0.2).loss
    outside = torch.autograd.grad(loss, wanted, retain_graph=True)
    with torch.autocast("cpu", dtype=half):
        inside = torch.autograd.grad(loss, wanted)
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


def test_chunking_changes_no_number(monkeypatch):
    query, key, negatives, plan = one_case()
    negatives.requires_grad_()
    exclude = torch.rand(6, 200) < 0.2

    def both():
        outcome = contrast(query, key, negatives, plan, temperature=0.2, exclude=exclude)
        return outcome.per_query, *torch.autograd.grad(outcome.loss, [query, negatives])

    whole = both()
    # Two rows at a time, one of them in the cache, seven pairs at a time.
    monkeypatch.setattr("hardmix.mixing.infonce.row_chunks", partial(row_chunks, elements=2 * 200))
    monkeypatch.setattr("hardmix.mixing.infonce.CACHE_ELEMENTS", 200)
    monkeypatch.setattr("hardmix.mixing.logits._ROW_DOTS", None)
    monkeypatch.setattr("hardmix.mixing.logits.CHUNK_PAIRS", 7)
    assert all(torch.allclose(a, b, atol=1e-14) for a, b in zip(whole, both(), strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_overwriting_changes_no_number(masked):
    query, key, negatives, plan = one_case()
    exclude = torch.rand(6, 200) < 0.2 if masked else None

    def both(overwrite: bool):
        made = logits(query, key, negatives, plan, temperature=0.2)
        before = made.real.detach().clone()
        per_query = infonce(made.positive, log_mass(made, exclude, overwrite=overwrite))
        assert torch.equal(made.real, before) is not overwrite
        return per_query, *torch.autograd.grad(per_query.mean(), query)

    outcome = contrast(query, key, negatives, plan, temperature=0.2, exclude=exclude)
    assert outcome.real.shape == (6, 200)
    assert torch.equal(both(False)[0], outcome.per_query)
    assert all(torch.equal(a, b) for a, b in zip(both(False), both(True), strict=True))


def test_points_added_to_logits_that_are_there_change_no_bit():
    query, key, negatives, plan = one_case(torch.float32)
    at_once = logits(query, key, negatives, plan, temperature=0.2)
    added = with_points(logits(query, key, negatives, temperature=0.2), plan)
    a, b = (infonce(each.positive, log_mass(each)) for each in (at_once, added))
    assert torch.equal(a, b)
    assert torch.equal(a, contrast(query, key, negatives, plan, temperature=0.2).per_query)


@settings(max_examples=150)
@given(any_plan(), st.booleans(), st.booleans())
def test_both_ways_from_a_plan_to_logits_are_its_vectors(case, with_own, through_query):
    query, key, negatives, plan, _ = case
    assume(plan.base.shape[1] > 0)
    own = None
    if with_own and len(negatives) > 2:  # the last negatives are those of each query's own
        own = negatives[-2:].expand(len(query), -1, -1)
        negatives = negatives[:-2]
    raw = (3 * query).requires_grad_()
    query = normalize(raw, dim=1)
    made = logits(query, key, negatives, temperature=0.2, own=own)
    coefficients, points = by_coefficients(made, plan, through_query)
    vectors, none = by_vectors(made, plan, through_query)
    assert none is None
    table = negatives if own is None else torch.cat([negatives, own[0]])
    explicit = materialize(plan, query if through_query else query.detach(), key, table)
    explicit = torch.einsum("bd,bsd->bs", query, explicit) / 0.2
    there = plan.base >= 0
    factor = torch.randn(there.shape, dtype=torch.float64) * there
    linear = points.logits(made.real)
    for found in (coefficients, linear.detach(), vectors.detach()):
        torch.testing.assert_close(found[there], explicit[there].detach(), rtol=1e-9, atol=1e-9)
    expected, *gradients = (
        torch.autograd.grad((factor * each).sum(), raw, retain_graph=True)[0]
        for each in (explicit, linear, vectors)
    )
    for gradient in gradients:
        torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-8)


def test_nothing_is_tracked_without_grad():
    query, key, negatives, plan = one_case()
    with torch.no_grad():
        assert not contrast(query, key, negatives, plan, temperature=0.2).loss.requires_grad


@pytest.mark.parametrize("through_query", [False, True])
@pytest.mark.parametrize("of", ["loss", "per_query"])
def test_second_derivatives_are_autograds(of, through_query):
    query, key, negatives, plan = one_case()
    raw = (3 * query.detach()).requires_grad_()
    tau = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)

    def twice(per_query):
        loss = per_query.mean() if of == "loss" else (per_query * torch.arange(6.0)).sum()
        penalty = sum(
            each.square().sum() for each in torch.autograd.grad(loss, [raw, tau], create_graph=True)
        )
        return torch.autograd.grad(penalty, [raw, tau])

    options = {"temperature": tau, "through_query": through_query}
    ours = twice(contrast(normalize(raw, dim=1), key, negatives, plan, **options).per_query)
    unit_query = normalize(raw, dim=1)
    theirs = twice(
        by_plain_pytorch(unit_query, key, negatives, plan, tau, through_query=through_query)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


class Recorded:
    """MoCHi's strategy, which keeps its plans."""

    def __init__(self) -> None:
        self.plans: list[MixPlan] = []

    def __call__(self, candidates):
        self.plans.append(plan_points(candidates))
        return self.plans[-1]


def in_batch_by_plain_pytorch(query, key, plan, temperature):
    own_key = torch.eye(len(query), dtype=torch.bool)
    unit_query, unit_key = normalize(query, dim=1), normalize(key, dim=1)
    return by_plain_pytorch(unit_query, unit_key, unit_key, plan, temperature, own_key).mean()


def with_both_in_the_negatives(first, second):
    query, key = normalize(first, dim=1), normalize(second, dim=1)
    negatives = torch.cat([query, key])
    plan = plan_mochi(query @ negatives.T, num_hardest=8, num_pairs=6, num_with_query=4)
    ours = contrast(query, key, negatives, plan, temperature=0.2).loss
    return ours, by_plain_pytorch(query, key, negatives, plan, 0.2).mean()


def with_normalised_keys_as_negatives(first, second):
    strategy, query, key = Recorded(), normalize(first, dim=1), normalize(second, dim=1)
    loss = MochiLoss(8, 6, 4, strategy=strategy)
    ours = loss(query, key, key, normalised=True)
    return ours, by_plain_pytorch(query, key, key, strategy.plans[0], 0.2).mean()


def in_batch(first, second):
    strategy = Recorded()
    ours = MochiLoss(8, 6, 4, strategy=strategy).in_batch(first, second)
    return ours, in_batch_by_plain_pytorch(first, second, strategy.plans[0], 0.2)


def in_both_directions(first, second, make):
    strategy = Recorded()
    ours = make(strategy)(first, second)
    there, back = strategy.plans
    there = in_batch_by_plain_pytorch(first, second, there, 0.2)
    return ours, (there + in_batch_by_plain_pytorch(second, first, back, 0.2)) / 2


def symmetric(first, second):
    return in_both_directions(
        first, second, lambda each: MochiLoss(8, 6, 4, strategy=each).symmetric
    )


def two_towers(first, second):
    counts = {"num_hardest": 8, "num_pairs": 6, "num_with_query": 4}
    scale = torch.tensor(5.0, dtype=torch.float64)
    return in_both_directions(
        first,
        second,
        lambda each: partial(TwoTowerLoss(strategy=each, **counts), logit_scale=scale),
    )


SHARED = {
    "contrast(q, k, cat([q, k]))": with_both_in_the_negatives,
    "normalised=True": with_normalised_keys_as_negatives,
    "in_batch": in_batch,
    "symmetric": symmetric,
    "TwoTowerLoss": two_towers,
}


@pytest.mark.parametrize("one_piece", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_derivatives_with_a_graph_where_key_and_negatives_share_a_tensor(name, one_piece):
    inputs = [torch.randn(9, 16, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    with device_path(one_piece):
        ours, theirs = SHARED[name](*inputs)
        once = torch.autograd.grad(ours, inputs, retain_graph=True)
        first = torch.autograd.grad(ours, inputs, create_graph=True)
        expected = torch.autograd.grad(theirs, inputs, create_graph=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)
        torch.testing.assert_close(first, once, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(first, expected, rtol=1e-12, atol=1e-13)
        second, expected = (
            torch.autograd.grad(
                sum(each.square().sum() for each in gradients), inputs, retain_graph=True
            )
            for gradients in (first, expected)
        )
    torch.testing.assert_close(second, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("one_piece", [False, True])
def test_second_derivatives_of_a_query_without_allowed_negatives_are_zero(one_piece):
    query, key, negatives, _ = one_case()
    exclude = torch.rand(6, 200) < 0.3
    exclude[2] = True
    options = {"num_hardest": 50, "num_pairs": 80, "num_with_query": 40, "exclude": exclude}
    plan = plan_mochi(query.detach() @ negatives.T, **options)

    def twice(per_query):
        (gradient,) = torch.autograd.grad(per_query.sum(), query, create_graph=True)
        return gradient.detach(), *torch.autograd.grad(gradient.square().sum(), query)

    with device_path(one_piece):
        outcome = contrast(query, key, negatives, plan, temperature=0.2, exclude=exclude)
        ours = twice(outcome.per_query)
    there = torch.arange(6) != 2
    parts = MixPlan(*(part[there] for part in plan[:3]))
    rest = query[there], key[there], negatives, parts, 0.2, exclude[there]
    theirs = twice(by_plain_pytorch(*rest))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    assert all((each[2] == 0).all() for each in ours)


@pytest.mark.parametrize("one_piece", [False, True])
def test_a_second_backward_pass_gives_the_same_gradient(one_piece):
    vectors = one_case()
    query, key, negatives, plan = [part.requires_grad_() for part in vectors[:3]] + [vectors[3]]
    with device_path(one_piece):
        loss = contrast(query, key, negatives, plan, temperature=0.2).loss
        first = torch.autograd.grad(loss, [query, key, negatives], retain_graph=True)
        second = torch.autograd.grad(loss, [query, key, negatives])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("strategy", ["mochi", "synco"])
def test_the_queue_may_be_written_between_the_loss_and_its_backward_pass(strategy):
    raw = torch.randn(6, 16, requires_grad=True)
    key, keys = torch.randn(6, 16), torch.randn(90, 16)
    gradients = []
    for written in (False, True):
        memory = MemoryQueue.prefilled(keys)
        generator = torch.Generator().manual_seed(1)
        loss = MochiLoss(20, 30, 10, strategy=strategy)(raw, key, memory, generator=generator)
        if written:
            memory.enqueue(torch.randn(90, 16))
        gradients.append(torch.autograd.grad(loss, raw)[0])
    assert torch.equal(*gradients)


def test_a_second_derivative_after_the_queue_was_overwritten_is_refused():
    query, key, negatives, plan = one_case()
    loss = contrast(query, key, negatives, plan, temperature=0.2).loss
    negatives[0] = negatives[1]
    with pytest.raises(InputError, match=r"create_graph=True.*before memory\.enqueue"):
        torch.autograd.grad(loss, query, create_graph=True)
    assert torch.autograd.grad(loss, query)[0].isfinite().all()


@settings(max_examples=60)
@given(any_plan(), st.floats(0.05, 2.0), st.booleans(), st.booleans())
def test_a_learnt_temperature_gets_autograds_gradient(case, value, through_query, one_piece):
    query, key, negatives, plan, exclude = case
    tau = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    options = {"exclude": exclude, "through_query": through_query}
    with device_path(one_piece):
        ours = contrast(query, key, negatives, plan, temperature=tau, **options).per_query
        (gradient,) = torch.autograd.grad(ours.sum(), tau)
    step = 1e-6 * value
    with device_path(False):
        above, below = (
            contrast(query, key, negatives, plan, temperature=value + s, **options).per_query.sum()
            for s in (step, -step)
        )
        same = contrast(query, key, negatives, plan, temperature=value, **options).per_query
    assert torch.allclose(gradient, (above - below) / (2 * step), rtol=1e-5, atol=1e-6)
    assert torch.allclose(ours, same, rtol=1e-12)


def test_a_tensor_and_a_number_are_the_same_temperature_bit_for_bit():
    query, key, negatives, plan = one_case(torch.float32)
    number = contrast(query, key, negatives, plan, temperature=0.25)
    learnt = torch.nn.Parameter(torch.tensor([0.25]))
    tensor = contrast(query, key, negatives, plan, temperature=learnt)
    assert torch.equal(number.per_query, tensor.per_query)
    assert torch.equal(*(torch.autograd.grad(each.loss, query)[0] for each in (number, tensor)))


@pytest.mark.slow
def test_compiled_equals_eager():
    query, key, negatives, plan = one_case(torch.float32)

    def step(q):
        return contrast(q, key, negatives, plan, temperature=0.2).loss

    compiled = torch.compile(step, backend="aot_eager")
    (ours,) = torch.autograd.grad(compiled(query), query)
    (eager,) = torch.autograd.grad(step(query), query)
    assert torch.allclose(ours, eager, atol=1e-7)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategys_plan_is_evaluated_exactly(name):
    query, key, negatives = unit(3, 8), unit(3, 8), unit(40, 8)
    exclude = torch.rand(3, 40) < 0.3
    chosen = STRATEGIES[name]
    counts = {"num_hardest": 12, "num_pairs": 10, "num_with_query": 6}
    plan = chosen.strategy(
        candidates(query, key, negatives, exclude=exclude, rank_by=chosen.rank_by, **counts)
    )
    expected, _ = loss_and_gradient(query, key, negatives, plan, 0.2, exclude)
    ours = contrast(query, key, negatives, plan, temperature=0.2, exclude=exclude).per_query
    assert torch.allclose(ours, expected, rtol=1e-10)
