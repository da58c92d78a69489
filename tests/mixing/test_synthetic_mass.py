"""The share of the softmax that synthetic points hold, against the softmax itself."""

import pytest
import torch
from hypothesis import given, strategies as st

from hardmix import Contrast, MixPlan, contrast, negative_mass, plan_mochi, synthetic_mass
from hardmix.losses import hcl
from hardmix.strategies import plan_synco
from mixing_cases import candidates, family
from reference import unit


def outcome_of(batch: int, real: int, points: int, seed: int, temperature: float = 0.2) -> Contrast:
    generator = torch.Generator().manual_seed(seed)
    positive, negatives, synthetic = (
        2 * torch.rand(shape, generator=generator) - 1
        for shape in ((batch,), (batch, real), (batch, points))
    )
    rows = torch.zeros(batch, points, dtype=torch.int64)
    plan = MixPlan(rows, rows, torch.full((batch, points), 0.5))
    losses = torch.zeros(()), torch.zeros(batch)
    return Contrast(*losses, positive, negatives, synthetic, temperature, plan=plan)


@given(
    batch=st.integers(1, 5),
    real=st.integers(1, 9),
    points=st.integers(0, 9),
    temperature=st.sampled_from([0.05, 0.2, 1.0]),
    seed=st.integers(0, 99),
)
def test_it_is_the_softmax_over_key_negatives_and_points(batch, real, points, temperature, seed):
    outcome = outcome_of(batch, real, points, seed, temperature)
    logits = torch.cat([outcome.positive[:, None], outcome.real, outcome.synthetic], dim=1)
    shares = (logits.double() / temperature).softmax(dim=1)
    expected = shares[:, 1 + real :].sum(dim=1).mean()
    assert float(synthetic_mass(outcome)) == pytest.approx(float(expected), abs=1e-5)


def test_excluded_negatives_hold_nothing():
    outcome = outcome_of(3, 4, 2, 0)
    exclude = torch.zeros(3, 4, dtype=torch.bool)
    exclude[:, 1:] = True
    fewer = outcome._replace(real=outcome.real[:, :1])
    masked = outcome._replace(exclude=exclude)
    assert torch.equal(synthetic_mass(masked), synthetic_mass(fewer))


def test_mass_by_kind_adds_up_and_points_at_what_the_loss_looks_at():
    query, key, negatives = unit(5, 9), unit(5, 9), unit(60, 9)
    counts = {"num_hardest": 20, "num_pairs": 6, "num_with_query": 5}
    plan = plan_synco(candidates(query, key, negatives, **counts))
    outcome = contrast(query, key, negatives, plan, temperature=0.2)
    mass = negative_mass(outcome, ranks=(1, 3, 10_000))
    assert float(sum(mass.kinds.values())) == pytest.approx(float(synthetic_mass(outcome)))
    assert float(mass.points) == pytest.approx(float(synthetic_mass(outcome)))
    every = torch.cat([outcome.positive[:, None], outcome.real, outcome.synthetic], dim=1)
    held = (every / 0.2).softmax(dim=1)[:, 61:].sum(dim=1).mean()
    assert float(mass.points) == pytest.approx(float(held))
    assert mass.kinds["key"] == 0
    assert all(mass.kinds[name] > 0 for name in ("pairs", "query", "beyond", "vector"))
    both = torch.cat([outcome.real, outcome.synthetic], dim=1)
    among = (both / 0.2).softmax(dim=1)
    perplexity = (-(among * among.log()).sum(dim=1)).exp().mean()
    torch.testing.assert_close(mass.effective, perplexity)
    torch.testing.assert_close(mass.top[1], among.amax(dim=1).mean())
    torch.testing.assert_close(mass.top[3], among.topk(3, dim=1).values.sum(dim=1).mean())
    assert float(mass.top[10_000]) == pytest.approx(1)


def test_equally_hard_negatives_all_count_and_weights_and_masks_are_seen():
    key = torch.eye(4, dtype=torch.float64)[:1]
    vectors = key, key, torch.eye(4, dtype=torch.float64)[1:]
    outcome = contrast(*vectors, temperature=0.2)
    assert float(negative_mass(outcome).effective) == pytest.approx(3)
    exclude = torch.tensor([[True, False, False]])
    masked = contrast(*vectors, temperature=0.2, exclude=exclude)
    assert float(negative_mass(masked).effective) == pytest.approx(2)
    only = torch.tensor([[0.0, -torch.inf, -torch.inf]]).double()
    weighted = negative_mass(family(*vectors, temperature=0.2, log_weights=only))
    assert float(weighted.effective) == pytest.approx(1)
    assert weighted.kinds == {}


@given(beta=st.sampled_from([0.5, 1.0, 3.0]), seed=st.integers(0, 50), hide=st.booleans())
def test_the_mass_of_hcls_denominator_has_its_weights_in_it(beta, seed, hide):
    generator = torch.Generator().manual_seed(seed)
    query, key, negatives = (
        torch.nn.functional.normalize(torch.randn(n, 6, generator=generator).double())
        for n in (4, 4, 30)
    )
    exclude = torch.rand(4, 30, generator=generator) < 0.3 if hide else None
    plan = plan_mochi(
        query @ negatives.T, num_hardest=9, num_pairs=5, num_with_query=3, exclude=exclude
    )
    outcome = family(
        query,
        key,
        negatives,
        plan,
        temperature=0.2,
        exclude=exclude,
        denominator=hcl(beta, tau_plus=0.0),
    )
    mass = negative_mass(outcome)
    shares = []
    for row in range(4):
        kept = [c for c in range(30) if exclude is None or not exclude[row, c]]
        terms = torch.cat([outcome.real[row, kept], outcome.synthetic[row]]) / 0.2
        weighed = terms.exp() * (beta * terms).exp() / (beta * terms).exp().mean()
        whole = weighed.sum() + (outcome.positive[row] / 0.2).exp()
        shares.append(weighed[len(kept) :].sum() / whole)
        loss = (whole / (outcome.positive[row] / 0.2).exp()).log()
        torch.testing.assert_close(outcome.per_query[row], loss)
    torch.testing.assert_close(mass.points, torch.stack(shares).mean())


def test_a_query_without_negatives_holds_no_mass_under_hcls_denominator():
    key = torch.eye(3, dtype=torch.float64)[:1]
    everything = torch.ones(1, 2, dtype=torch.bool)
    vectors = key, key, torch.eye(3, dtype=torch.float64)[1:]
    outcome = family(*vectors, temperature=0.2, exclude=everything, denominator=hcl(1.0))
    mass = negative_mass(outcome)
    assert float(mass.points) == 0
    assert all(float(each) == 0 for each in mass.top.values())
