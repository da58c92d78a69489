"""Labels and ids as arguments: SupCon in one call, and negatives that are the same thing."""

import math
import warnings

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from hardmix import InputError, MemoryQueue, MochiLoss, losses

TAU = 0.2


def plain(**options) -> MochiLoss:
    return MochiLoss(num_hardest=2, num_pairs=0, num_with_query=0, temperature=TAU, **options)


def slow_supcon(embeddings: Tensor, labels: Tensor, bank: Tensor, bank_labels: Tensor) -> Tensor:
    """Khosla et al. 2020, Eq. 2, sample by sample in float64; NaN without a positive."""
    everything = normalize(torch.cat([embeddings, bank]).double(), dim=1)
    everyone = torch.cat([labels, bank_labels])
    values = []
    for i in range(len(embeddings)):
        others = [j for j in range(len(everything)) if j != i]
        total = torch.stack([everything[i] @ everything[j] / TAU for j in others]).logsumexp(0)
        members = [j for j in others if everyone[j] == labels[i] and labels[i] >= 0]
        terms = [total - everything[i] @ everything[j] / TAU for j in members]
        values.append(torch.stack(terms).mean() if terms else torch.tensor(math.nan).double())
    return torch.stack(values)


@given(st.integers(0, 10_000), st.integers(2, 12), st.integers(0, 9), st.integers(1, 5))
def test_in_batch_with_labels_is_supcon(seed, batch, bank, classes):
    torch.manual_seed(seed)
    embeddings = torch.randn(batch, 6, dtype=torch.float64, requires_grad=True)
    stored = torch.randn(bank, 6, dtype=torch.float64)
    labels, of_stored = torch.randint(-1, classes, (batch,)), torch.randint(-1, classes, (bank,))
    expected = slow_supcon(embeddings, labels, stored, of_stored)
    more = {"gathered": torch.cat([embeddings, stored])} if bank else {}
    if bank:
        more["negative_labels"] = torch.cat([labels, of_stored])
    each = plain().in_batch(embeddings, labels=labels, reduction="none", **more)
    counts = ~expected.isnan()
    assert torch.allclose(each[counts], expected[counts], rtol=1e-12)
    assert (each[~counts] == 0).all()
    value = plain().in_batch(embeddings, labels=labels, **more)
    outcome, _ = plain().contrast_in_batch(embeddings, labels=labels, **more)
    assert torch.equal(outcome.loss, value)
    if counts.any():
        assert torch.allclose(value, expected[counts].mean(), rtol=1e-12)
        ours, theirs = (
            torch.autograd.grad(loss, embeddings)[0] for loss in (value, expected[counts].mean())
        )
        assert torch.allclose(ours, theirs, atol=1e-12)
    else:
        assert value == 0


def test_a_sample_passed_as_its_own_key_is_not_its_own_positive():
    embeddings, labels = torch.randn(12, 6), torch.arange(12) % 3
    once = plain().in_batch(embeddings, labels=labels)
    assert torch.equal(plain().in_batch(embeddings, embeddings, labels=labels), once)
    mask = (labels.unsqueeze(1) == labels) & ~torch.eye(12, dtype=torch.bool)
    assert torch.equal(plain().in_batch(embeddings, positives=mask), once)


def test_supcon_is_that_of_pytorch_metric_learning():
    metric_learning = pytest.importorskip(
        "pytorch_metric_learning.losses", reason="pip install 'hardmix[examples]'"
    )
    embeddings, labels = torch.randn(32, 16, requires_grad=True), torch.randint(0, 6, (32,))
    labels[0] = 99  # alone in its class
    expected = metric_learning.SupConLoss(temperature=TAU)(embeddings, labels)
    value = plain().in_batch(embeddings, labels=labels)
    assert torch.allclose(value, expected, atol=1e-6)
    ours, theirs = (torch.autograd.grad(loss, embeddings)[0] for loss in (value, expected))
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("denominator", ["infonce", "supcon-in"])
def test_labels_with_a_queue_make_positives_of_its_keys(denominator):
    loss = plain(denominator=denominator)
    memory = MemoryQueue(20, 6)
    labels = torch.arange(8) % 3
    memory.enqueue(torch.randn(16, 6), labels=torch.arange(16) % 4)
    query, key = torch.randn(8, 6, requires_grad=True), torch.randn(8, 6)
    expected = loss(query, key, memory, positives=memory.same_class(labels))
    assert torch.equal(loss(query, key, memory, labels=labels), expected)
    stored = {"negative_labels": memory.labels}
    assert torch.equal(loss(query, key, memory.keys, labels=labels, **stored), expected)


def test_labels_may_leave_out_instead():
    memory, labels = MemoryQueue(20, 6), torch.arange(8) % 3
    memory.enqueue(torch.randn(20, 6), labels=torch.arange(20) % 4)
    query, key, loss = torch.randn(8, 6), torch.randn(8, 6), plain(denominator="decoupled")
    left_out = loss(query, key, memory, labels=labels, same_label="exclude")
    assert torch.equal(left_out, loss(query, key, memory, memory.same_class(labels)))
    with pytest.raises(InputError, match='same_label="exclude"'):
        loss(query, key, memory, labels=labels)


