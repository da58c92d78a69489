"""loss(embeddings, labels), against pytorch-metric-learning's SupConLoss and CrossBatchMemory."""

import pytest
import torch

from hardmix import InputError
from hardmix.integrations import SupConLoss
from hardmix.runtime.distributed import gather
from ranks import in_two_processes

BATCH, DIM, SIZE = 12, 6, 40


@pytest.fixture
def library():
    return pytest.importorskip(
        "pytorch_metric_learning.losses", reason="pip install 'hardmix[examples]'"
    )


def batch():
    return torch.randn(BATCH, DIM, requires_grad=True), torch.arange(BATCH) % 5


def assert_same(ours, theirs, embeddings):
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    gradients = [torch.autograd.grad(loss, embeddings)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


def test_it_is_the_librarys_loss(library):
    embeddings, labels = batch()
    labels[0] = 99
    ours, theirs = SupConLoss(0.2), library.SupConLoss(temperature=0.2)
    assert_same(ours(embeddings, labels), theirs(embeddings, labels), embeddings)


def test_with_a_queue_it_is_the_librarys_with_its_memory_round_the_ring(library):
    ours = SupConLoss(0.2, queue_size=SIZE, dim=DIM)
    theirs = library.CrossBatchMemory(
        library.SupConLoss(temperature=0.2), DIM, memory_size=SIZE + BATCH
    )
    # The library's memory holds this batch too, so it has one batch more. Its gradients reach a
    # sample as an anchor alone, ours also as another's positive or negative, as without a memory.
    for _ in range(8):
        embeddings, labels = batch()
        expected = theirs(embeddings, labels)
        torch.testing.assert_close(ours(embeddings, labels), expected, atol=1e-6, rtol=1e-5)


def test_a_sample_that_comes_again_does_not_meet_itself():
    loss, plain = SupConLoss(0.2, queue_size=SIZE, dim=DIM), SupConLoss(0.2)
    embeddings, labels = batch()
    ids = torch.arange(BATCH)
    loss(embeddings, labels, ids)
    again = loss(embeddings, labels, ids)
    mask = torch.eye(BATCH, dtype=torch.bool).repeat(1, 2)
    expected = plain.mochi.in_batch(
        embeddings,
        None,
        mask,
        gathered=torch.cat([embeddings, embeddings]),
        labels=labels,
        negative_labels=labels.repeat(2),
    )
    torch.testing.assert_close(again, expected)


def test_the_queue_is_saved_whole_and_evaluation_does_not_write_it():
    loss, copy = (SupConLoss(queue_size=SIZE, dim=DIM) for _ in range(2))
    loss(*batch())
    copy.load_state_dict(loss.state_dict())
    assert copy.memory.position == copy.memory.filled == BATCH
    embeddings, labels = batch()
    torch.testing.assert_close(copy.eval()(embeddings, labels), loss.eval()(embeddings, labels))
    assert copy.memory.filled == BATCH


def test_mixing_is_asked_for_by_name():
    embeddings, labels = batch()
    assert SupConLoss()(embeddings, labels) < SupConLoss(num_pairs=9)(embeddings, labels)


@pytest.mark.parametrize("options", [{"queue_size": 8}, {"queue_size": -1, "dim": 4}])
def test_a_queue_needs_a_size_and_dimensions(options):
    with pytest.raises(InputError, match=r"queue_size=.* with dim="):
        SupConLoss(**options)


def one_process_and_two(number):
    torch.manual_seed(3)
    whole = SupConLoss(0.2, queue_size=SIZE, dim=DIM)
    ours = SupConLoss(0.2, queue_size=SIZE, dim=DIM, gather_distributed=True)
    labels = torch.arange(2 * BATCH) % 5  # every sample has a positive
    for _ in range(2):
        weights = torch.randn(DIM, DIM, requires_grad=True)
        embeddings = torch.randn(2 * BATCH, DIM) @ weights
        value = ours(embeddings.chunk(2)[number], labels.chunk(2)[number])
        expected = whole(embeddings, labels)
        gradients = [torch.autograd.grad(x, weights, retain_graph=True) for x in (value, expected)]
        averaged = gather(gradients[0][0].unsqueeze(0)).mean(dim=0)
        torch.testing.assert_close(averaged, gradients[1][0], atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(gather(value.detach().unsqueeze(0)).mean(), expected.detach())
    torch.testing.assert_close(ours.memory.keys, whole.memory.keys)


def test_two_processes_are_one_with_the_whole_batch():
    in_two_processes(one_process_and_two)
