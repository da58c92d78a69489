"""The family against its authors' code: numbers that their published losses gave for these inputs.

Each was run once, outside this project, in float64 on the vectors of `views`: HCL and the debiased
loss (joshr17/HCL, chingyaoc/DCL), the decoupled one (raminnakhli/Decoupled-Contrastive-Learning),
dual temperature (ChaoningZhang/Dual-temperature), the ring (MoCoRing of the authors' repository,
"Ring Contrastive Learning"), SynCo's points (giakoumoglou/synco), MixCSE (cl_forward of
BDBC-KG-NLP/MixCSE_AAAI2022, with an encoder that returns these vectors) and the feature
transformation (DTennant/CL-Visualizing-Feature-Transformation). Of each loss: its value, and its
gradient by the first vector of the first view.
"""

from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import normalize

from hardmix import KEY, QUERY, MixPlan, MochiLoss, contrast
from hardmix.losses import (
    debiased,
    decoupled_weighted,
    dual_temperature,
    hardness_weights,
    hcl,
    hcl_weights,
    ring_weights,
)
from hardmix.mixing import transformations
from hardmix.strategies import VECTOR
from mixing_cases import family

PUBLISHED = {
    "hcl 1.0 0.1": (2.679461480871, [0.281777582477, -0.346143268389, 0.041819704778,
                    -0.02807239837, 0.131736679673, 0.350758250916]),
    "hcl 0.5 0.05": (2.466817057179, [0.236378310674, -0.292892429625, -0.004754316711,
                     -0.05070385477, 0.068075990316, 0.268732634649]),
    "hcl 1.0 0.0": (2.662749549620, [0.242949812352, -0.298659628634, 0.046001263622,
                    -0.014780191054, 0.115418711544, 0.315766902108]),
    "hcl 2.0 0.3": (2.995117878469, [0.427855989005, -0.513283369702, 0.038937137731,
                    -0.075975464482, 0.227244247329, 0.476826732797]),
    "debiased 0.1": (2.172722698794, [0.238746381337, -0.281341404977, -0.111962486645,
                     -0.12269706998, 0.00224599218, 0.190259013267]),
    "debiased 0.3": (2.033206432715, [0.316725705296, -0.379139924002, 0.022992531291,
                     -0.060954530005, 0.068314967354, 0.313170588832]),
    "decoupled": (4.808126448910, [1.84808243545, -2.199732962467, 0.433042969241,
                  -0.269042499909, 1.017011524814, 1.863122729316]),
    "dual 10": (4.182270437716, [0.792512939837, -0.887424196525, -0.241711826523,
                -0.21740677955, 0.271650456653, 1.112808524227]),
    "dual 3": (4.534404054915, [0.855364565531, -0.957802925537, -0.260881205952,
               -0.234648604692, 0.293194171541, 1.2010617518]),
    "transformed": (8.244218646730, [0.956714603532, -0.314099690834, -0.551346222985,
                    -0.227408561365, 0.274159254352, 1.239851765385]),
    "ring 90 99": (6.294791914819, [0.152663048113, -0.511192611382, -1.12283332515,
                   -0.42705141672, 0.719133244743, 0.996748235352]),
    "ring 50 85": (4.098953087216, [0.221909648882, -0.089826589562, -0.150442065925,
                   -0.03710760769, -0.173171396083, 0.274632657342]),
    "mixcse": (12.116927497335, [2.301669881587, -2.437829972005, -1.526575932923,
               -1.25300230719, 0.308361654876, 2.222658173426]),
    "mixcse, not mirrored": (10.064551929231, [2.301674403905, -2.437834307598, -1.526577857177,
                             -1.253003733266, 0.308360183857, 2.222661957807]),
}  # fmt: skip

