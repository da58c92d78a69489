"""MochiLoss in anybody's training loop."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from hardmix import MemoryQueue, MixPlan, MochiLoss, contrast, plan_mochi
from hardmix.strategies import Candidates, plan_points

SMALL = {"num_hardest": 20, "num_pairs": 30, "num_with_query": 10}


def filled(size: int = 100, dim: int = 16) -> MemoryQueue:
    return MemoryQueue.prefilled(torch.randn(size, dim), labels=torch.arange(size) % 5)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def test_equals_plan_and_contrast_on_normalised_vectors():
    query, key, memory = 7 * torch.randn(6, 16), 0.1 * torch.randn(6, 16), filled()
    ours = MochiLoss(**SMALL)(query, key, memory, generator=seeded())
    q, k = normalize(query, dim=1), normalize(key, dim=1)
    plan = plan_mochi(q @ memory.keys.T, **SMALL, generator=seeded())
    assert torch.allclose(ours, contrast(q, k, memory.keys, plan, temperature=0.2).loss)


def test_a_tensor_of_any_lengths_and_a_queue_of_the_same_keys_agree():
    query, key, raw = torch.randn(6, 16), torch.randn(6, 16), torch.randn(100, 16) * 5
    memory = MemoryQueue.prefilled(raw)
    losses = [MochiLoss(**SMALL)(query, key, n, generator=seeded()) for n in (raw, memory)]
    assert torch.allclose(*losses)


def test_without_points_it_is_plain_moco_bit_for_bit():
    query, key, memory = torch.randn(6, 16), torch.randn(6, 16), filled()
    none = MochiLoss(num_hardest=20, num_pairs=0, num_with_query=0)(query, key, memory)
    warm_up = MochiLoss(**SMALL)(query, key, memory, mix=False)
    q, k = normalize(query, dim=1), normalize(key, dim=1)
    assert torch.equal(none, warm_up)
    assert torch.equal(none, contrast(q, k, memory.keys, temperature=0.2).loss)


@pytest.mark.parametrize(("num_pairs", "num_with_query"), [(0, 10), (10, 0)])
def test_each_kind_of_point_works_alone(num_pairs, num_with_query):
    loss = MochiLoss(20, num_pairs, num_with_query)
    query, key, memory = torch.randn(6, 16), torch.randn(6, 16), filled()
    outcome, plan = loss.contrast(query, key, memory)
    assert plan.base.shape == (6, 10)
    assert outcome.loss > loss(query, key, memory, mix=False)


@pytest.mark.parametrize(
    ("batch", "size", "number"), [(1, 1, 1), (1, 2, 2), (7, 30, 30), (3, 5, 2)]
)
def test_smallest_and_odd_sizes(batch, size, number):
    loss = MochiLoss(number, 3 if number > 1 else 0, 40)
    memory = MemoryQueue(size, 8)
    query = torch.randn(batch, 8, requires_grad=True)
    for _ in range(4):
        value = loss(query, torch.randn(batch, 8), memory)
        value.backward()
        memory.enqueue(torch.randn(batch, 8))
        assert value.isfinite()
        assert query.grad.isfinite().all()


def test_unfilled_slots_are_contrasted_but_never_mixed():
    memory = MemoryQueue(100, 16)
    memory.enqueue(torch.randn(12, 16))
    loss = MochiLoss(**SMALL)
    outcome, plan = loss.contrast(torch.randn(6, 16), torch.randn(6, 16), memory)
    assert plan.base.max() < 12
    assert plan.partner.max() < 12
    plain = loss(torch.randn(6, 16), torch.randn(6, 16), memory, mix=False)
    assert plain.isfinite()
    assert outcome.real.shape == (6, 100)


def test_an_empty_start_contrasts_with_the_filled_slots_only():
    memory, keys = MemoryQueue(100, 16, start="empty"), torch.randn(12, 16)
    query, key, loss = torch.randn(6, 16), torch.randn(6, 16), MochiLoss(**SMALL)
    assert loss(query, key, memory) == 0  # nothing to contrast with yet
    memory.enqueue(keys)
    few = MochiLoss(12, 0, 0)(query, key, keys)
    assert torch.allclose(loss(query, key, memory, mix=False), few)


@pytest.mark.parametrize("start", ["random", "empty"])
@pytest.mark.parametrize("number", [2, 15, 60, 100])
@pytest.mark.parametrize("masked", [False, True])
def test_a_queue_that_is_not_full_is_a_shorter_queue(start, number, masked, monkeypatch):
    query, key = torch.randn(7, 16, requires_grad=True), torch.randn(7, 16)
    memory = MemoryQueue(100, 16, start=start)
    memory.enqueue(torch.randn(number, 16))
    exclude = torch.rand(7, 100) < 0.5 if masked else None

    def numbers() -> list[torch.Tensor]:
        loss = MochiLoss(**SMALL)
        outcome, plan = loss.contrast(query, key, memory, exclude=exclude, generator=seeded())
        made = plan.base >= 0
        parts = plan.base, plan.share.where(made, 0), plan.partner.where(made, 0)
        alone = loss(query, key, memory, exclude=exclude, generator=seeded())
        gradients = [torch.autograd.grad(each, query)[0] for each in (outcome.loss, alone)]
        return [outcome.loss, outcome.real, alone, *gradients, *parts]

    by_slots = numbers()
    monkeypatch.setattr("hardmix.mixing.loss._is_shorter", lambda *_: False)  # by a mask
    torch.testing.assert_close(by_slots, numbers(), rtol=1e-5, atol=1e-6)


def test_the_class_oracle_neither_contrasts_nor_mixes_the_querys_class():
    memory, labels = filled(), torch.arange(6) % 5
    exclude = memory.same_class(labels)
    query, key = torch.randn(6, 16), torch.randn(6, 16)
    _, plan = MochiLoss(**SMALL).contrast(query, key, memory, exclude)
    assert not exclude.gather(1, plan.base).any()
    assert not exclude.gather(1, plan.partner.clamp(min=0))[:, :30].any()
    oracle = MochiLoss(**SMALL)(query, key, memory, exclude, mix=False)
    rows = [
        contrast(
            normalize(query[i : i + 1], dim=1),
            normalize(key[i : i + 1], dim=1),
            memory.keys[memory.labels != labels[i]],
            temperature=0.2,
        ).loss
        for i in range(6)
    ]
    assert torch.allclose(oracle, torch.stack(rows).mean())


def test_in_batch_takes_the_other_samples_keys_for_negatives():
    query = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    key = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    ours = MochiLoss(8, 0, 0).in_batch(query, key)
    logits = normalize(query, dim=1) @ normalize(key, dim=1).T / 0.2
    theirs = cross_entropy(logits, torch.arange(8))
    assert torch.allclose(ours, theirs)
    gradients = [torch.autograd.grad(loss, [query, key]) for loss in (ours, theirs)]
    assert all(torch.allclose(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_in_batch_never_mixes_the_own_key_and_takes_any_batch(batch):
    seen = []

    def watching(candidates: Candidates) -> MixPlan:
        seen.append(plan_points(candidates))
        return seen[-1]

    query, key = torch.randn(batch, 16, requires_grad=True), torch.randn(batch, 16)
    loss = MochiLoss(1024, 30, 30, strategy=watching).in_batch(query, key)
    loss.backward()
    assert loss.isfinite()
    own = torch.arange(batch).unsqueeze(1)
    assert (seen[0].base != own).all()
    assert (seen[0].partner != own).all()


def test_real_negatives_may_be_dropped():
    query, key, memory = torch.randn(6, 16), torch.randn(6, 16), filled()
    kept, fewer, none = (
        MochiLoss(**SMALL, real_negatives=how).contrast(query, key, memory, generator=seeded())[0]
        for how in ("keep", "drop_hardest", "drop_all")
    )
    positive, synthetic = kept.positive / 0.2, kept.synthetic / 0.2
    only = torch.cat([positive.unsqueeze(1), synthetic], dim=1).logsumexp(dim=1) - positive
    assert torch.allclose(none.per_query, only)
    hardest = (kept.real / 0.2).topk(20).values.exp().sum(dim=1)
    difference = (kept.per_query + positive).exp() - (fewer.per_query + positive).exp()
    assert torch.allclose(difference, hardest, rtol=1e-4)


def hardest_alone(candidates: Candidates) -> MixPlan:
    """Mix a quarter of the query into its hardest negative: s' times, or once if s' is 0."""
    number = max(candidates.num_with_query, 1)
    base = candidates.similarity.argmax(dim=1, keepdim=True).expand(-1, number)
    share = torch.full(base.shape, 0.25, dtype=candidates.similarity.dtype)
    return MixPlan(base, torch.full_like(base, -1), share)


def test_a_callable_stands_for_a_strategys_name():
    query, key, memory = torch.randn(6, 16), torch.randn(6, 16), filled()
    _, plan = MochiLoss(20, 0, 3, strategy=hardest_alone).contrast(query, key, memory)
    assert plan.base.shape == (6, 3)
    assert (plan.share == 0.25).all()


def test_a_strategy_decides_itself_how_many_points_it_makes():
    query, key, memory = torch.randn(6, 16), torch.randn(6, 16), filled()
    loss = MochiLoss(20, 0, 0, strategy=hardest_alone)
    outcome, plan = loss.contrast(query, key, memory)
    assert plan.base.shape == (6, 1)
    assert torch.equal(plan.base.squeeze(1), outcome.real.argmax(dim=1))
    assert (outcome.per_query > loss.contrast(query, key, memory, mix=False)[0].per_query).all()
    assert torch.equal(loss(query, key, memory), outcome.loss)


@pytest.mark.parametrize("number", [1, 3])
def test_fewer_own_negatives_than_n_are_all_mixed(number):
    query, key, own = torch.randn(6, 16), torch.randn(6, 16), torch.randn(6, number, 16)
    outcome, plan = MochiLoss(64, 64, 16).contrast(query, key, own)
    assert outcome.loss.isfinite()
    # One negative makes no pair, but points with the query.
    assert plan.base.shape == (6, 16 if number == 1 else 80)
    assert set(plan.base.flatten().tolist()) == set(range(number))


def test_autocast_and_half_embeddings_give_a_float32_loss_and_half_gradients():
    query = torch.randn(6, 16, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = MochiLoss(**SMALL)(query, torch.randn(6, 16, dtype=torch.bfloat16), filled())
    loss.backward()
    assert loss.dtype == torch.float32
    assert query.grad.dtype == torch.bfloat16
    assert query.grad.isfinite().all()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, 0.0])
def test_unchecked_broken_vectors_give_nan(broken):
    query, key, memory, loss = torch.randn(6, 16), torch.randn(6, 16), filled(), MochiLoss(**SMALL)
    query[2] = broken
    assert loss(query, key, memory, check=False).isnan()
    outcome, _ = loss.contrast(query, key, memory, check=False)
    assert outcome.per_query.isnan().tolist() == [False, False, True, False, False, False]


def test_checking_changes_no_bit():
    query, key, memory, loss = torch.randn(6, 16), torch.randn(6, 16), filled(), MochiLoss(**SMALL)
    losses = [loss(query, key, memory, generator=seeded(), check=c) for c in (None, True, False)]
    assert losses[0] == losses[1] == losses[2]


def test_float64_stays_float64():
    query, key = torch.randn(6, 16).double(), torch.randn(6, 16).double()
    assert MochiLoss(**SMALL)(query, key, filled().double()).dtype == torch.float64


@pytest.mark.slow
def test_compiled_is_one_graph_for_every_fill_and_strategy_and_equals_eager():
    program = Path(__file__).parents[1] / "support" / "compiled_loss.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cuda_tensors_with_a_generator_on_any_device(device):
    loss, memory = MochiLoss(**SMALL), filled().cuda()
    query = torch.randn(6, 16, device="cuda", requires_grad=True)
    generator = torch.Generator(device).manual_seed(0)
    loss(query, torch.randn(6, 16, device="cuda"), memory, generator=generator).backward()
    assert query.grad.isfinite().all()


def test_training_learns_what_two_views_share():
    """Real MoCo training: of 32 inputs, 8 are the image and 24 differ from view to view."""
    encoder = nn.Linear(32, 16)
    key_encoder = copy.deepcopy(encoder).requires_grad_(False)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.3)
    loss, memory = MochiLoss(64, 64, 16), MemoryQueue(256, 16)

    def views(batch: int) -> list[torch.Tensor]:
        image = torch.randn(batch, 8)
        return [torch.cat([image, torch.randn(batch, 24)], dim=1) for _ in range(2)]

    def right_pairs() -> float:
        """Share of images whose own second view is the most similar of 100."""
        torch.manual_seed(9)
        first, second = (normalize(encoder(view), dim=1) for view in views(100))
        return float(((first @ second.T).argmax(dim=1) == torch.arange(100)).float().mean())

    before = right_pairs()
    for step in range(200):
        torch.manual_seed(step)
        first, second = views(32)
        with torch.no_grad():
            for slow, fast in zip(key_encoder.parameters(), encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            key = key_encoder(second)
        optimizer.zero_grad()
        loss(encoder(first), key, memory, mix=step >= 20).backward()
        optimizer.step()
        memory.enqueue(key)
    assert before < 0.3
    assert right_pairs() > 0.8
