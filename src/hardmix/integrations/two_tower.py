"""Two towers, such as CLIP's: open_clip's ClipLoss with mixed hard negatives.

loss = TwoTowerLoss()
loss(**model(images, texts)).backward()     # open_clip's own call, with its dictionary
"""

import math
from typing import Any, Unpack

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.integrations.mixing_options import MixingOptions, loss_for_batches
from hardmix.mixing.random_draws import DrawsByRow
from hardmix.runtime.distributed import gather, rank


class TwoTowerLoss(nn.Module):
    """CLIP's symmetric cross-entropy with mixed hard negatives, over the batch of all processes.

    Of an image, the negatives are texts, and points are mixed of texts alone (and with the image,
    if num_with_query is not 0); of a text, images. With gradients averaged over the processes
    (DistributedDataParallel), the result is that of one process with the whole batch.
    """

    def __init__(
        self,
        logit_scale: float = math.log(1 / 0.07),
        *,
        max_scale: float = 100.0,
        **mixing: Unpack[MixingOptions],
    ) -> None:
        """Create the loss.

        logit_scale: log(1 / temperature) at the start of training, learnt as in CLIP. Pass the
        loss's parameters to the optimizer, or a scale to each call.
        max_scale: the learnt scale is kept at or below it, as in CLIP.
        mixing: arguments of `MochiLoss`, such as num_pairs=64 or filter_negatives="above-positive".
        """
        super().__init__()
        if not (max_scale > 0 and -math.inf < logit_scale <= math.log(max_scale)):
            raise InputError(
                f"logit_scale={logit_scale} with max_scale={max_scale}: it must be finite and at"
                " most log(max_scale); CLIP starts with log(1 / 0.07) = 2.66."
            )
        self.logit_scale = nn.Parameter(torch.tensor(logit_scale))
        self.max_scale = max_scale
        self.mixing = mixing
        self.mochi = loss_for_batches(self.temperature, mixing)

    def temperature(self) -> Float[Tensor, ""]:
        """Return the learnt temperature, 1 / exp(logit_scale)."""
        return (-self.logit_scale).exp()

    def forward(
        self,
        image_features: Float[Tensor, "batch dim"],
        text_features: Float[Tensor, "batch dim"],
        logit_scale: Tensor | float | None = None,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        *,
        own_texts: Float[Tensor, "batch M dim"] | None = None,
        own_images: Float[Tensor, "batch L dim"] | None = None,
        exclude: Bool[Tensor, "batch all"] | None = None,
        mix: bool = True,
        generator: torch.Generator | DrawsByRow | None = None,
    ) -> Float[Tensor, ""] | dict[str, Float[Tensor, ""]]:
        """Return the mean of both directions' losses over this process's pairs.

        logit_scale: 1 / temperature, as open_clip's models give it; None for the loss's own. It
        gets its gradient.
        logit_bias: ignored: added to all logits alike, it does not change a softmax.
        output_dict: whether to return {"contrastive_loss": loss}, as open_clip's loop asks.
        own_texts: hard negatives of each image; own_images: of each text. They are not shared.
        exclude: pairs that are no negatives in either direction, such as equal captions: this
        process's rows, and columns for the pairs of all processes.
        mix, generator: as in `MochiLoss`.
        """
        del logit_bias
        loss = self.mochi
        if logit_scale is None:
            with torch.no_grad():
                self.logit_scale.clamp_(max=math.log(self.max_scale))
        else:
            scale = torch.as_tensor(logit_scale, device=image_features.device).reshape(())
            loss = loss_for_batches(lambda: 1 / scale, self.mixing)
        images = gather(image_features, with_gradient=True)
        texts = gather(text_features, with_gradient=True)
        alike: dict[str, Any] = {"mix": mix, "generator": generator}
        alike["first_row"] = rank() * len(image_features)
        there = loss.in_batch(
            image_features, text_features, exclude, gathered=texts, own_negatives=own_texts, **alike
        )
        back = loss.in_batch(
            text_features,
            image_features,
            exclude,
            gathered=images,
            own_negatives=own_images,
            **alike,
        )
        value = (there + back) / 2
        return {"contrastive_loss": value} if output_dict else value
