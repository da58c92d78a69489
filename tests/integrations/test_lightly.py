"""NTXentLoss in place of lightly's: the same numbers without mixing, step by step."""

import pytest
import torch

from hardmix import InputError, MemoryQueue, MochiLoss
from hardmix.integrations import NTXentLoss
from hardmix.runtime.distributed import gather
from ranks import in_two_processes

pytestmark = pytest.mark.slow

PLAIN = {"num_pairs": 0, "num_with_query": 0}
BATCH, DIM = 8, 16


def views():
    first = 3 * torch.randn(BATCH, DIM)
    second = first + torch.randn(BATCH, DIM)
    return first.requires_grad_(), second.requires_grad_()


def lightlys():
    return pytest.importorskip("lightly.loss", reason="pip install 'hardmix[peers]'").NTXentLoss


def assert_same(ours, theirs, *inputs):
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True
    ):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("size", [(40, DIM), [40, DIM], 0, (0,), (0, DIM)])
def test_without_mixing_it_is_lightlys_loss_at_every_step_round_the_bank(size):
    losses = []
    for kind, options in ((lightlys(), {}), (NTXentLoss, {**PLAIN, "start": "random"})):
        torch.manual_seed(1)  # both begin with the same noise
        losses.append(kind(0.1, size, **options))
    theirs, ours = losses
    for _ in range(11):
        query, key = views()
        assert_same(ours(query, key), theirs(query, key), query, key)
    if ours.memory_bank is not None:
        torch.testing.assert_close(ours.memory_bank.keys, theirs.memory_bank.bank)
        assert ours.memory_bank.position == int(theirs.memory_bank.bank_ptr)


def test_the_bank_is_written_if_queries_ask_for_gradients_as_in_lightly():
    ours = NTXentLoss(memory_bank_size=(40, DIM))
    query, key = views()
    with torch.no_grad():
        ours(query.detach(), key)
    assert ours.memory_bank.filled == 0
    ours(query, key)
    assert ours.memory_bank.filled == BATCH


def test_with_mixing_it_is_mochi_loss_with_that_queue():
    counts = {"num_hardest": 20, "num_pairs": 15, "num_with_query": 5}
    ours = NTXentLoss(0.2, (40, DIM), **counts)
    ours.memory_bank.enqueue(torch.randn(40, DIM))
    memory = MemoryQueue.prefilled(ours.memory_bank.keys.clone())
    query, key = views()
    torch.manual_seed(4)
    expected = MochiLoss(**counts, temperature=0.2)(query, key, memory)
    torch.manual_seed(4)
    assert_same(ours(query, key), expected, query)
    assert ours(query, key) > NTXentLoss.forward(
        _with_bank(NTXentLoss(0.2, (40, DIM), **PLAIN), ours), query, key
    )


def _with_bank(loss, other):
    loss.load_state_dict(other.state_dict())
    return loss


def test_nothing_is_mixed_unless_asked_for_and_wrong_sizes_are_refused():
    plain = NTXentLoss(memory_bank_size=(40, DIM)).mochi
    assert (plain.num_pairs, plain.num_with_query) == (0, 0)
    mixed = NTXentLoss(memory_bank_size=(4096, DIM), num_pairs=8).mochi
    assert (mixed.num_hardest, mixed.num_pairs, mixed.num_with_query) == ("sixteenth", 8, 0)
    with pytest.raises(InputError, match="num_hardest=50 exceeds the 40 negatives"):
        NTXentLoss(memory_bank_size=(40, DIM), num_hardest=50, num_pairs=3)
    with pytest.raises(InputError, match="num_hardest=20 without points mixes nothing"):
        NTXentLoss(memory_bank_size=(40, DIM), num_hardest=20)
    with pytest.raises(InputError, match="option='num_pair' is unknown: choose one of num_pairs"):
        NTXentLoss(memory_bank_size=(40, DIM), num_pair=20)
    for size in (4096, (4096,), (-1, 3), (4, 0), (1, 2, 3), ()):
        with pytest.raises(InputError, match=r"memory_bank_size=.* must be \(size, dim\)"):
            NTXentLoss(memory_bank_size=size)


@pytest.mark.parametrize("backward_between", [False, True])
def test_the_second_direction_of_a_step_does_not_meet_the_keys_of_the_first(backward_between):
    """lightly issue 564: both directions of a step, with one memory bank."""
    ours = NTXentLoss(0.2, (40, DIM))
    ours.memory_bank.enqueue(torch.randn(7, DIM), ids=torch.arange(100, 107))
    before = ours.memory_bank.keys[:7].clone()
    (query, key), (other, back), ids = views(), views(), torch.arange(BATCH)
    mochi = MochiLoss(2, 0, 0, temperature=0.2)
    first = ours(query, key, ids)
    if backward_between:
        first.backward()
    bank = ours.memory_bank.keys[: 7 + BATCH].clone()
    second = ours(other, back, ids if backward_between else None)
    torch.testing.assert_close(first, mochi(query, key, before))
    if backward_between:  # no call can tell that this is the same step, but the ids can
        own = torch.cat([torch.zeros(BATCH, 7), torch.eye(BATCH)], dim=1).bool()
        torch.testing.assert_close(second, mochi(other, back, bank, own))
        second.backward()
    else:
        torch.testing.assert_close(second, mochi(other, back, before))
        (first + second).backward()
    assert ours.memory_bank.filled == 7 + 2 * BATCH
    query, key = views()
    expected = mochi(query, key, ours.memory_bank.keys[: 7 + 2 * BATCH].clone())
    torch.testing.assert_close(ours(query, key), expected)


def one_process_and_two(number):
    """Each process has its queries and the keys of all; gradients are averaged as by DDP."""
    for size in (0, (32, DIM)):
        torch.manual_seed(1)
        whole = NTXentLoss(0.1, size, **PLAIN)
        torch.manual_seed(1)
        ours = NTXentLoss(0.1, size, gather_distributed=True, **PLAIN)
        for _ in range(3):
            weights = torch.randn(DIM, DIM, requires_grad=True)
            first, second = torch.randn(2, 2 * BATCH, DIM) @ weights
            mine = [each.chunk(2)[number] for each in (first, second)]
            expected, value = whole(first, second), ours(*mine)
            gradients = [
                torch.autograd.grad(x, weights, retain_graph=True) for x in (value, expected)
            ]
            averaged = gather(gradients[0][0].unsqueeze(0)).mean(dim=0)
            torch.testing.assert_close(averaged, gradients[1][0], atol=1e-6, rtol=1e-4)
            torch.testing.assert_close(
                gather(value.detach().unsqueeze(0)).mean(), expected.detach()
            )
        if size:
            torch.testing.assert_close(ours.memory_bank.keys, whole.memory_bank.keys)


def test_two_processes_are_one_with_the_whole_batch():
    in_two_processes(one_process_and_two)
