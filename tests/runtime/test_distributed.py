"""Collectives: no-ops on one process, and right between two real ones (gloo)."""

import copy

import pytest
import torch
import torch.distributed
from torch import nn

from hardmix.errors import InputError
from hardmix.mixing.loss import MochiLoss
from hardmix.mixing.queue import MemoryQueue
from hardmix.models.batch_norm import split_batch_norm, synchronise_batch_norm
from hardmix.models.encoders import Encoder, QueryKeyPair, encode_keys, shuffle_across
from hardmix.runtime.distributed import (
    Agreement,
    agree_on_max,
    broadcast,
    gather,
    gather_batch,
    is_main,
    rank,
    world_size,
    wrap,
)
from ranks import in_two_processes


def test_one_process_is_the_main_one_and_gathers_itself():
    tensor = torch.randn(4, 3)
    assert (rank(), world_size(), is_main()) == (0, 1, True)
    assert gather(tensor) is tensor
    assert Agreement(4).read() == 4
    assert broadcast(tensor) is tensor


def images_of_all() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(8, 3, 8, 8, generator=generator)


def permutation_of_all(step: int = 3) -> torch.Tensor:
    return torch.randperm(8, generator=torch.Generator().manual_seed(step))


def encoder() -> Encoder:
    torch.manual_seed(1)
    trunk = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return Encoder(trunk, 6, dim=5)


def check_everything(number):
    """One start of two processes for every claim: starting them is what takes the time."""
    assert (rank(), world_size(), is_main()) == (number, 2, number == 0)
    check_gather_is_in_rank_order(number)
    check_numbers_are_agreed_on_in_the_background(number)
    check_gradients_lie_where_they_are_summed(number)
    check_gradients_through_gather_are_those_of_one_process(number)
    check_batch_norm_of_all_processes_is_that_of_one(number)
    check_broadcast_is_rank_0s(number)
    check_shuffle_round_trip(number)
    check_keys_return_to_their_query_as_on_one_process(number)
    check_groups_are_spread(number)
    check_a_gathered_two_way_loss_is_that_of_one_process(number)
    check_a_queue_within_a_users_ddp(number)


def check_numbers_are_agreed_on_in_the_background(number):
    """Several at once, beside others that are read at once, in the order in which they began."""
    first, second = Agreement(3 - number), Agreement(5 + number)
    assert agree_on_max(number) == 1
    assert (first.read(), second.read(), first.read()) == (3, 6, 3)


def check_gradients_lie_where_they_are_summed(number):
    """A gradient is a view into DDP's bucket, so that it is not copied there and back."""
    module = nn.Linear(3, 2)
    shared = wrap(module, torch.device("cpu"))
    for step in range(3):
        module.zero_grad()
        shared(torch.full((1, 3), float(number + step))).sum().backward()
        assert module.weight.grad.tolist() == [[0.5 + step] * 3] * 2
    whole = module.weight.grad.untyped_storage()
    assert whole.data_ptr() == module.bias.grad.untyped_storage().data_ptr()


def check_gather_is_in_rank_order(number):
    rows = torch.arange(3) + 3 * number
    assert gather(rows).tolist() == [0, 1, 2, 3, 4, 5]
    images = torch.full((2, 3, 4, 4), float(number)).to(memory_format=torch.channels_last)
    assert gather(images)[:, 0, 0, 0].tolist() == [0, 0, 1, 1]
    trained = torch.ones(1, requires_grad=True) * 2
    assert not gather(trained).requires_grad
    keys = torch.arange(8.0).view(4, 2) + 8 * number
    keys[0, 0] = torch.nan
    ids = torch.arange(4) + 4 * number
    both = gather_batch(2, keys, ids, ids.bool())
    assert both[1].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert both[0].dtype == torch.float32
    assert both[0][1:, 1].tolist() == [3, 9, 11, 5, 7, 13, 15]
    assert both[2].tolist() == [False] + [True] * 7


def similarity_loss(mine, everyone):
    """Mean over own rows, each compared with all rows: as an in-batch contrast."""
    return torch.logsumexp(mine @ everyone.T, dim=1).mean()


def check_gradients_through_gather_are_those_of_one_process(number):
    layer = nn.Linear(3, 4).double()
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(2))
    nn.init.zeros_(layer.bias)
    rows = images_of_all()[:, :, 0, 0].double()
    outputs = layer(rows)
    expected = torch.autograd.grad(similarity_loss(outputs, outputs), layer.weight)[0]
    mine = layer(rows.chunk(2)[number])
    everyone = gather(mine, with_gradient=True)
    assert torch.equal(everyone, outputs)
    mean = torch.autograd.grad(similarity_loss(mine, everyone), layer.weight)[0]
    mean = gather(mean[None]).mean(dim=0)  # as DistributedDataParallel does
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert not gather(mine, with_gradient=True).requires_grad


def check_batch_norm_of_all_processes_is_that_of_one(number):
    images = images_of_all().double()
    for norm, batch in [(nn.BatchNorm2d(3), images), (nn.BatchNorm1d(3), images[:, :, 0, 0])]:
        alone = norm.double()
        nn.init.uniform_(alone.weight, 0.5, 2, generator=torch.Generator().manual_seed(4))
        shared = synchronise_batch_norm(copy.deepcopy(alone), torch.device("cpu"))
        whole = batch.clone().requires_grad_()
        part = batch.chunk(2)[number].clone().requires_grad_()
        expected, found = alone(whole), shared(part)
        torch.testing.assert_close(found, expected.chunk(2)[number])
        expected.sin().mean().backward()
        found.sin().mean().backward()
        torch.testing.assert_close(part.grad, 2 * whole.grad.chunk(2)[number])  # of a mean of two
        torch.testing.assert_close(shared.state_dict(), alone.state_dict())
        torch.testing.assert_close(shared.eval()(part), alone.eval()(part))


