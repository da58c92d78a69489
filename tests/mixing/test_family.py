"""Weights, denominators and filters: each against its paper's formula, and in its limits."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.functional import normalize

import family_reference as slow
from hardmix import (
    InputError,
    MemoryQueue,
    MochiLoss,
    contrast,
    materialize,
    negative_mass,
    plan_mochi,
)
from hardmix.losses import (
    DENOMINATORS,
    FILTERS,
    WEIGHTS,
    Denominator,
    WeightLine,
    above_positive,
    debiased,
    decoupled_weighted,
    dual_temperature,
    given_weights,
    hardness_weights,
    hcl,
    hcl_weights,
    log_mass,
    logits,
    ring_weights,
    same_labels,
    share_of_positive,
)
from hardmix.mixing.family import plain
from mixing_cases import any_plan, device_path, family, logits_with
from reference import unit

FORMULAS = {
    "infonce": slow.infonce,
    "decoupled": slow.decoupled,
    "debiased": slow.debiased,
    "dual-temperature": slow.dual_temperature,
}
WEIGHT_FORMULAS = {
    "hcl": (hcl_weights(0.7), partial(slow.hcl_weights, beta=0.7)),
    "hardness": (hardness_weights(3.0), partial(slow.hardness_weights, alpha=3.0)),
    "ring": (ring_weights(10, 80), partial(slow.ring_weights, low=10, high=80)),
}


@st.composite
def any_case(draw):
    """Any plan, with or without negatives of each query's own."""
    query, key, negatives, plan, exclude = draw(any_plan())
    own = None
    if draw(st.booleans()):
        own = unit(len(query), draw(st.integers(1, 3)), query.shape[1])
        plan = plan._replace(
            base=_with_own(plan.base, len(negatives), own.shape[1]),
            partner=_with_own(plan.partner, len(negatives), own.shape[1]),
        )
        if exclude is not None:
            exclude = torch.cat([exclude, torch.rand(own.shape[:2]) < 0.3], dim=1)
    return query, key, negatives, plan, exclude, own


def _with_own(columns, num_shared, num_own):
    """Some of the rows become own ones."""
    there = (columns >= 0) & (torch.rand(columns.shape) < 0.4)
    return torch.where(
        there, torch.randint_like(columns, num_shared, num_shared + num_own), columns
    )


def log_weights_of(weights, case, tau):
    query, key, negatives, _, exclude, own = case
    return weights(logits(query, key, negatives, temperature=tau, own=own), exclude)


def compare(case, formula, one_piece, tau, **options):
    """Our loss and gradients of everything, against a formula for the queries of a batch."""
    query, key, negatives, plan, exclude, own = case
    tau = torch.tensor(tau, dtype=torch.float64, requires_grad=True)
    inputs = [query, key, negatives, tau] + ([] if own is None else [own])
    for each in inputs:
        each.requires_grad_()
    with device_path(one_piece):
        ours = family(
            query, key, negatives, plan, temperature=tau, exclude=exclude, own=own, **options
        ).per_query
        factor = torch.arange(1.0, len(query) + 1)
        gradients = torch.autograd.grad((factor * ours).sum(), inputs)
    theirs = formula(slow.queries(query, key, negatives, plan, exclude, own), tau)
    expected = torch.autograd.grad((factor * theirs).sum(), inputs, allow_unused=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
    for mine, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(
            mine, torch.zeros_like(mine) if other is None else other, rtol=1e-6, atol=1e-8
        )


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=40)
@given(any_case(), st.floats(0.1, 1.0), st.booleans())
def test_denominators_are_their_papers_formulas(name, case, tau, one_piece):
    compare(case, slow.of_each(FORMULAS[name]), one_piece, tau, denominator=name)


@settings(max_examples=40)
@given(any_case(), st.floats(0.1, 1.0), st.sampled_from([0.3, 0.5]), st.booleans())
def test_the_weighted_decoupled_loss_is_its_papers_formula(case, tau, sigma, one_piece):
    formula = partial(slow.decoupled_weighted, sigma=sigma)
    compare(case, formula, one_piece, tau, denominator=decoupled_weighted(sigma))


