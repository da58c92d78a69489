"""MochiLoss with s = s' = 0 is what other libraries compute: the same numbers and gradients.

What they compute was read from their code. All take the mean over the queries, normalise, and
leave the query out of its own negatives. They differ in which keys are negatives, and when:

- lightly's NTXentLoss with a memory bank: the bank before this batch's keys are written; the loss
  writes them itself, when the query asks for a gradient. Where a batch does not fit into the rest
  of the bank, what is over is dropped, and writing starts again at slot 0. Our queue wraps.
- pytorch-metric-learning's CrossBatchMemory with `enqueue_mask`: the memory after this batch's
  keys were written. A query's own key is its positive, the other keys of the batch are negatives.
- Both without a memory: SimCLR's loss, in which both views are queries, and all other views of
  the batch are negatives.
"""

import pytest
import torch
from torch import Tensor

from hardmix import MemoryQueue, MochiLoss

BATCH, SIZE, DIM, TEMPERATURE = 8, 40, 16, 0.1


def plain() -> MochiLoss:
    return MochiLoss(num_hardest=1, num_pairs=0, num_with_query=0, temperature=TEMPERATURE)


def views() -> tuple[Tensor, Tensor]:
    """Two views' embeddings, alike but not equal, of any length."""
    first = 3 * torch.randn(BATCH, DIM)
    second = first + torch.randn(BATCH, DIM)
    return first.requires_grad_(), second.requires_grad_()


def gradients(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


def same(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def lightly_loss(size: int = SIZE):
    module = pytest.importorskip("lightly.loss", reason="pip install 'hardmix[examples]'")
    return module.NTXentLoss(temperature=TEMPERATURE, memory_bank_size=(size, DIM) if size else 0)


def metric_learning():
    return pytest.importorskip(
        "pytorch_metric_learning.losses", reason="pip install 'hardmix[examples]'"
    )


def test_lightlys_loss_and_memory_bank_and_ours_agree_step_by_step_round_the_ring():
    theirs = lightly_loss()
    memory, ours = MemoryQueue.prefilled(theirs.memory_bank.bank), plain()
    for _ in range(2 * SIZE // BATCH + 1):
        query, key = views()
        loss = ours(query, key.detach(), memory)
        memory.enqueue(key)
        expected = theirs(query, key.detach())
        assert same(loss, expected)
        assert same(*gradients(loss, query), *gradients(expected, query))
        assert torch.allclose(memory.keys, theirs.memory_bank.bank)
        assert int(memory.position) == int(theirs.memory_bank.bank_ptr)


def test_gradients_reach_a_key_that_asks_for_them_as_in_lightly():
    theirs = lightly_loss()
    memory = MemoryQueue.prefilled(theirs.memory_bank.bank)
    query, key = views()
    ours = gradients(plain()(query, key, memory), query, key)
    for one, other in zip(ours, gradients(theirs(query, key), query, key), strict=True):
        assert same(one, other)


def test_a_batch_that_does_not_fit_the_rest_of_the_queue_is_kept_by_ours_and_cut_by_lightlys():
    theirs = lightly_loss(size=12)
    memory = MemoryQueue.prefilled(theirs.memory_bank.bank)
    for _ in range(2):
        query, key = views()
        memory.enqueue(key)
        theirs(query, key.detach())
    unit = torch.nn.functional.normalize(key.detach(), dim=1)
    rest = 12 - BATCH
    assert torch.allclose(memory.keys[:rest], unit[rest:])
    assert not torch.isclose(theirs.memory_bank.bank[:rest], unit[rest:]).all(dim=1).any()
    assert torch.allclose(theirs.memory_bank.bank[BATCH:], unit[:rest])


def test_cross_batch_memory_is_a_queue_written_before_it_is_read_without_the_own_key():
    losses = metric_learning()
    theirs = losses.CrossBatchMemory(losses.NTXentLoss(TEMPERATURE), DIM, memory_size=SIZE + 3)
    memory, ours = MemoryQueue(SIZE + 3, DIM, start="empty"), plain()
    are_keys = torch.arange(2 * BATCH) >= BATCH
    for step in range(2 * SIZE // BATCH + 1):
        query, key = views()
        ids = step * BATCH + torch.arange(BATCH)
        memory.enqueue(key, ids=ids)
        loss = ours(query, key.detach(), memory, exclude=memory.same_image(ids))
        expected = theirs(torch.cat([query, key]), ids.repeat(2), enqueue_mask=are_keys)
        assert same(loss, expected)
        assert same(*gradients(loss, query), *gradients(expected, query))
        assert theirs.queue_idx == int(memory.position)


def simclr(loss: MochiLoss, first: Tensor, second: Tensor, **options) -> Tensor:
    """Return SimCLR's loss as in examples/simclr_in_batch.py, with each view as a query."""
    query, key = torch.cat([first, second]), torch.cat([second, first])
    itself = torch.eye(len(query), dtype=torch.bool).roll(len(first), dims=1)
    return loss.in_batch(query, key, exclude=itself, **options)


def test_in_batch_with_both_views_is_simclrs_loss_in_lightly():
    first, second = views()
    ours, theirs = simclr(plain(), first, second), lightly_loss(size=0)(first, second)
    assert same(ours, theirs)
    assert_same_gradients(ours, theirs, first, second)


def test_in_batch_with_both_views_is_simclrs_loss_in_pytorch_metric_learning():
    losses = metric_learning()
    first, second = views()
    theirs = losses.SelfSupervisedLoss(losses.NTXentLoss(TEMPERATURE))(first, second)
    ours = simclr(plain(), first, second)
    assert same(ours, theirs)
    assert_same_gradients(ours, theirs, first, second)


def assert_same_gradients(ours: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    for one, other in zip(gradients(ours, *inputs), gradients(theirs, *inputs), strict=True):
        assert same(one, other)


def test_mixing_only_adds_to_their_number():
    theirs = lightly_loss()
    memory = MemoryQueue.prefilled(theirs.memory_bank.bank)
    query, key = views()
    mixed = MochiLoss(num_hardest=20, num_pairs=30, num_with_query=10, temperature=TEMPERATURE)
    assert mixed(query, key, memory) > theirs(query, key)
