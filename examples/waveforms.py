"""Data of supcon_waveforms.py: generated waveforms of six kinds, with noise."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize


def waveforms(number: int, length: int = 512) -> tuple[Tensor, Tensor]:
    """Return waveforms (number, 1, length) and their kinds: three shapes, each with two echoes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(6, (number,), generator=generator)
    pitch = 8 + 8 * torch.rand(number, 1, generator=generator)
    phase = torch.rand(number, 1, generator=generator)
    turns = (torch.linspace(0, 1, length) * pitch + phase) % 1
    shapes = torch.stack([(2 * math.pi * turns).sin(), (turns - 0.5).sign(), 2 * turns - 1])
    waves = shapes[labels % 3, torch.arange(number)]
    echo = waves.roll(length // 3, dims=1) * (labels >= 3).unsqueeze(1)
    noise = torch.randn(number, length, generator=generator)
    return (waves + 0.8 * echo + 0.7 * noise).unsqueeze(1), labels


def nearest_accuracy(encoder: nn.Module, waves: Tensor, labels: Tensor) -> float:
    """Return how often the nearest of the first 800 has the label of one of the others."""
    with torch.no_grad():
        features = normalize(encoder(waves))
    nearest = (features[800:] @ features[:800].T).argmax(dim=1)
    return (labels[:800][nearest] == labels[800:]).float().mean().item()
