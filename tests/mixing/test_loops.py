"""The loss in people's loops: own negatives, several positives, both directions, chunks."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from hardmix import InputError, MemoryQueue, MochiLoss, backward_in_chunks, materialize
from hardmix.losses import DENOMINATORS, logits, same_labels
from hardmix.mixing.family import loss_of_queries
from hardmix.mixing.gradient_cache import encode_in_chunks
from hardmix.strategies import STRATEGIES
from mixing_cases import device_path
from reference import unit

SMALL = {"num_hardest": 8, "num_pairs": 6, "num_with_query": 4}


def case(batch=4, dim=8, width=20, own=5):
    query, key = unit(batch, dim), unit(batch, dim)
    return query.requires_grad_(), key, unit(width, dim), unit(batch, own, dim).requires_grad_()


def logits_of(query, key, *columns):
    positive = (query * key).sum(dim=1, keepdim=True)
    return torch.cat([positive, *columns], dim=1) / 0.2


def first_is_right(columns):
    return cross_entropy(columns, torch.zeros(len(columns), dtype=torch.long))


def test_own_negatives_stand_beside_or_instead_of_shared_ones():
    query, key, shared, own = case()
    loss = MochiLoss(5, 0, 0)
    to_own = torch.einsum("bd,bmd->bm", query, own)
    for ours, theirs in [
        (loss(query, key, own), logits_of(query, key, to_own)),
        (
            loss(query, key, shared, own_negatives=own),
            logits_of(query, key, query @ shared.T, to_own),
        ),
    ]:
        expected = first_is_right(theirs)
        torch.testing.assert_close(ours, expected)
        gradients = [
            torch.autograd.grad(each, [query, own], retain_graph=True) for each in (ours, expected)
        ]
        # The loss normalises its inputs: what is along them is gone.
        for mine, other, along in zip(*gradients, (query, own), strict=True):
            tangential = other - (other * along).sum(dim=-1, keepdim=True) * along
            torch.testing.assert_close(mine, tangential, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("one_piece", [False, True])
@pytest.mark.parametrize("name", STRATEGIES)
def test_own_negatives_are_mixed_like_shared_ones(name, one_piece):
    query, key, _, own = case(own=15)
    loss = MochiLoss(**SMALL, strategy=name)
    with device_path(one_piece):
        ours, plan = loss.contrast(query, key, own, generator=torch.Generator().manual_seed(2))
    if name.endswith(("positives", "queue", "transformation")):
        assert ours.loss.isfinite()
        return
    made = materialize(plan, query.detach(), key, own.detach())
    synthetic = torch.einsum("bd,bsd->bs", query, made)
    columns = torch.cat([torch.einsum("bd,bmd->bm", query, own), synthetic], dim=1)
    torch.testing.assert_close(ours.synthetic[plan.base >= 0], synthetic[plan.base >= 0])
    if plan.scale is None and plan.weight is None:
        missing = torch.cat([torch.zeros(4, 15), plan.base < 0], dim=1).bool()
        theirs = first_is_right(logits_of(query, key, columns.masked_fill(missing, -torch.inf)))
        torch.testing.assert_close(ours.loss, theirs)


def test_a_queue_with_own_negatives_and_a_mask_of_either_width():
    query, key, _, own = case()
    memory = MemoryQueue(30, 8, start="empty").double()
    memory.enqueue(unit(12, 8), labels=torch.arange(12) % 3)
    exclude = memory.same_class(torch.arange(4) % 3)
    narrow = MochiLoss(**SMALL)(
        query, key, memory, exclude, own_negatives=own, generator=torch.Generator().manual_seed(1)
    )
    wide = torch.cat([exclude, torch.zeros(4, 5, dtype=torch.bool)], dim=1)
    same = MochiLoss(**SMALL)(
        query, key, memory, wide, own_negatives=own, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(narrow, same)
    rows = [
        MochiLoss(5, 0, 0)(
            query[i : i + 1],
            key[i : i + 1],
            torch.cat([memory.keys[:12][~exclude[i, :12]], own[i]]),
        )
        for i in range(4)
    ]
    plain = MochiLoss(5, 0, 0)(query, key, memory, exclude, own_negatives=own)
    torch.testing.assert_close(plain, torch.stack(rows).mean())


def test_supcons_two_forms():
    query, key, shared, _ = case(width=12)
    labels, stored = torch.arange(4) % 3, torch.arange(12) % 3
    positives = same_labels(labels, stored)
    log_probability = logits_of(query, key, query @ shared.T).log_softmax(dim=1)
    mask = torch.cat([torch.ones(4, 1), positives], dim=1).bool()
    out = -torch.stack([row[kept].mean() for row, kept in zip(log_probability, mask, strict=True)])
    inside = -torch.stack(
        [row[kept].exp().mean().log() for row, kept in zip(log_probability, mask, strict=True)]
    )
    for denominator, expected in [("infonce", out), ("supcon-in", inside)]:
        ours = loss_of_queries(
            DENOMINATORS[denominator](),
            logits(query, key, shared, temperature=0.2),
            positives=positives,
        )
        torch.testing.assert_close(ours, expected)
        gradients = [
            torch.autograd.grad(each.sum(), query, retain_graph=True)[0]
            for each in (ours, expected)
        ]
        torch.testing.assert_close(*gradients)
        module = MochiLoss(5, 0, 0, denominator=denominator)
        per_query = module(query, key, shared, positives=positives, reduction="none")
        torch.testing.assert_close(per_query, expected)


def test_supcon_in_pytorch_metric_learning():
    losses = pytest.importorskip(
        "pytorch_metric_learning.losses", reason="pip install 'hardmix[examples]'"
    )
    features, labels = (
        torch.randn(12, 8, dtype=torch.float64, requires_grad=True),
        torch.arange(12) % 4,
    )
    theirs = losses.SupConLoss(temperature=0.2)(features, labels)
    # A query's first positive is its key, its others are positives among all.
    key = torch.stack([features[(i + 4) % 12] for i in range(12)])
    same = same_labels(labels, labels)
    itself = torch.eye(12, dtype=torch.bool)
    first = itself.roll(4, dims=1)
    loss = MochiLoss(5, 0, 0)
    ours = loss(features, key, features, itself | first, positives=same & ~first)
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(
        torch.autograd.grad(ours, features), torch.autograd.grad(theirs, features), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_positives_are_not_mixed():
    query, key, memory = torch.randn(6, 16), torch.randn(6, 16), MemoryQueue.prefilled(unit(90, 16))
    positives = torch.rand(6, 90) < 0.3
    _, plan = MochiLoss(20, 30, 10).contrast(query, key, memory, positives=positives)
    assert not positives.gather(1, plan.base).any()
    assert not positives.gather(1, plan.partner.clamp(min=0))[:, :30].any()


def test_two_ways_are_clips_loss_with_its_learnt_scale():
    image, text = unit(6, 8).requires_grad_(), unit(6, 8).requires_grad_()
    logit_scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    loss = MochiLoss(5, 0, 0, temperature=lambda: (-logit_scale).exp())
    scaled = logit_scale.exp() * normalize(image, dim=1) @ normalize(text, dim=1).T
    own = torch.arange(6)
    theirs = (cross_entropy(scaled, own) + cross_entropy(scaled.T, own)) / 2
    ours = loss.symmetric(image, text)
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(
        torch.autograd.grad(ours, [image, text, logit_scale]),
        torch.autograd.grad(theirs, [image, text, logit_scale]),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def test_a_parameter_is_the_losss_own_and_is_learnt():
    loss = MochiLoss(**SMALL, temperature=nn.Parameter(torch.tensor(0.5)))
    assert dict(loss.named_parameters()).keys() == {"temperature"}
    loss(torch.randn(4, 8), torch.randn(4, 8), torch.randn(20, 8)).backward()
    assert loss.temperature.grad.abs() > 0
    assert "learnt" in repr(loss)


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan])
def test_a_tensor_that_is_no_temperature_is_refused(value):
    with pytest.raises(InputError, match=r"temperature=.* must be a finite number above 0"):
        MochiLoss(temperature=torch.tensor(value))
    with pytest.raises(InputError, match=r"temperature has shape \(2,\).*logit_scale"):
        MochiLoss(temperature=torch.ones(2))


ENTRIES = {
    "queue": lambda loss, a, b, **more: loss(a, b, MemoryQueue.prefilled(unit(30, 8)), **more),
    "in batch": lambda loss, a, b, **more: loss.in_batch(a, b, **more),
    "two ways": lambda loss, a, b, **more: loss.symmetric(a, b, **more),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_losses_of_each_query_and_sample_weights_at_every_entry(entry):
    first, second, weights = torch.randn(6, 8), torch.randn(6, 8), torch.rand(6)

    def value(**more):
        torch.manual_seed(4)
        return ENTRIES[entry](MochiLoss(5, 8, 4), first, second, **more)

    each = value(reduction="none")
    assert each.shape == (6,)
    torch.testing.assert_close(value(), each.mean())
    torch.testing.assert_close(value(reduction="sum"), each.sum())
    weighted = (weights * each).sum() / weights.sum()
    torch.testing.assert_close(value(sample_weights=weights), weighted)
    torch.testing.assert_close(value(sample_weights=weights, reduction="none"), weights * each)


def test_wrong_options_are_refused(unchecked_types):
    loss, query = MochiLoss(**SMALL), torch.randn(4, 8)
    with pytest.raises(InputError, match=r"reduction='men' is unknown: choose one of mean"):
        loss.in_batch(query, query, reduction="men")
    with pytest.raises(InputError, match=r"sample_weights have shape \(3,\).*4 queries"):
        loss.in_batch(query, query, sample_weights=torch.ones(3))
    with pytest.raises(InputError, match=r"first_row=3 with 4 queries and 6 keys"):
        loss.in_batch(query, query, gathered=torch.randn(6, 8), first_row=3)
    with pytest.raises(InputError, match=r"own_negatives has shape \(4, 8\)"):
        loss(query, query, torch.randn(20, 8), own_negatives=query)
    with pytest.raises(InputError, match=r"concatenate the two"):
        loss(query, query, torch.randn(4, 2, 8), own_negatives=torch.randn(4, 2, 8))
    with pytest.raises(InputError, match=r"option='mixed' is unknown: choose one of mix,"):
        loss.in_batch(query, query, mixed=True)


def test_two_ways_have_negatives_of_their_own_in_each_direction():
    first, second = unit(6, 8).requires_grad_(), unit(6, 8).requires_grad_()
    of_first, of_second = unit(6, 3, 8).requires_grad_(), unit(6, 2, 8).requires_grad_()
    loss, inputs = MochiLoss(**SMALL), [first, second, of_first, of_second]

    def seeded():
        return torch.Generator().manual_seed(7)

    one, other = seeded(), seeded()
    ours = loss.symmetric(first, second, both_own_negatives=(of_first, of_second), generator=one)
    there = loss.in_batch(first, second, own_negatives=of_first, generator=other)
    back = loss.in_batch(second, first, own_negatives=of_second, generator=other)
    torch.testing.assert_close(ours, (there + back) / 2)
    gradients = [torch.autograd.grad(each, inputs) for each in (ours, (there + back) / 2)]
    for mine, expected in zip(*gradients, strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(mine, expected)


def test_two_ways_refuse_negatives_that_belong_to_one_side():
    first, second, own = unit(6, 8), unit(6, 8), unit(6, 3, 8)
    with pytest.raises(InputError, match=r"own_negatives cannot serve both.*both_own_negatives"):
        MochiLoss(**SMALL).symmetric(first, second, own_negatives=own)


def test_autocast_and_half_embeddings_are_computed_in_float32():
    query, key, shared = (each.float() for each in (unit(6, 8), unit(6, 8), unit(30, 8)))
    loss = MochiLoss(**SMALL, weights="hcl", denominator="debiased")
    values = []
    for inside in (False, True):
        raw = query.clone().requires_grad_()
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            value = loss(raw, key, shared, own_negatives=shared[None, :3].expand(6, 3, 8))
            value.backward()
        values.append((value, raw.grad))
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))
    assert values[1][0].dtype == torch.float32


@pytest.mark.parametrize("one_piece", [False, True])
def test_second_derivatives_of_the_module(one_piece):
    query, key, shared = torch.randn(4, 8).double().requires_grad_(), unit(4, 8), unit(20, 8)
    loss = MochiLoss(8, 0, 0, denominator="decoupled")

    def penalty(value):
        (gradient,) = torch.autograd.grad(value, query, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), query)[0]

    with device_path(one_piece):
        ours = penalty(loss(query, key, shared))
    unit_query = normalize(query, dim=1)
    positive = (unit_query * key).sum(dim=1) / 0.2
    theirs = penalty(((unit_query @ shared.T / 0.2).logsumexp(dim=1) - positive).mean())
    torch.testing.assert_close(ours, theirs)


def tower() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 8)).double()


@pytest.mark.parametrize("sizes", [[12], [4, 4, 4], [5, 5, 2]])
def test_chunks_of_the_encoder_and_one_loss_are_the_whole_batch(sizes):
    """Dropout is drawn chunk by chunk, and repeats itself."""
    images, texts = torch.randn(2, 12, 10, dtype=torch.float64)
    encoders = tower(), tower()
    learnt = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    loss = MochiLoss(5, 6, 4, learnt)

    def two_way(a, b):
        return loss.symmetric(a, b, generator=torch.Generator().manual_seed(1))

    parameters = [*encoders[0].parameters(), *encoders[1].parameters(), learnt]
    torch.manual_seed(9)
    embedded = [
        torch.cat([encoder(chunk) for chunk in given.split(sizes)])
        for encoder, given in zip(encoders, (images, texts), strict=True)
    ]
    whole = two_way(*embedded)
    expected = torch.autograd.grad(whole, parameters)
    torch.manual_seed(9)
    value = backward_in_chunks(
        two_way, (encoders[0], images.split(sizes)), (encoders[1], texts.split(sizes))
    )
    torch.testing.assert_close(value, whole.detach())
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("inside", [False, True])
def test_chunks_whose_backward_somebody_else_calls_in_another_precision(inside):
    """Embeddings with a graph: a scaled loss, backward outside of autocast, frozen encoders."""
    torch.manual_seed(8)
    encoder, frozen = nn.Linear(10, 8), nn.Linear(5, 8).requires_grad_(False)
    images, texts = torch.randn(12, 10), torch.randn(12, 5)
    loss, gradients = MochiLoss(5, 0, 0), []
    for chunks in (12, 5):
        encoder.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            query, key = encode_in_chunks(
                (encoder, images.split(chunks)), (frozen, texts.split(chunks))
            )
            value = loss.symmetric(query, key)
        assert query.dtype == (torch.bfloat16 if inside else torch.float32)
        (3 * value).backward()
        gradients.append(encoder.weight.grad.clone())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        whole = 3 * loss.symmetric(encoder(images), frozen(texts))
    (expected,) = torch.autograd.grad(whole, encoder.weight)
    for each in gradients:
        torch.testing.assert_close(each, expected, atol=2e-2 if inside else 1e-6, rtol=1e-2)
    assert frozen.weight.grad is None
    with torch.no_grad():
        assert not encode_in_chunks((encoder, images.split(5)))[0].requires_grad


def test_chunks_may_be_arguments_and_gradients_are_added_last():
    encoder, entered = nn.Bilinear(4, 4, 8).double(), []

    class NoSync:
        def __enter__(self):
            entered.append(True)

        def __exit__(self, *_):
            return None

    one, two = torch.randn(2, 6, 4, dtype=torch.float64)
    memory = MemoryQueue.prefilled(unit(30, 8)).double()
    chunks = [(one[:3], two[:3]), {"input1": one[3:], "input2": two[3:]}]
    loss = MochiLoss(5, 0, 0)
    value = backward_in_chunks(
        lambda query: loss(query, unit(6, 8), memory), (encoder, chunks), more_follow=NoSync
    )
    assert value.isfinite()
    assert encoder.weight.grad.abs().sum() > 0
    assert len(entered) == 2  # the loss's own backward, and the first chunk's
    with pytest.raises(InputError, match=r"one or more chunks"):
        backward_in_chunks(loss, (encoder, []))


def test_parts_of_a_batch_accumulate_to_the_whole():
    encoder, memory = tower().eval(), MemoryQueue.prefilled(unit(30, 8)).double()
    images, key = torch.randn(8, 10).double(), unit(8, 8)
    loss = MochiLoss(5, 0, 0, weights="hardness", denominator="dual-temperature")
    loss(encoder(images), key, memory).backward()
    whole = [each.grad.clone() for each in encoder.parameters()]
    encoder.zero_grad()
    for some, keys in zip(images.split(4), key.split(4), strict=True):
        (loss(encoder(some), keys, memory) / 2).backward()
    for parameter, expected in zip(encoder.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, expected)