def test_negatives_with_the_querys_id_are_left_out_and_are_no_positives():
    memory, ids = MemoryQueue(20, 6), torch.arange(8)
    memory.enqueue(torch.randn(20, 6), labels=torch.arange(20) % 4, ids=torch.arange(20) % 10)
    query, key, loss = torch.randn(8, 6), torch.randn(8, 6), plain()
    assert torch.equal(
        loss(query, key, memory, ids=ids), loss(query, key, memory, memory.same_id(ids))
    )
    assert torch.equal(memory.same_id(ids), memory.same_image(ids))
    both = loss(query, key, memory, ids=ids, labels=ids % 4)
    positives = memory.same_class(ids % 4) & ~memory.same_id(ids)
    assert torch.equal(both, loss(query, key, memory, memory.same_id(ids), positives=positives))


def test_equal_ids_in_a_batch_are_left_out_in_both_directions():
    first, second, ids = torch.randn(6, 5), torch.randn(6, 5), torch.tensor([0, 1, 1, 2, 3, -1])
    mask = (ids.unsqueeze(1) == ids) & (ids >= 0)
    mask &= ~torch.eye(6, dtype=torch.bool)
    loss = plain()
    assert torch.equal(loss.in_batch(first, second, ids=ids), loss.in_batch(first, second, mask))
    assert torch.equal(loss.symmetric(first, second, ids=ids), loss.symmetric(first, second, mask))


def test_positives_of_labels_are_never_mixed():
    loss = MochiLoss(10, 40, 10, temperature=TAU)
    embeddings, labels = torch.randn(20, 6), torch.arange(20) % 2
    _, plan = loss.contrast_in_batch(embeddings, labels=labels)
    assert plan is not None
    made = plan.base >= 0
    assert made.all()
    assert (labels[plan.base] != labels.unsqueeze(1)).all()


def test_logq_takes_the_log_of_the_sampling_probability_from_each_negatives_logit():
    probability = torch.rand(9).double().log()
    memory = MemoryQueue(12, 5).double()
    memory.enqueue(torch.randn(12, 5).double(), ids=torch.tensor([*range(9), -1, 3, 3]))
    query, key = torch.randn(4, 5).double(), torch.randn(4, 5).double()
    ids = torch.tensor([0, 3, 8, -1])
    weighted = plain(weights=losses.logq_weights(probability))
    value = weighted(query, key, memory, ids=ids, reduction="none")
    unit, keys = normalize(query, dim=1), normalize(key, dim=1)
    logits = unit @ memory.keys.T / TAU
    logits -= torch.where(memory.ids >= 0, probability[memory.ids.clamp(min=0)], 0.0)
    logits = logits.masked_fill(memory.same_id(ids), -math.inf)
    positive = (unit * keys).sum(dim=1, keepdim=True) / TAU
    expected = torch.cat([positive, logits], dim=1).logsumexp(dim=1) - positive.squeeze(1)
    assert torch.allclose(value, expected, rtol=1e-12)
    with pytest.raises(InputError, match="negative_ids"):
        weighted(query, key, memory.keys)


def test_a_sixteenth_of_the_negatives_may_be_mixed():
    loss = MochiLoss("sixteenth", 30, 0, temperature=TAU)
    query, bank = torch.randn(3, 6), torch.randn(64, 6)
    _, plan = loss.contrast(query, torch.randn(3, 6), bank, check=False)
    assert plan is not None
    hardest = (normalize(query, dim=1) @ normalize(bank, dim=1).T).topk(4, dim=1).indices
    for row in range(3):
        assert set(plan.base[row].tolist()) <= set(hardest[row].tolist())


def test_points_that_drown_the_real_negatives_are_warned_of_once():
    loss = MochiLoss(64, 1024, 128, temperature=TAU)
    query, key, bank = torch.randn(16, 8), torch.randn(16, 8), torch.randn(64, 8)
    with pytest.warns(UserWarning, match=r"synthetic points hold 9\d% .* lower num_pairs=1024"):
        loss(query, key, bank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            loss(query, key, bank)
        MochiLoss(64, 4, 4, temperature=TAU)(query, key, bank)
        MochiLoss(64, 1024, 128, temperature=TAU)(query, key, bank, check=False)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plain().in_batch(torch.randn(4, 3)), "labels="),
        (
            lambda: plain()(torch.randn(4, 3), torch.randn(4, 3), torch.randn(5, 3), labels=Y),
            "negative_labels",
        ),
        (
            lambda: plain()(torch.randn(4, 3), torch.randn(4, 3), stored(), ids=Y),
            r"memory.enqueue\(keys, ids=ids\)",
        ),
        (
            lambda: plain()(torch.randn(4, 3), torch.randn(4, 3), stored(), negative_ids=Y, ids=Y),
            "it knows its own",
        ),
        (lambda: plain().in_batch(torch.randn(4, 3), labels=Y[:3]), "each of the 4 queries"),
        (lambda: plain().in_batch(torch.randn(4, 3), labels=Y, same_label="drop"), "positives"),
        (lambda: plain().in_batch(torch.randn(4, 3), labels=Y, same_label="exclude"), "keys"),
        (
            lambda: plain().in_batch(
                torch.randn(4, 3), torch.randn(4, 3), labels=Y, gathered=torch.randn(8, 3)
            ),
            "negative_labels",
        ),
        (
            lambda: plain().in_batch(torch.randn(4, 3), labels=[0, 1, 0, 1]),
            "labels is of type list",
        ),
        (lambda: losses.logq_weights(torch.zeros(3, 2)), "one floating-point number"),
        (lambda: plain(weights=losses.logq_weights), "the factory itself: call it"),
    ],
)
def test_what_is_missing_is_named(call, words, unchecked_types):
    with pytest.raises(InputError, match=words):
        call()


Y = torch.tensor([0, 1, 0, 1])


def stored() -> MemoryQueue:
    memory = MemoryQueue(8, 3)
    memory.enqueue(torch.randn(8, 3))
    return memory
