"""The pretended GPU itself: what it counts, and that its numbers are the CPU's."""

import pytest
import torch
from torch import nn

from pretended_gpu import GpuTensor, pretended_gpu


def counts(log) -> dict[str, int]:
    return {name: len(entries) for name, entries in vars(log).items() if entries}


def test_training_gives_the_cpus_numbers_and_waits_for_nothing():
    def train(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
        model, images = model.to(device), torch.randn(5, 3, 4, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
        return [each.detach().cpu() for each in model.state_dict().values()]

    expected = train("cpu")
    with pretended_gpu() as log:
        assert nn.Linear(2, 2).to("cuda").weight.device == torch.device("cuda", 0)
        ours = train("cuda")
    assert all(torch.equal(a, b) for a, b in zip(expected, ours, strict=True))
    assert not log.synchronisations
    assert not log.mixed_devices
    assert 30 < len(log.launches) < 100


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (lambda x: x.sum().item(), {"launches": 2, "synchronisations": 1}),
        (lambda x: bool((x > 0).all()), {"launches": 3, "synchronisations": 1}),
        (lambda x: x[0].tolist(), {"synchronisations": 1}),
        (lambda x: x.cpu(), {"blocking_copies": 1}),
        (lambda x: x.to("cpu", non_blocking=True), {"other_copies": 1}),
        (lambda x: x[x > 0], {"launches": 2, "synchronisations": 1}),
        (lambda x: x.view(-1)[2:].unsqueeze(0).expand(3, -1), {}),
        (lambda x: torch.tensor([1.0], device="cuda") * x, {"launches": 1, "blocking_copies": 1}),
        (lambda x: torch.arange(3, device=x.device), {"launches": 1}),
        (lambda x: torch.ones(3, 4).to(x), {"blocking_copies": 1}),
        (lambda x: torch.ones(3, 4).to("cuda", non_blocking=True), {"blocking_copies": 1}),
        (
            lambda x: torch.ones(3, 4).pin_memory().to("cuda", non_blocking=True),
            {"other_copies": 1},
        ),
        (lambda x: x[torch.tensor([0, 2])], {"launches": 1, "blocking_copies": 1}),
        (lambda x: x * torch.tensor(2.0), {"launches": 1}),
        (lambda x: x * torch.ones(4), {"launches": 1, "mixed_devices": 1}),
        (lambda x: x.uniform_(generator=torch.Generator()), {"launches": 1, "mixed_devices": 1}),
        (
            lambda x: x.scatter_add_(1, torch.zeros(3, 4, device="cuda").long(), x.clone()),
            {"launches": 4, "float_atomics": 1},
        ),
        (lambda x: x.index_fill_(0, torch.arange(2, device="cuda"), 0.0), {"launches": 2}),
    ],
)
def test_what_is_counted(what, expected):
    with pretended_gpu() as log:
        x = torch.rand(3, 4, device="cuda")
        log.clear()
        what(x)
    assert counts(log) == expected


def test_entries_know_their_place_and_backward_is_seen():
    with pretended_gpu() as log:
        x = torch.rand(3, device="cuda", requires_grad=True)
        x.square().sum().backward()
        assert isinstance(x.grad, GpuTensor)
    assert {entry.place.split(":")[0] for entry in log.launches} == {
        "runtime/test_pretended_gpu.py"
    }
    assert len(log.launches) >= 5


def test_afterwards_nothing_is_pretended():
    with pretended_gpu():
        pass
    if torch.cuda.is_available():
        pytest.skip("a real one answers")
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(2, device="cuda")


def test_numpy_refuses_as_it_does_on_a_gpu():
    with pretended_gpu(), pytest.raises(TypeError, match="numpy"):
        torch.ones(2, device="cuda").numpy()