@pytest.mark.parametrize("denominator", ["infonce", "debiased"])
@pytest.mark.parametrize("name", WEIGHT_FORMULAS)
@settings(max_examples=30)
@given(any_case(), st.floats(0.15, 1.0), st.booleans())
def test_weights_are_their_papers_formulas(name, denominator, case, tau, one_piece):
    weights, formula = WEIGHT_FORMULAS[name]
    log_weights = log_weights_of(weights, case, tau)

    def weighted(of, at):
        return FORMULAS[denominator](of, at, formula(of, tau))

    options = {"log_weights": log_weights, "denominator": denominator}
    compare(case, slow.of_each(weighted), one_piece, tau, **options)


@settings(max_examples=40)
@given(any_case(), st.floats(0.15, 1.0), st.sampled_from([0.5, 1.0, 2.0]), st.booleans())
def test_hcl_with_gradients_through_its_weights_is_the_published_criterion(
    case, tau, beta, one_piece
):
    *rest, plan, exclude, own = case
    plan = plan._replace(weight=None)  # the criterion knows no further weights
    _published_hcl((*rest, plan, exclude, own), tau, beta, one_piece)


def _published_hcl(case, tau, beta, one_piece):
    query, key, negatives, plan, exclude, own = case
    query.requires_grad_()
    with device_path(one_piece):
        ours = family(
            query,
            key,
            negatives,
            plan,
            temperature=tau,
            exclude=exclude,
            own=own,
            denominator=hcl(beta, 0.1),
        ).per_query
        (gradient,) = torch.autograd.grad(ours.sum(), query)
    each_query = slow.queries(query, key, negatives, plan, exclude, own)
    theirs = torch.stack([slow.hcl_as_published(of, tau, beta, 0.1) for of in each_query])
    (expected,) = torch.autograd.grad(theirs.sum(), query)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def one_case():
    query, key, negatives = unit(6, 16), unit(6, 16), unit(50, 16)
    plan = plan_mochi(query @ negatives.T, num_hardest=20, num_pairs=12, num_with_query=5)
    return query.requires_grad_(), key, negatives, plan


