"""SupCon on waveforms: labels are all that it needs, and a queue if batches are small.

python examples/supcon_waveforms.py [--steps 150]
"""

import torch
import tyro
from torch import nn

from hardmix.integrations import SupConLoss
from waveforms import nearest_accuracy, waveforms


def main(steps: int = 150, batch_size: int = 32, seed: int = 0) -> tuple[float, float]:
    """Train on some waveforms; return the 1-NN accuracy of others before and after."""
    torch.manual_seed(seed)
    waves, labels = waveforms(1200)
    encoder = nn.Sequential(
        *(nn.Conv1d(1, 32, 9, stride=4), nn.ReLU(), nn.Conv1d(32, 64, 9, stride=4), nn.ReLU()),
        *(nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(256, 64)),
    )
    loss = SupConLoss(temperature=0.1, queue_size=256, dim=64)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    before = nearest_accuracy(encoder, waves, labels)
    for _ in range(steps):
        rows = torch.randint(800, (batch_size,))
        value = loss(encoder(waves[rows]), labels[rows])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    after = nearest_accuracy(encoder, waves, labels)
    print(f"the nearest of 800 waveforms has the right label: {before:.0%}, then {after:.0%}")
    return before, after


if __name__ == "__main__":
    tyro.cli(main)
