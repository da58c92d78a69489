"""Eq. 1 and 2 with synthetic points: the closed form against its definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, normalize

import hardmix.mixing.infonce
from hardmix import (
    QUERY,
    STRATEGIES,
    Embeddings,
    InputError,
    MixPlan,
    contrast,
    materialize,
    plan_mochi,
)
from mixing_cases import any_plan, device_path
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
    assert not any(part.requires_grad for part in outcome[2:])


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
    monkeypatch.setattr("hardmix.mixing.closed_form._ROW_DOTS", None)
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
    monkeypatch.setattr("hardmix.mixing.ranking.CHUNK_ELEMENTS", 2 * 200)
    monkeypatch.setattr("hardmix.mixing.closed_form.CHUNK_PAIRS", 7)
    assert all(torch.allclose(a, b, atol=1e-14) for a, b in zip(whole, both(), strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_overwriting_changes_no_number(masked):
    query, key, negatives, plan = one_case()
    exclude = torch.rand(6, 200) < 0.2 if masked else None

    def both(overwrite: bool):
        outcome = contrast(
            query, key, negatives, plan, temperature=0.2, exclude=exclude, overwrite=overwrite
        )
        return outcome, outcome.per_query, *torch.autograd.grad(outcome.loss, query)

    kept, overwritten = both(False), both(True)
    assert kept[0].real.shape == (6, 200)
    assert overwritten[0].real.shape == (6, 0)
    assert all(torch.equal(a, b) for a, b in zip(kept[1:], overwritten[1:], strict=True))


def test_given_similarities_and_computed_ones_agree():
    query, key, negatives, plan = one_case(torch.float32)
    similarity = (query @ negatives.T).detach()
    a = contrast(query, key, negatives, plan, temperature=0.2)
    b = contrast(query, key, negatives, plan, temperature=0.2, similarity=similarity)
    assert torch.equal(a.per_query, b.per_query)


def test_nothing_is_tracked_without_grad():
    query, key, negatives, plan = one_case()
    with torch.no_grad():
        assert not contrast(query, key, negatives, plan, temperature=0.2).loss.requires_grad


def reference_loss(query, key, negatives, plan, temperature, through_query=False):
    """Eq. 1 with every vector made, for PyTorch to differentiate as often as one likes."""
    points = materialize(plan, query if through_query else query.detach(), key, negatives)
    logits = torch.cat(
        [
            (query * key).sum(dim=1, keepdim=True),
            query @ negatives.T,
            torch.einsum("bd,bsd->bs", query, points),
        ],
        dim=1,
    )
    return -(logits / temperature).log_softmax(dim=1)[:, 0]


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
    made = reference_loss(normalize(raw, dim=1), key, negatives, plan, tau, through_query)
    theirs = twice(made)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


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


def test_compiled_equals_eager():
    query, key, negatives, plan = one_case(torch.float32)

    def step(q):
        return hardmix.contrast(q, key, negatives, plan, temperature=0.2, check=False).loss

    compiled = torch.compile(step, backend="aot_eager")
    (ours,) = torch.autograd.grad(compiled(query), query)
    (eager,) = torch.autograd.grad(step(query), query)
    assert torch.allclose(ours, eager, atol=1e-7)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategys_plan_is_evaluated_exactly(name):
    query, key, negatives = unit(3, 8), unit(3, 8), unit(40, 8)
    exclude = torch.rand(3, 40) < 0.3
    plan = STRATEGIES[name](
        query @ negatives.T,
        num_hardest=12,
        num_pairs=10,
        num_with_query=6,
        exclude=exclude,
        embeddings=Embeddings(query, key, negatives),
    )
    expected, _ = loss_and_gradient(query, key, negatives, plan, 0.2, exclude)
    ours = contrast(query, key, negatives, plan, temperature=0.2, exclude=exclude).per_query
    assert torch.allclose(ours, expected, rtol=1e-10)