MIXCSE = [0.0, -0.887845765368, 0.380765358341, 0.075387652801, -0.427078568344]
"""Similarities of the second query to the five points of the batch, 0 for that with its key."""
MIXCSE_SHARE = float(
    torch.tensor(0.2).double() / (torch.tensor(0.2).double() + (1 - torch.tensor(0.2)).double())
)
"""Their shares are in float32: 0.2 and 1 - 0.2, whose sum is not 1."""

SYNCO = {
    1: [0.370192058015, 0.273523242301, 0.784092199214, 0.51550577106],
    2: [0.283169583955, 0.25485997929, -0.023488693078, 0.455985450894],
    3: [0.55055242504, 0.29295076865, 0.29971906426, 0.543799492302],
    4: [0.327081788407, 0.262413646051, 0.295187436563, 0.49383479632],
    5: [0.334495838941, 0.273400266327, 0.308779583218, 0.493019133734],
    6: [0.346157294498, 0.287103182382, 0.320592143261, 0.503001755081],
}
"""Similarities of the second query to the four points of each kind, of its eight hardest."""


def views():
    generator = torch.Generator().manual_seed(7)
    return [
        normalize(
            torch.randn(5, 6, generator=generator, dtype=torch.float64), dim=1
        ).requires_grad_()
        for _ in range(2)
    ]


def queue():
    generator = torch.Generator().manual_seed(3)
    return normalize(torch.randn(20, 6, generator=generator, dtype=torch.float64), dim=1)


def simclr(first, second, **options):
    """Both views ask, all other views of the batch are negatives."""
    query, key = torch.cat([first, second]), torch.cat([second, first])
    other = ~torch.eye(len(query), dtype=torch.bool)
    exclude = ~(other & other.roll(len(first), dims=1))
    return family(query, key, query, exclude=exclude, **options).loss


