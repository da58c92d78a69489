"""Encoder and images to features: the frozen trunk on evaluation crops, every image once."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor, nn

from hardmix.console import progress
from hardmix.datasets import ImageSet
from hardmix.encoders import build_encoder
from hardmix.errors import InputError
from hardmix.loading import evaluation_batches
from hardmix.precision import Compute
from hardmix.runs import Run


class Features(NamedTuple):
    """Features of a data set, in its order, on the CPU."""

    features: Float[Tensor, "n dim"]
    labels: Int[Tensor, " n"]
    """-1 where unknown."""
    ids: Int[Tensor, " n"]


def load_trunk(run: Run) -> nn.Module:
    """The trained trunk of a run, on the CPU and in evaluation mode."""
    if not run.encoder_file.exists():
        raise InputError(f"{run.path} has no encoder.safetensors: it has not finished training.")
    config = run.config()
    encoder = build_encoder(config.model, config.data.channels, image_size=config.data.image_size)
    encoder.trunk.load_state_dict(load_file(run.encoder_file))
    return encoder.trunk.eval()


@torch.no_grad()
def extract(
    trunk: nn.Module,
    images: ImageSet,
    *,
    image_size: int,
    compute: Compute,
    batch_size: int = 256,
    workers: int = 0,
    title: str = "features",
) -> Features:
    """The trunk's features (no head: Sec. 4.3), in evaluation mode; its mode is restored."""
    training = trunk.training
    trunk.eval()
    parts = []
    try:
        with progress(title, len(images)) as meter:
            for pictures, labels, ids in evaluation_batches(
                images, image_size, batch_size, compute.device, workers
            ):
                with compute.autocast():
                    features = trunk(pictures.to(memory_format=torch.channels_last))
                parts.append((features.float().cpu(), labels.cpu(), ids.cpu()))
                meter.advance(sum(len(part[1]) for part in parts))
    finally:
        trunk.train(training)
    return Features(*(torch.cat(column) for column in zip(*parts, strict=True)))
