"""SynCo's kinds of points, MixCSE's, and the feature transformation, drawn by our strategies."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.functional import normalize

from hardmix import (
    KEY,
    QUERY,
    InputError,
    MemoryQueue,
    MochiLoss,
    contrast,
    hardest_negatives,
    materialize,
)
from hardmix.strategies import (
    Candidates,
    FeatureTransformation,
    extrapolated_positives,
    mixed_queue,
    plan_mixcse,
    plan_synco,
)
from mixing_cases import candidates
from reference import loss_and_gradient, unit

COUNTS = {"num_hardest": 12, "num_pairs": 6, "num_with_query": 5}
MORE = {"num_extrapolated": 7, "num_perturbed": 3, "num_adversarial": 4, "num_noisy": 2}


def one_plan(exclude=None, **options):
    vectors = unit(4, 9), unit(4, 9), unit(40, 9)
    counts = {name: options.pop(name) for name in COUNTS}
    return *vectors, plan_synco(candidates(*vectors, exclude=exclude, **counts), **options)


def test_each_of_the_six_kinds_is_its_formula():
    query, key, negatives, plan = one_plan(**COUNTS, **MORE)
    points = materialize(plan, query, key, negatives)
    base, partner = negatives[plan.base], negatives[plan.partner.clamp(min=0)]
    share = plan.share.unsqueeze(-1)
    assert plan.base.shape == (4, 27)
    expected = torch.cat(
        [
            ((1 - share) * base + share * partner)[:, :6],
            (share * query.unsqueeze(1) + (1 - share) * base)[:, 6:11],
            (query.unsqueeze(1) + (1 - share) * (base - query.unsqueeze(1)))[:, 11:18],
            (base + 0.01 * query.unsqueeze(1))[:, 18:21],
            (base + 0.01 * query.sign().unsqueeze(1))[:, 21:25],
            base[:, 25:] + 0.01 * plan.vectors[:, 1:],
        ],
        dim=1,
    )
    torch.testing.assert_close(points, normalize(expected, dim=-1))
    b = (1 - plan.share)[:, 11:18]
    assert (b > 1).all()
    assert (b < 1.5).all()


def test_bases_are_of_the_hardest_and_noise_is_normal():
    query, _, negatives, plan = one_plan(**COUNTS | {"num_hardest": 5}, num_noisy=2000)
    hardest = hardest_negatives(query @ negatives.T, 5).positions
    assert all(set(plan.base[i].tolist()) == set(hardest[i].tolist()) for i in range(4))
    noise = plan.vectors[:, 1:].flatten()
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.std()) - 1) < 0.02
    assert abs(float((noise.abs() > 1.96).double().mean()) - 0.05) < 0.005


@pytest.mark.parametrize("masked", [False, True])
@settings(max_examples=15)
@given(st.data())
def test_any_subset_is_evaluated_exactly(masked, data):
    chosen = {name: number for name, number in (COUNTS | MORE).items() if data.draw(st.booleans())}
    counts = dict.fromkeys(COUNTS | MORE, 0) | chosen | {"num_hardest": 12}
    torch.manual_seed(data.draw(st.integers(0, 999)))
    exclude = torch.rand(4, 40) < data.draw(st.sampled_from([0.3, 0.9, 1.0])) if masked else None
    query, key, negatives, plan = one_plan(exclude, **counts)
    expected, gradient = loss_and_gradient(query, key, negatives, plan, 0.2, exclude)
    query.requires_grad_()
    ours = contrast(query, key, negatives, plan, temperature=0.2, exclude=exclude).per_query
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), query)[0], gradient)
    assert plan.base.shape[1] == sum(counts.values()) - 12
    if exclude is not None:
        assert not exclude.gather(1, plan.base.clamp(min=0))[plan.base >= 0].any()


def test_no_further_kinds_are_mochi_bit_for_bit():
    query, key, memory = torch.randn(6, 16), torch.randn(6, 16), MemoryQueue.prefilled(unit(90, 16))
    none = partial(plan_synco, **dict.fromkeys(MORE, 0))
    losses = [
        MochiLoss(20, 30, 10, strategy=strategy)(
            query, key, memory, generator=torch.Generator().manual_seed(1)
        )
        for strategy in ("mochi", none)
    ]
    assert torch.equal(*losses)


def test_synco_makes_its_points_also_without_mochis():
    query, key, memory = torch.randn(6, 16), torch.randn(6, 16), MemoryQueue.prefilled(unit(90, 16))
    outcome, plan = MochiLoss(20, 0, 0, strategy="synco").contrast(query, key, memory)
    assert plan.base.shape == outcome.synthetic.shape == (6, 256 + 3 * 64)


def test_mixcse_mixes_a_fifth_of_the_key_into_negatives():
    query, key, negatives = unit(4, 9), unit(4, 9), unit(40, 9)
    counts = {"num_hardest": 40, "num_pairs": 0, "num_with_query": 8}
    plan = plan_mixcse(candidates(query, key, negatives, **counts))
    assert (plan.partner == KEY).all()
    points = materialize(plan, query, key, negatives)
    expected = normalize(0.2 * key.unsqueeze(1) + 0.8 * negatives[plan.base], dim=-1)
    torch.testing.assert_close(points, expected)
    assert not (plan.partner == QUERY).any()


def test_positives_are_moved_apart_and_the_queue_is_mixed():
    query, key, negatives = unit(4, 9), unit(4, 9), unit(40, 9)
    moved = extrapolated_positives(query, key, generator=torch.Generator().manual_seed(3))
    share = float((moved[0] - key)[0, 0] / (query - key)[0, 0])
    assert 1 < share < 2
    torch.testing.assert_close(moved[0], share * query + (1 - share) * key)
    torch.testing.assert_close(moved[1], share * key + (1 - share) * query)
    mixed = mixed_queue(negatives, generator=torch.Generator().manual_seed(3))
    assert mixed.shape == negatives.shape
    torch.testing.assert_close(mixed.mean(dim=0), negatives.mean(dim=0))
    assert (mixed.norm(dim=1) <= 1 + 1e-12).all()
    assert (mixed.norm(dim=1) < 0.999).any()


def test_a_mix_with_an_excluded_negative_is_excluded():
    query, key, memory = unit(4, 9), unit(4, 9), MemoryQueue.prefilled(unit(40, 9)).double()
    exclude = torch.zeros(4, 40, dtype=torch.bool)
    exclude[:, 3] = True
    loss = MochiLoss(8, 0, 8, strategy="mixed-queue")
    values = []
    for number in (1.0, 50.0):  # whatever it is, it takes no part
        memory.keys[3] = unit(1, 9)[0] * number
        values.append(loss(query, key, memory, exclude, generator=torch.Generator().manual_seed(3)))
    torch.testing.assert_close(*values)


def test_without_mixing_a_transformation_changes_no_bit():
    query, key, memory = torch.randn(6, 16), torch.randn(6, 16), MemoryQueue.prefilled(unit(90, 16))
    plain = MochiLoss(20, 0, 0)(query, key, memory)
    named = MochiLoss(20, 0, 0, strategy="feature-transformation")
    assert torch.equal(named(query, key, memory, mix=False), plain)
    nothing = MochiLoss(20, 0, 0, transformation=FeatureTransformation(None, None))
    assert torch.equal(nothing(query, key, memory), plain)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: one_plan(**COUNTS, num_noisy=-1), r"num_noisy=-1 is below 0"),
        (lambda: one_plan(**COUNTS, sigma=0.0), r"sigma=0.0.*above 0.*0.01"),
        (lambda: FeatureTransformation(positive_alpha=0.0), r"positive_alpha=0.0.*above 0"),
        (
            lambda: plan_synco(Candidates(logits=unit(4, 40), **COUNTS)),
            r"embeddings=None.*'synco' with noisy or adversarial points",
        ),
        (
            lambda: plan_mixcse(Candidates(logits=unit(4, 40), **COUNTS), share=1.0),
            r"share=1.0.*between 0 and 1",
        ),
    ],
)
def test_bad_arguments_are_refused_in_words(make, words):
    with pytest.raises(InputError, match=words):
        make()
