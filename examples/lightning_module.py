"""A PyTorch Lightning module: the queue is a part of it, and so of its checkpoints.

python examples/lightning_module.py [--steps 100] [--batch-size 64]
"""

import copy

import lightning
import torch
import tyro
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from digits import DIM, build_encoder, follow, found, read_digits, view
from hardmix import MemoryQueue, MochiLoss


class Mochi(lightning.LightningModule):
    """MoCo with mixed hard negatives around any encoder."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.key_encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.loss = MochiLoss(num_hardest=128, num_pairs=128, num_with_query=16, temperature=0.2)
        self.memory = MemoryQueue(size=1024, dim=DIM)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of one batch; the queue is read, then written."""
        (images,) = batch
        follow(self.key_encoder, self.encoder)
        with torch.no_grad():
            key = self.key_encoder(view(images))
        loss = self.loss(self.encoder(view(images)), key, self.memory)
        self.memory.enqueue(key)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The key encoder needs none: it follows by momentum."""
        return torch.optim.AdamW(self.encoder.parameters(), lr=1e-3)


def main(steps: int = 100, batch_size: int = 64) -> tuple[float, float, lightning.Trainer]:
    """Train; return how many views were found before and after, and the trainer."""
    lightning.seed_everything(0, verbose=False)
    images = TensorDataset(read_digits()[0])
    loader = DataLoader(images, batch_size, shuffle=True, drop_last=True)
    module = Mochi(build_encoder())
    before = found(module.encoder)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=steps, enable_checkpointing=False, **quiet)
    trainer.fit(module, loader)
    after = found(module.encoder)
    print(f"the other view found among 500: {before:.0%} before, {after:.0%} after {steps} steps")
    return before, after, trainer


if __name__ == "__main__":
    tyro.cli(main)