LIMITS = {
    "debiased, tau+ = 0": (debiased(0.0), "infonce"),
    "dual temperature, factor 1": (dual_temperature(1.0), "infonce"),
    "hcl, beta = 0": (hcl(0.0, 0.1), debiased(0.1)),
    "hcl, beta = tau+ = 0": (hcl(0.0, 0.0), "infonce"),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_denominators_in_their_limits_are_what_they_generalise_bit_for_bit(limit):
    query, key, negatives, plan = one_case()
    found = []
    for denominator in LIMITS[limit]:
        loss = family(query, key, negatives, plan, temperature=0.2, denominator=denominator).loss
        found.append((loss, *torch.autograd.grad(loss, query)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "weights",
    [hcl_weights(0.0), hardness_weights(0.0), ring_weights(0, 100)],
    ids=["hcl", "hardness", "ring"],
)
def test_weights_in_their_limits_change_no_bit(weights):
    query, key, memory = torch.randn(6, 16), torch.randn(6, 16), MemoryQueue.prefilled(unit(90, 16))
    small = {"num_hardest": 20, "num_pairs": 30, "num_with_query": 10}
    found = []
    for chosen in ("none", weights):
        generator = torch.Generator().manual_seed(1)
        loss = MochiLoss(**small, weights=chosen)(query, key, memory, generator=generator)
        found.append(loss)
    assert torch.equal(*found)


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_second_derivatives_of_the_family(denominator):
    query, key, negatives, plan = one_case()
    raw = query.detach().requires_grad_()

    def twice(per_query):
        (gradient,) = torch.autograd.grad(per_query.sum(), raw, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), raw)[0]

    options = {"temperature": 0.3, "denominator": denominator}
    ours = twice(family(normalize(raw, dim=1), key, negatives, plan, **options).per_query)
    formulas = FORMULAS | {"supcon-in": slow.infonce, "hcl": slow.hcl_as_published}
    formulas = {name: slow.of_each(formula) for name, formula in formulas.items()}
    formulas["decoupled-weighted"] = slow.decoupled_weighted
    each_query = slow.queries(normalize(raw, dim=1), key, negatives, plan)
    theirs = twice(formulas[denominator](each_query, 0.3))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_simcses_alpha_weighs_the_given_negatives_alone():
    query, key, negatives, own = unit(4, 8), unit(4, 8), unit(9, 8), unit(4, 2, 8)
    loss = MochiLoss(5, 0, 0, weights=given_weights(1.5))
    ours = loss(query, key, negatives, own_negatives=own, reduction="none")
    logits = torch.cat(
        [
            (query * key).sum(dim=1, keepdim=True) / 0.2,
            query @ negatives.T / 0.2,
            torch.einsum("bd,bmd->bm", query, own) / 0.2 + 1.5,
        ],
        dim=1,
    )
    assert torch.allclose(ours, -logits.log_softmax(dim=1)[:, 0])


def test_a_ring_leaves_out_what_is_below_and_above_it():
    similarity = torch.arange(101.0).unsqueeze(0)[:, torch.randperm(101)] / 101
    kept = ring_weights(10, 90)(logits_with(similarity, torch.zeros(1)), None) == 0
    assert (similarity[kept] * 101).round().sort().values.tolist() == list(range(11, 91))


@pytest.mark.parametrize("one_piece", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_ring_with_ties_keeps_exactly_its_band(masked, one_piece):
    similarity = torch.randint(0, 5, (7, 40)) / 5
    exclude = torch.rand(7, 40) < 0.2 if masked else None
    with device_path(one_piece):
        logs = ring_weights(10, 50)(logits_with(similarity, torch.zeros(7)), exclude)
    for row in range(7):
        slots = list(range(40)) if exclude is None else (~exclude[row]).nonzero().flatten().tolist()
        band = slow.ring(similarity[row, slots].tolist(), 10, 50)
        assert len(band) == 16 or masked
        kept = (logs[row, slots] == 0).nonzero().flatten().tolist()
        assert kept == sorted(band)
        assert (logs[row, slots] == -math.inf).sum() == len(slots) - len(band)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_sums_in_cache_sized_parts_are_those_of_whole_rows(masked, added, mixed, monkeypatch):
    monkeypatch.setattr("hardmix.mixing.infonce.CACHE_ELEMENTS", 64)
    query, key, negatives = (unit(rows, 16, dtype=torch.float32) for rows in (7, 7, 30))
    exclude = (torch.rand(7, 30) < 0.4).index_fill(0, torch.tensor([2]), True) if masked else None
    more = torch.randn(7, 30) if added else None
    counts = {"num_hardest": 20, "num_pairs": 12, "num_with_query": 5}
    plan = plan_mochi(query @ negatives.T, exclude=exclude, **counts) if mixed else None
    made = logits(query.requires_grad_(), key, negatives, plan, temperature=0.2)
    kept = made.real.detach().clone()
    terms = kept + (more if added else 0)
    terms = terms.masked_fill(exclude, -torch.inf) if masked else terms
    terms = torch.cat([terms, made.synthetic], dim=1)
    expected = terms.logsumexp(dim=1)
    mass = log_mass(made, exclude, more)
    torch.testing.assert_close(mass.detach(), expected)
    assert (mass[2] == -math.inf) == masked
    assert torch.equal(made.real, kept)
    overwritten = log_mass(made, exclude, more, overwrite=True)
    assert torch.equal(overwritten, mass)
    assert not torch.equal(made.real, kept)
    shares = (terms - expected.clamp(min=-1e9).unsqueeze(1)).exp()
    gradient = shares[:, :30] @ negatives
    if mixed:
        points = materialize(plan, query.detach(), key, negatives)
        gradient += torch.einsum("bs,bsd->bd", shares[:, 30:], points)
    for each in (mass, overwritten):
        (ours,) = torch.autograd.grad(each.sum(), query, retain_graph=True)
        torch.testing.assert_close(ours, gradient / 0.2, rtol=1e-5, atol=1e-5)


def test_a_line_of_weights_is_the_weights_themselves():
    query, key, negatives, plan = one_case()
    case = query, key, negatives, plan, None, None
    for weights in (hcl_weights(0.7), hardness_weights(3.0)):
        line = log_weights_of(weights, case, 0.2)
        dense = line.weights((query @ negatives.T).detach() / 0.2)
        options = {"temperature": 0.2, "denominator": "debiased"}
        both = [
            family(query, key, negatives, plan, log_weights=each, **options)
            for each in (line, dense)
        ]
        torch.testing.assert_close(both[0].per_query, both[1].per_query)
        torch.testing.assert_close(*(negative_mass(each).points for each in both))


@pytest.mark.parametrize("slope", [-100.0, -3.0, -1.0, 100.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("one_piece", [False, True])
def test_a_line_of_weights_may_fall_and_is_exact(slope, masked, one_piece):
    """The lowest similarities have the highest terms then."""
    query, key = unit(4, 8, dtype=torch.float32), unit(4, 8, dtype=torch.float32)
    negatives = unit(60, 8, dtype=torch.float32)
    exclude = torch.rand(4, 60) < 0.3 if masked else None
    loss = MochiLoss(5, 0, 0, temperature=1.0, weights=lambda *_, **__: WeightLine(slope))
    with device_path(one_piece):
        ours = loss(query.requires_grad_(), key, negatives, exclude, reduction="none")
        (gradient,) = torch.autograd.grad(ours.sum(), query)
    raw = query.detach().double().requires_grad_()
    double, terms = normalize(raw, dim=1), normalize(negatives.double(), dim=1)
    real = double @ terms.T
    real = real + slope * real.detach()
    real = real if exclude is None else real.masked_fill(exclude, -torch.inf)
    positive = (double * normalize(key.double(), dim=1)).sum(dim=1)
    exact = torch.cat([positive.unsqueeze(1), real], dim=1).logsumexp(dim=1) - positive
    (expected,) = torch.autograd.grad(exact.sum(), raw)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_falling_line_of_weights_does_not_overflow():
    axis = torch.eye(2)[:1]
    half = normalize(torch.tensor([[-0.5, 0.75**0.5]]), dim=1)
    loss = MochiLoss(2, 0, 0, temperature=1.0, weights=lambda *_, **__: WeightLine(-100.0))
    value = loss(axis, axis.roll(1, dims=1), torch.cat([half, -half]))
    assert float(value) == pytest.approx(49.5, abs=1e-4)


@pytest.mark.parametrize("one_piece", [False, True])
def test_a_denominator_of_ones_own_may_look_at_a_further_scale(one_piece):
    query, key, negatives = (unit(rows, 16) for rows in (6, 6, 50))
    exclude, seen = torch.rand(6, 50) < 0.3, []

    def focal(masses):
        seen.append(masses)
        probability = (masses.also - 0.5 * masses.key).sigmoid()
        return probability * (masses.negatives - masses.positive)

    loss = MochiLoss(
        20, 12, 5, weights=hardness_weights(3.0), denominator=Denominator(focal, also_at=0.5)
    )
    query.requires_grad_()
    with device_path(one_piece):
        outcome, plan = loss.contrast(query, key, negatives, exclude)
        (gradient,) = torch.autograd.grad(outcome.loss, query)
    raw = query.detach().requires_grad_()
    unit_query = normalize(raw, dim=1)
    points = materialize(plan, unit_query.detach(), key, negatives)
    real = (unit_query @ negatives.T / 0.2).masked_fill(exclude, -torch.inf)
    synthetic = torch.einsum("bd,bsd->bs", unit_query, points) / 0.2
    added = 3 * (unit_query @ negatives.T).detach()
    positive = (unit_query * key).sum(dim=1) / 0.2
    also, mass = (
        torch.cat([scale * real + added, scale * synthetic], dim=1).logsumexp(dim=1)
        for scale in (0.5, 1.0)
    )
    torch.testing.assert_close(seen[0].also, also.detach(), rtol=1e-12, atol=1e-12)
    assert not seen[0].also.requires_grad
    theirs = (also.detach() - 0.5 * positive).sigmoid() * (mass - positive)
    torch.testing.assert_close(outcome.per_query, theirs, rtol=1e-12, atol=1e-12)
    (expected,) = torch.autograd.grad(theirs.mean(), raw)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_what_is_kept_is_not_overwritten():
    query, key, negatives, plan = one_case()
    for denominator in DENOMINATORS:
        options = {"temperature": 0.2, "denominator": denominator, "log_weights": WeightLine(0.2)}
        outcome = family(query, key, negatives, plan, **options)
        torch.testing.assert_close(outcome.real, (query @ negatives.T).detach())
        once = family(query, key, negatives, plan, overwrite=True, **options)
        assert torch.equal(once.per_query, outcome.per_query)
        assert not torch.equal(once.real, outcome.real)


def several_positives(query, key, negatives, positives, tau, inside):
    """Khosla et al. 2020, Eq. 2 (L_out) and Eq. 3 (L_in), by plain PyTorch."""
    key_logit = (query * key).sum(dim=1, keepdim=True)
    every = torch.cat([key_logit, query @ negatives.T], dim=1) / tau
    members = torch.cat([torch.ones(len(query), 1, dtype=torch.bool), positives], dim=1)
    number = members.sum(dim=1).double()
    if inside:
        mean = every.masked_fill(~members, -torch.inf).logsumexp(dim=1) - number.log()
    else:
        mean = every.masked_fill(~members, 0.0).sum(dim=1) / number
    return every.logsumexp(dim=1) - mean


@pytest.mark.parametrize("one_piece", [False, True])
@pytest.mark.parametrize("denominator", ["infonce", "supcon-in"])
def test_several_positives_keep_float64_and_second_derivatives(denominator, one_piece):
    """Query 1 has no positive but its key."""
    query, key, negatives = (unit(rows, 16).requires_grad_() for rows in (6, 6, 50))
    inputs = [query, key, negatives]
    positives = (torch.rand(6, 50) < 0.2).index_fill(0, torch.tensor([1]), False)

    def twice(per_query):
        gradients = torch.autograd.grad(per_query.sum(), inputs, create_graph=True)
        penalty = sum(each.square().sum() for each in gradients)
        return gradients, torch.autograd.grad(penalty, inputs)

    units = [normalize(each, dim=1) for each in inputs]
    theirs = several_positives(*units, positives, 0.3, inside=denominator == "supcon-in")
    with device_path(one_piece):
        loss = MochiLoss(5, 0, 0, 0.3, denominator=denominator)
        ours = loss(*inputs, positives=positives, reduction="none")
        (first, second), expected = twice(ours), twice(theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(first, expected[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(second, expected[1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("one_piece", [False, True])
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_second_derivatives_are_finite_without_allowed_negatives(denominator, one_piece):
    query, key, negatives, _ = one_case()
    exclude = (torch.rand(6, 50) < 0.3).index_fill(0, torch.tensor([2]), True)
    loss = MochiLoss(20, 12, 5, denominator=denominator)
    with device_path(one_piece):
        per_query = loss(query, key, negatives, exclude, reduction="none")
        (gradient,) = torch.autograd.grad(per_query.sum(), query, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), query)
    assert gradient.isfinite().all()
    assert second.isfinite().all()
    assert (gradient[2] == 0).all()
    assert (second[2] == 0).all()


def test_filters_drop_what_is_too_close_to_the_positive():
    similarity = torch.tensor([[0.7, 0.75, 0.79, 0.9], [-0.2, -0.22, -0.19, 0.0]])
    positive = torch.tensor([0.8, -0.2])
    above = above_positive(0.1)(logits_with(similarity, positive))
    assert above.tolist() == [[False, True, True, True], [True, True, True, True]]
    share = share_of_positive(0.95)(logits_with(similarity, positive))
    assert share.tolist() == [[False, False, True, True], [True, False, True, True]]


@pytest.mark.parametrize("name", FILTERS)
def test_a_filtered_negative_is_neither_contrasted_nor_mixed(name):
    key = unit(6, 16, dtype=torch.float32)
    query = normalize(key + 0.5 * unit(6, 16, dtype=torch.float32), dim=1)
    memory = MemoryQueue.prefilled(torch.cat([key, unit(80, 16, dtype=torch.float32)]))
    loss = MochiLoss(20, 30, 10, filter_negatives=name)
    outcome, plan = loss.contrast(query, key, memory, normalised=True)
    false = FILTERS[name]()(logits(query, key, memory.keys, temperature=0.2))
    assert torch.equal(outcome.exclude, false)
    assert false[:, :6].diagonal().sum() >= (name == "share-of-positive") * 6
    assert not false.gather(1, plan.base).any()
    assert not false.gather(1, plan.partner.clamp(min=0))[:, :30].any()
    plain = MochiLoss(20, 0, 0)(query, key, memory, exclude=false)
    assert torch.allclose(loss(query, key, memory, mix=False), plain)


def test_same_labels_may_be_clusters_and_unknown_ones_match_none():
    labels, stored = torch.tensor([0, 1, -1]), torch.tensor([1, 0, -1, 1])
    assert same_labels(labels, stored).nonzero().tolist() == [[0, 1], [1, 0], [1, 3]]


@pytest.mark.parametrize("weights", [each for each in WEIGHTS if each != "given"])
@pytest.mark.parametrize("denominator", [each for each in DENOMINATORS if each != "supcon-in"])
def test_members_compose_with_mixing_a_filling_queue_and_the_oracle(weights, denominator):
    memory = MemoryQueue(100, 16)
    memory.enqueue(torch.randn(40, 16), labels=torch.arange(40) % 5)
    loss = MochiLoss(
        20, 30, 10, weights=weights, denominator=denominator, filter_negatives="share-of-positive"
    )
    query = torch.randn(6, 16, requires_grad=True)
    exclude = memory.same_class(torch.arange(6) % 5)
    values = [
        loss(query, torch.randn(6, 16), memory, exclude),
        loss.in_batch(query, torch.randn(6, 16)),
        loss.symmetric(query, torch.randn(6, 16)),
    ]
    for value in values:
        (gradient,) = torch.autograd.grad(value, query)
        assert value.isfinite()
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_no_negative_is_no_loss(denominator):
    query = torch.randn(3, 8, requires_grad=True)
    memory = MemoryQueue(10, 8, start="empty")
    loss = MochiLoss(5, 0, 0, denominator=denominator)(query, torch.randn(3, 8), memory)
    loss.backward()
    assert loss == 0
    assert query.grad.isfinite().all()


@pytest.mark.parametrize("temperature", [0.005, 0.05, 10.0])
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_no_temperature_overflows(denominator, temperature):
    query, key = torch.randn(6, 16, requires_grad=True), torch.randn(6, 16)
    loss = MochiLoss(20, 30, 10, temperature, weights="hcl", denominator=denominator)
    value = loss(query, key, torch.randn(100, 16))
    value.backward()
    assert value.isfinite()
    assert query.grad.isfinite().all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: debiased(1.0), r"tau_plus=1.0.*at least 0 and below 1"),
        (lambda: hcl(-1.0), r"beta=-1.0.*at least 0"),
        (lambda: hcl_weights(math.nan), r"beta=nan.*finite"),
        (lambda: hardness_weights(-2.0), r"alpha=-2.0.*LLaVE uses 9"),
        (lambda: hardness_weights(2.0, "elsewhere"), r"where='elsewhere'.*own"),
        (lambda: given_weights(math.inf), r"alpha=inf.*finite"),
        (lambda: ring_weights(60, 40), r"low=60 and high=40.*0 <= low < high"),
        (lambda: dual_temperature(0.0), r"factor=0.0.*above 0"),
        (lambda: above_positive(math.nan), r"margin=nan"),
        (lambda: share_of_positive(0.0), r"share=0.0.*0.95"),
        (lambda: MochiLoss(weights="hlc"), r"weights='hlc' is unknown: choose one of hcl"),
        (lambda: MochiLoss(denominator="decopled"), r"denominator='decopled'.*decoupled"),
        (lambda: MochiLoss(filter_negatives="above"), r"filter_negatives='above'.*above-positive"),
    ],
)
def test_bad_arguments_are_refused_in_words(make, words, unchecked_types):
    with pytest.raises(InputError, match=words):
        make()


def test_weights_and_positives_of_another_shape_are_refused(unchecked_types):
    query, key, negatives = torch.randn(4, 8), torch.randn(4, 8), torch.randn(9, 8)
    narrow = MochiLoss(5, 0, 0, weights=lambda logits, exclude: logits.real[:, :3])
    with pytest.raises(InputError, match=r"the weights have shape \(4, 3\).*\(4, 9\)"):
        narrow(query, key, negatives)
    with pytest.raises(InputError, match=r"positives has shape \(4, 3\)"):
        MochiLoss(5, 0, 0)(query, key, negatives, positives=torch.ones(4, 3, dtype=torch.bool))
    none = torch.zeros(4, 9, dtype=torch.bool)
    with pytest.raises(InputError, match=r"several positives, .* are defined for"):
        MochiLoss(5, 0, 0, denominator="decoupled")(query, key, negatives, positives=none)
    with pytest.raises(InputError, match=r"own_negatives of shape \(batch, M, dim\)"):
        MochiLoss(5, 0, 0, weights="given")(query, key, negatives)


def test_the_tables_hold_infonce_itself():
    assert DENOMINATORS["infonce"] is plain
    query, key, negatives, plan = one_case()
    ours = family(query, key, negatives, plan, temperature=0.2, denominator="infonce")
    assert torch.equal(
        ours.per_query, contrast(query, key, negatives, plan, temperature=0.2).per_query
    )
