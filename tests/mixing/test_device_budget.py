"""The loss on a pretended GPU: few launches, no waiting, no atomics."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hardmix import InputError, MemoryQueue, MochiLoss, contrast, plan_mochi
from hardmix.methods.mixing_schedule import RowDraws, RowsGenerator
from hardmix.strategies import STRATEGIES, Candidates
from mixing_cases import any_plan
from pretended_gpu import DeviceLog, pretended_gpu
from reference import loss_and_gradient, unit

MOST_LAUNCHES = 80  # counted: 79
"""Launches of the loss, forward and backward, with a mask."""
MOST_WITHOUT_MASK = {"by PyTorch": 63, "for the rows of a process": 71}  # counted: 61, 69
"""Launches without a mask, by who draws the numbers; normalising the negatives adds two."""
K, DIM = 4096, 32


def assert_it_never_waits(log: DeviceLog) -> None:
    for name in ("synchronisations", "blocking_copies", "mixed_devices", "float_atomics"):
        assert log.by_place(getattr(log, name)) == [], name


def gpu_queue(filled: int = K, start: str = "random") -> MemoryQueue:
    queue = MemoryQueue(K, DIM, start=start)
    queue.enqueue(torch.randn(filled, DIM))
    return queue.to("cuda")


def step(log: DeviceLog, loss: MochiLoss, negatives, batch: int = 32, **options) -> int:
    """Run forward and backward passes, and return the number of launches."""
    query = torch.randn(batch, DIM, device="cuda", requires_grad=True)
    key = torch.randn(batch, DIM, device="cuda")
    log.clear()
    loss(query, key, negatives, **options).backward()
    launches = len(log.launches)
    assert_it_never_waits(log)
    assert bool(query.grad.isfinite().all())
    return launches


@pytest.mark.parametrize("batch", [32, 256])
@pytest.mark.parametrize("negatives", ["queue", "tensor"])
@pytest.mark.parametrize("drawn", ["by PyTorch", "for the rows of a process"])
def test_the_papers_loss_keeps_to_its_budget(batch, negatives, drawn):
    generator = None if drawn == "by PyTorch" else RowsGenerator()
    most = MOST_WITHOUT_MASK[drawn] + (0 if negatives == "queue" else 2)
    with pretended_gpu() as log:
        rows = gpu_queue() if negatives == "queue" else torch.randn(K, DIM, device="cuda")
        launches = step(log, MochiLoss(), rows, batch, generator=generator)
    assert launches <= most, log.by_place(log.launches)


def test_plain_moco_takes_half_of_that():
    with pretended_gpu() as log:
        assert step(log, MochiLoss(num_pairs=0, num_with_query=0), gpu_queue()) <= 35


@pytest.mark.parametrize("batch", [32, 256])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("filled", [100, 1500, K])
@pytest.mark.parametrize("start", ["random", "empty"])
def test_a_queue_at_any_fill_with_any_mask_keeps_to_the_same_budget(start, filled, masked, batch):
    with pretended_gpu() as log:
        exclude = torch.rand(batch, K, device="cuda") < 0.5 if masked else None
        options = {"exclude": exclude, "generator": RowsGenerator()}
        launches = step(log, MochiLoss(), gpu_queue(filled, start), batch, **options)
    most = MOST_LAUNCHES if masked else MOST_WITHOUT_MASK["for the rows of a process"]
    assert launches <= most, log.by_place(log.launches)


def test_vectors_that_are_normalised_already_take_seven_launches_less():
    with pretended_gpu() as log:
        options = {"generator": RowDraws(1), "exclude": torch.rand(32, K, device="cuda") < 0.5}
        usual = step(log, MochiLoss(), gpu_queue(), **options)
        assert step(log, MochiLoss(), gpu_queue(), **options, normalised=True) == usual - 7


@pytest.mark.parametrize("filled", [0, 1])
def test_a_queue_without_a_pair_is_never_waited_for(filled):
    with pretended_gpu() as log:
        step(log, MochiLoss(), gpu_queue(filled, "empty"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("real_negatives", ["keep", "drop_hardest"])
def test_no_strategy_is_waited_for(strategy, real_negatives):
    loss = MochiLoss(64, 100, 50, strategy=strategy, real_negatives=real_negatives)
    with pretended_gpu() as log:
        step(log, loss, gpu_queue())
        exclude = torch.rand(32, K, device="cuda") < 0.5
        step(log, loss, gpu_queue(), exclude=exclude)


def test_gradients_of_keys_and_negatives_and_of_the_batch_alone():
    with pretended_gpu() as log:
        query, key = (torch.randn(40, DIM, device="cuda", requires_grad=True) for _ in range(2))
        log.clear()
        MochiLoss(16, 20, 10).in_batch(query, key).backward()
        assert_it_never_waits(log)


def test_a_queue_is_written_without_waiting_in_one_copy_each():
    with pretended_gpu() as log:
        queue, keys = gpu_queue(), torch.randn(64, DIM, device="cuda")
        labels = torch.arange(64, device="cuda")
        log.clear()
        queue.enqueue(keys, labels, labels)
        assert_it_never_waits(log)
        assert len(log.launches) <= 5
        log.clear()
        queue.enqueue(keys, labels, labels, normalised=True)
        assert len(log.launches) == 3


@settings(max_examples=100)
@given(any_plan(), st.sampled_from([0.07, 0.2, 1.0]))
def test_on_a_device_too_loss_and_gradient_equal_the_slow_float64_loops(case, temperature):
    query, key, negatives, plan, exclude = case
    expected, gradient = loss_and_gradient(query, key, negatives, plan, temperature, exclude)
    with pretended_gpu() as log:
        here = query.to("cuda").requires_grad_()
        vectors = here, key.to("cuda"), negatives.to("cuda")
        there = type(plan)(*(None if part is None else part.to("cuda") for part in plan))
        mask = None if exclude is None else exclude.to("cuda")
        log.clear()
        outcome = contrast(*vectors, there, temperature=temperature, exclude=mask)
        outcome.per_query.sum().backward()
        assert_it_never_waits(log)
        ours = outcome.per_query.detach().cpu(), here.grad.cpu(), outcome.synthetic.cpu()
    assert torch.allclose(ours[0], expected, rtol=1e-10, atol=1e-12)
    assert torch.allclose(ours[1], gradient, rtol=1e-9, atol=1e-10)
    usual = contrast(query, key, negatives, plan, temperature=temperature, exclude=exclude)
    assert torch.allclose(ours[2], usual.synthetic)


@pytest.mark.parametrize("through_query", [False, True])
@pytest.mark.parametrize("strategy", ["mochi", "mixed-with-key", "beta-weighted"])
def test_every_gradient_on_a_device_is_the_cpus(strategy, through_query, monkeypatch):
    monkeypatch.setattr("hardmix.mixing.ranking.DEVICE_CHUNK_ELEMENTS", 2 * 60 * 8)  # in 3 parts
    raw = [unit(5, 8), unit(5, 8), unit(50, 8)]
    plan = STRATEGIES[strategy].strategy(
        Candidates(logits=raw[0] @ raw[2].T, num_hardest=9, num_pairs=40, num_with_query=20)
    )
    factor = torch.arange(1.0, 6.0).double()

    def gradients(device: str) -> list[torch.Tensor]:
        vectors = [each.detach().to(device).requires_grad_() for each in raw]
        there = type(plan)(*(None if part is None else part.to(device) for part in plan))
        outcome = contrast(*vectors, there, temperature=0.2, through_query=through_query)
        found = torch.autograd.grad((outcome.per_query * factor.to(device)).sum(), vectors)
        return [each.cpu() for each in found]

    expected = gradients("cpu")
    with pretended_gpu():
        ours = gradients("cuda")
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(expected, ours, strict=True))


@pytest.mark.parametrize("length", [1e-30, 1e-13, 1.0, 1e25])
def test_the_whole_loss_on_a_device_is_the_cpus(length):
    raw, loss = torch.randn(6, DIM), MochiLoss(20, 30, 10)
    key, memory = torch.randn(6, DIM), MemoryQueue.prefilled(torch.randn(100, DIM))

    def found(device: str) -> list[torch.Tensor]:
        generator = RowsGenerator()
        generator.manual_seed(3)
        query = (length * raw).to(device).requires_grad_()
        there = MemoryQueue.prefilled(memory.keys.to(device))
        value = loss(query, key.to(device), there, generator=generator)
        value.backward()
        return [value.detach().cpu(), length * query.grad.cpu()]

    expected = found("cpu")
    with pretended_gpu():
        ours = found("cuda")
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)


def test_on_a_device_nan_is_refused_only_when_asked_for():
    with pretended_gpu() as log:
        query = torch.randn(4, DIM, device="cuda")
        query[2, 1] = torch.nan
        key, queue, loss = torch.randn(4, DIM, device="cuda"), gpu_queue(), MochiLoss(20, 30, 10)
        log.clear()
        assert bool(loss(query, key, queue).isnan())
        assert len(log.synchronisations) == 1  # the assertion's own
        assert bool(contrast(query, key, queue.keys, temperature=0.2).loss.isnan())
        assert len(log.synchronisations) == 2
        for ask in (
            lambda: loss(query, key, queue, check=True),
            lambda: queue.enqueue(query, check=True),
        ):
            with pytest.raises(InputError, match="NaN"):
                ask()
        zero = torch.zeros(4, DIM, device="cuda")
        assert bool(loss(zero, key, queue).isnan())
        with pytest.raises(InputError, match="length 0"):
            loss(zero, key, queue, check=True)


def test_a_plan_can_be_made_and_contrasted_by_hand_without_waiting():
    with pretended_gpu() as log:
        query, negatives = (
            torch.nn.functional.normalize(torch.randn(n, DIM, device="cuda"), dim=1) for n in (8, K)
        )
        log.clear()
        plan = plan_mochi(query @ negatives.T, num_hardest=64, num_pairs=20, num_with_query=9)
        contrast(query, query, negatives, plan, temperature=0.2)
        assert_it_never_waits(log)
