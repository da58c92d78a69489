"""A PyTorch Lightning module whose checkpoints hold both encoders and the queue.

python examples/lightning_module.py [--steps 100]
"""

import lightning
import torch
import tyro
from torch.utils.data import DataLoader, TensorDataset

from digits import DIM, build_encoder, found, read_digits, view
from hardmix.integrations import MomentumContrast


class Mochi(MomentumContrast, lightning.LightningModule):
    """MoCo with mixed hard negatives."""

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:  # noqa: D102
        return self.contrast(view(batch[0]), view(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.AdamW(self.encoder.parameters(), lr=1e-3)


def main(steps: int = 100) -> tuple[float, float, lightning.Trainer]:
    """Train; return how many views were found before and after, and the trainer."""
    lightning.seed_everything(0, verbose=False)
    loader = DataLoader(TensorDataset(read_digits()[0]), 64, shuffle=True, drop_last=True)
    module = Mochi(build_encoder(), dim=DIM, queue_size=1024, momentum=0.95, num_pairs=64)
    before = found(module.encoder)
    trainer = lightning.Trainer(max_steps=steps, barebones=True)  # no progress bar, no files
    trainer.fit(module, loader)
    after = found(module.encoder)
    print(f"the other view found among 500: {before:.0%} before, {after:.0%} after {steps} steps")
    return before, after, trainer


if __name__ == "__main__":
    tyro.cli(main)