def assert_published(name, loss, first):
    value, gradient = PUBLISHED[name]
    (ours,) = torch.autograd.grad(loss, first)
    expected = torch.tensor(gradient, dtype=torch.float64)
    assert abs(float(loss.detach()) - value) < 1e-10
    torch.testing.assert_close(ours[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("beta", "tau_plus"), [(1.0, 0.1), (0.5, 0.05), (1.0, 0.0), (2.0, 0.3)])
def test_hcl(beta, tau_plus):
    first, second = views()
    loss = simclr(first, second, temperature=0.5, denominator=hcl(beta, tau_plus))
    assert_published(f"hcl {beta} {tau_plus}", loss, first)


@pytest.mark.parametrize(("beta", "tau_plus"), [(1.0, 0.1), (0.5, 0.05), (1.0, 0.0), (2.0, 0.3)])
def test_hcl_with_constant_weights_has_the_published_value(beta, tau_plus):
    first, second = (each.detach() for each in views())
    query, key = torch.cat([first, second]), torch.cat([second, first])
    itself = torch.eye(10, dtype=torch.bool).roll(5, dims=1)
    loss = MochiLoss(5, 0, 0, 0.5, weights=hcl_weights(beta), denominator=debiased(tau_plus))
    value = loss.in_batch(query, key, exclude=itself)
    assert abs(float(value) - PUBLISHED[f"hcl {beta} {tau_plus}"][0]) < 1e-9


@pytest.mark.parametrize("tau_plus", [0.1, 0.3])
def test_debiased(tau_plus):
    first, second = views()
    loss = simclr(first, second, temperature=0.5, denominator=debiased(tau_plus))
    assert_published(f"debiased {tau_plus}", loss, first)


def test_decoupled():
    first, second = views()
    exclude = torch.eye(5, dtype=torch.bool).repeat(1, 2)
    negatives = torch.cat([first, second])
    options = {"exclude": exclude, "temperature": 0.1, "denominator": "decoupled"}
    assert_published("decoupled", family(first, second, negatives, **options).loss, first)


def test_decoupled_in_lightly():
    module = pytest.importorskip("lightly.loss", reason="pip install 'hardmix[examples]'")
    first, second = views()
    theirs = module.DCLLoss(temperature=0.1)(first, second)
    options = {"temperature": 0.1, "denominator": "decoupled"}
    ours = simclr(normalize(first, dim=1), normalize(second, dim=1), **options)
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(
        torch.autograd.grad(ours, [first, second]),
        torch.autograd.grad(theirs, [first, second]),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("sigma", [0.5, 0.2])
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # theirs
def test_weighted_decoupled_in_lightly(sigma):
    module = pytest.importorskip("lightly.loss", reason="pip install 'hardmix[examples]'")
    first, second = views()
    theirs = module.DCLWLoss(temperature=0.1, sigma=sigma)(first, second)
    denominators = [decoupled_weighted(sigma)] + ["decoupled-weighted"] * (sigma == 0.5)
    for denominator in denominators:
        options = {"temperature": 0.1, "denominator": denominator}
        ours = simclr(normalize(first, dim=1), normalize(second, dim=1), **options)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
        for mine, other in zip(
            torch.autograd.grad(ours, [first, second]),
            torch.autograd.grad(theirs, [first, second], retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("factor", [10, 3])
def test_dual_temperature(factor):
    first, second = views()
    loss = MochiLoss(5, 0, 0, 0.1, denominator=dual_temperature(factor))
    own = torch.eye(5, dtype=torch.bool)
    options = {"exclude": own, "temperature": 0.1, "denominator": loss.denominator}
    assert_published(f"dual {factor}", family(first, second, second, **options).loss, first)


@pytest.mark.parametrize("mode", ["in_batch_negatives", "hard_negatives", "all_negatives"])
@pytest.mark.slow
def test_hardness_weighting_in_sentence_transformers(mode):
    losses = pytest.importorskip(
        "sentence_transformers.sentence_transformer.losses",
        reason="pip install 'hardmix[examples]'",
    )
    options = {"scale": 20.0, "hardness_mode": mode, "hardness_strength": 4.0}
    theirs = losses.MultipleNegativesRankingLoss(torch.nn.Identity(), **options)
    first, second = views()
    hard = normalize(second.detach().roll(2, dims=1), dim=1)
    expected = theirs.compute_loss_from_embeddings([first, second, hard], None)
    # Their documents: all positives, then all hard negatives; a query's own of these weigh more.
    documents, own = torch.cat([second, hard]), hard.unsqueeze(1)
    exclude = torch.eye(5, dtype=torch.bool).repeat(1, 2)
    where = {"in_batch_negatives": "shared", "hard_negatives": "own", "all_negatives": "all"}[mode]
    ours = MochiLoss(5, 0, 0, 1 / 20, weights=hardness_weights(4.0, where))
    value = ours(first, second, documents, exclude, own_negatives=own)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(
        torch.autograd.grad(value, first)[0], torch.autograd.grad(expected, first)[0]
    )


def synco_plan(kind, query, hardest):
    """Return the authors' draws of a kind, as a plan."""
    torch.manual_seed(11)
    number = (5, 4)
    if kind == 3:
        first, second = torch.randint(0, 8, (2, *number))
        gamma = torch.rand(*number, 1, dtype=torch.float64).squeeze(2)
        return MixPlan(hardest.gather(1, first), hardest.gather(1, second), 1 - gamma)
    base = hardest.gather(1, torch.randint(0, 8, number))
    partner = torch.full(number, QUERY if kind in (1, 2, 5) else VECTOR)
    vectors = None
    if kind == 1:
        share = 0.5 * torch.rand(*number, 1, dtype=torch.float64).squeeze(2)
    elif kind == 2:
        share = -0.5 * torch.rand(*number, 1, dtype=torch.float64).squeeze(2)
    else:
        share = torch.full(number, 0.01 / 1.01, dtype=torch.float64)
    if kind == 4:
        vectors = torch.randn(*number, 6, dtype=torch.float64)
        partner = VECTOR - torch.arange(4).expand(5, 4)
    elif kind == 6:
        vectors = query.sign().unsqueeze(1)
    return MixPlan(base, partner, share, vectors=vectors)


@pytest.mark.parametrize("kind", SYNCO)
def test_synco(kind):
    query, key = (each.detach() for each in views())
    hardest = (query @ queue().T).topk(8, dim=1).indices.sort(dim=1).values
    plan = synco_plan(kind, query, hardest)
    synthetic = contrast(query, key, queue(), plan, temperature=0.2).synthetic
    expected = torch.tensor(SYNCO[kind], dtype=torch.float64)
    torch.testing.assert_close(synthetic[1], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("low", "high"), [(90, 99), (50, 85)])
def test_ring(low, high):
    """Their thresholds: the outer 0.1 and 0.5 of all, and the inner 0.1 and 0.3 of these."""
    first, second = views()
    loss = MochiLoss(5, 0, 0, 0.1, weights=ring_weights(low, high))
    assert_published(f"ring {low} {high}", loss(first, second.detach(), queue()), first)
    if (low, high) == (90, 99):
        named = MochiLoss(5, 0, 0, 0.1, weights="ring")
        assert_published("ring 90 99", named(first, second.detach(), queue()), first)


def mixcse(first, second):
    """Return the points of their batch: each key with a fifth of the one before it.

    Where a point is made of a query's own key, their code sets its logit to 0: a scale of 0. All
    but one point are pairs of negatives; that one is `plan_mixcse`'s.
    """
    rows = torch.arange(5)
    base, partner = rows.roll(-1).expand(5, 5), rows.expand(5, 5)
    own = torch.eye(5, dtype=torch.bool)
    share = torch.full((5, 5), MIXCSE_SHARE, dtype=torch.float64)
    plan = MixPlan(base, torch.where(own, KEY, partner), share, (~own.roll(-1, dims=1)).double())
    options = {"temperature": 0.05, "exclude": own}
    return contrast(first, second, second, plan, **options), plan


def test_mixcse():
    first, second = views()
    outcome, _ = mixcse(normalize(first, dim=1), normalize(second, dim=1))
    similarity = outcome.synthetic[1] * torch.tensor([0.0, 1, 1, 1, 1])
    expected = torch.tensor(MIXCSE, dtype=torch.float64)
    torch.testing.assert_close(similarity, expected, rtol=0, atol=1e-8)
    assert_published("mixcse, not mirrored", outcome.loss, first)


def test_mixcse_with_the_mirrored_points_of_the_authors_code():
    """They also contrast points of the queries with all keys, in the same denominator."""
    first, second = views()
    one, other = normalize(first, dim=1), normalize(second, dim=1)
    outcome, _ = mixcse(one, other)
    points = normalize(
        MIXCSE_SHARE * one + (1 - MIXCSE_SHARE) * one.roll(-1, dims=0), dim=1
    ).detach()
    mirrored = (points @ other.T).masked_fill(torch.eye(5).roll(1, dims=1) == 1, 0.0) / 0.05
    positive = (one * other).sum(dim=1) / 0.05
    both = torch.logaddexp(outcome.per_query, mirrored.logsumexp(dim=1) - positive).mean()
    assert_published("mixcse", both, first)


def test_feature_transformation():
    """The authors' code drew l = 1.37 and 0.61, and this permutation."""
    first, second = views()
    torch.manual_seed(5)
    order = torch.randperm(20)
    drawn = {
        2.0: torch.tensor(0.37, dtype=torch.float64),
        1.6: torch.tensor(0.61, dtype=torch.float64),
    }
    with (
        patch.object(transformations, "_beta", lambda alpha, *_: drawn[alpha]),
        patch.object(torch, "randperm", lambda *_, **__: order),
    ):
        loss = MochiLoss(8, 0, 8, strategy="feature-transformation")
        value = loss(first, second.detach(), queue(), normalised=True)
    assert_published("transformed", value, first)
