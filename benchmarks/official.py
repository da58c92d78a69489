"""Official MoCo's training step and views as usually written, for comparison.

A module whose queue is a buffer of dim x K, logits by einsum, a momentum update parameter by
parameter, CrossEntropyLoss, plain SGD, images and weights in the contiguous format. It runs in one
process, so batch normalisation is not shuffled. Views are made from PIL images, one by one.
"""

import copy
import random
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from PIL import Image, ImageFilter
from torch import Tensor, nn
from torch.nn.functional import normalize
from torchvision import transforms

from hardmix.data.colours import IMAGENET_MEAN, IMAGENET_STD
from hardmix.settings.config import OptimizerConfig

Images = Float[Tensor, "batch channels y x"]


class OfficialMoco(nn.Module):
    """Two encoders and a queue; a call returns logits and labels, and updates the queue."""

    queue: Float[Tensor, "dim K"]
    pointer: Int[Tensor, "1"]

    def __init__(
        self, encoder: nn.Module, dim: int, size: int, momentum: float, temperature: float
    ) -> None:
        super().__init__()
        self.momentum, self.temperature = momentum, temperature
        self.query_encoder, self.key_encoder = encoder, copy.deepcopy(encoder)
        for parameter in self.key_encoder.parameters():
            parameter.requires_grad = False
        self.register_buffer("queue", normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _update_key_encoder(self) -> None:
        pairs = zip(self.query_encoder.parameters(), self.key_encoder.parameters(), strict=True)
        for query, key in pairs:
            key.data = key.data * self.momentum + query.data * (1.0 - self.momentum)

    @torch.no_grad()
    def _write_queue(self, keys: Tensor) -> None:
        batch, first = len(keys), int(self.pointer)
        self.queue[:, first : first + batch] = keys.T
        self.pointer[0] = (first + batch) % self.queue.shape[1]

    def forward(
        self, query_images: Images, key_images: Images
    ) -> tuple[Float[Tensor, "batch logits"], Int[Tensor, " batch"]]:
        """Eq. 1's logits; the positive's is the first of each row."""
        query = normalize(self.query_encoder(query_images), dim=1)
        with torch.no_grad():
            self._update_key_encoder()
            keys = normalize(self.key_encoder(key_images), dim=1)
        positive = torch.einsum("nc,nc->n", query, keys).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", query, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1)
        logits /= self.temperature
        self._write_queue(keys)
        return logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device)


class OfficialStep:
    """A whole training step; returns the loss."""

    def __init__(self, moco: OfficialMoco, config: OptimizerConfig) -> None:
        self.moco, self.criterion = moco.train(), nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(
            moco.parameters(), config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )

    def __call__(self, query_images: Images, key_images: Images) -> Float[Tensor, ""]:
        """Forward, backward, update."""
        logits, labels = self.moco(query_images, key_images)
        loss: Tensor = self.criterion(logits, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class PilBlur:
    """Gaussian blur of a random width, by Pillow."""

    def __call__(self, image: Image.Image) -> Image.Image:
        """The image blurred."""
        return image.filter(ImageFilter.GaussianBlur(radius=random.uniform(0.1, 2.0)))


class OfficialViews:
    """MoCo-v2's two views of a PIL image, as normalised tensors."""

    def __init__(self, size: int) -> None:
        self.transform: Callable[[Image.Image], Tensor] = transforms.Compose(
            [
                transforms.RandomResizedCrop(size, scale=(0.2, 1.0)),
                transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
                transforms.RandomGrayscale(p=0.2),
                transforms.RandomApply([PilBlur()], p=0.5),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(mean=IMAGENET_MEAN, std=IMAGENET_STD),
            ]
        )

    def __call__(self, image: Image.Image) -> list[Float[Tensor, "3 size size"]]:
        """Query and key."""
        return [self.transform(image), self.transform(image)]