def check_broadcast_is_rank_0s(number):
    value = torch.full((2, 3), float(number))
    assert broadcast(value) is value
    assert value.eq(0).all()
    turned = torch.full((2, 3), float(number)).T
    assert broadcast(turned).eq(0).all()


def check_shuffle_round_trip(number):
    permutation = permutation_of_all()
    both = gather(permutation).view(2, 8)
    assert both[0].equal(both[1])
    mine = images_of_all().chunk(2)[number]
    for order in (permutation, torch.arange(8), torch.arange(8).flip(0)):
        gathered = gather(mine)[order[4 * number : 4 * number + 4]]
        assert shuffle_across(mine, order).equal(gathered)
    shuffled = shuffle_across(mine, permutation)
    assert shuffled.equal(images_of_all()[permutation].chunk(2)[number])
    assert shuffle_across(shuffled, permutation.argsort()).equal(mine)
    with pytest.raises(InputError, match="permutation has 4 entries for 2 x 4 rows"):
        shuffle_across(mine, permutation[:4])


def check_keys_return_to_their_query_as_on_one_process(number):
    """Two processes with a group each are one process with two groups (decision A25)."""
    permutation, mine = permutation_of_all(), images_of_all().chunk(2)[number]
    pair = QueryKeyPair(encoder(), key_bn_splits=2)
    keys = encode_keys(pair.key, mine, permutation)

    alone = split_batch_norm(encoder(), 2)
    with torch.no_grad():
        shuffled = alone(images_of_all()[permutation])
    expected = torch.empty_like(shuffled)
    expected[permutation] = shuffled
    torch.testing.assert_close(keys, expected.chunk(2)[number], rtol=0, atol=1e-6)
    assert not pair.shares_statistics


def check_groups_are_spread(number):
    mine = images_of_all().chunk(2)[number]
    keys = encode_keys(QueryKeyPair(encoder(), key_bn_splits=4).key, mine)
    expected = encode_keys(split_batch_norm(encoder(), 2), mine)
    torch.testing.assert_close(keys, expected, rtol=0, atol=1e-6)
    assert not QueryKeyPair(encoder(), key_bn_splits=1).shares_statistics
    with pytest.raises(InputError, match=r"key_bn_splits=3 .* 2 processes"):
        QueryKeyPair(encoder(), key_bn_splits=3)


def check_a_gathered_two_way_loss_is_that_of_one_process(number):
    """Each rank's queries against the keys of all; gradients averaged as by DDP."""
    torch.manual_seed(2)
    inputs, tower = torch.randn(2, 8, 6, dtype=torch.float64), torch.nn.Linear(6, 4).double()
    learnt = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    loss = MochiLoss(4, 0, 0, learnt, weights="hardness", denominator="debiased")
    parameters = [*tower.parameters(), learnt]
    whole = loss.symmetric(tower(inputs[0]), tower(inputs[1]))
    expected = torch.autograd.grad(whole, parameters)

    first, second = (tower(each.chunk(2)[number]) for each in inputs)
    everyone = gather(first, with_gradient=True), gather(second, with_gradient=True)
    mine = loss.symmetric(first, second, gathered=everyone, first_row=4 * number)
    gradients = torch.autograd.grad(mine, parameters)
    for gradient, other in zip(gradients, expected, strict=True):
        averaged = gather(gradient.unsqueeze(0)).mean(dim=0)
        torch.testing.assert_close(averaged, other, rtol=1e-10, atol=1e-12)
    losses = gather(mine.detach().unsqueeze(0))
    torch.testing.assert_close(losses.mean(), whole.detach())


class WithQueue(nn.Module):
    """A user's module with a queue inside."""

    def __init__(self):
        super().__init__()
        self.layer, self.memory = nn.Linear(4, 3), MemoryQueue(8, 3)

    def forward(self, rows):
        return self.layer(rows)


def check_a_queue_within_a_users_ddp(number):
    """DDP broadcasts its buffers at every step; position and filled are not buffers."""
    torch.manual_seed(number)
    model = WithQueue()
    shared = nn.parallel.DistributedDataParallel(model, broadcast_buffers=True)
    sent = [name for name, _ in shared.named_buffers()]
    assert sent == [f"module.memory.{name}" for name in ("keys", "labels", "ids")]
    first, written = model.memory.keys.clone(), []
    assert gather(first).chunk(2)[0].equal(first)  # rank 0's
    for step in range(2):
        query = shared(torch.randn(3, 4) + number + step)
        MochiLoss(4, 2, 2)(query, query.detach(), model.memory).backward()
        written.append(gather(query.detach()))
        model.memory.enqueue(written[-1])
    assert (model.memory.position, model.memory.filled) == (4, 8)
    assert type(model.memory.position) is type(model.memory.filled) is int
    keys = nn.functional.normalize(torch.cat(written), dim=1)
    torch.testing.assert_close(model.memory.keys, torch.cat([keys[8:], keys[4:8]]))
    gradient = model.layer.weight.grad[None]
    assert torch.equal(*gather(gradient))
    assert model.state_dict()["memory._extra_state"].tolist() == [4, 8]


def test_two_processes():
    in_two_processes(check_everything)
