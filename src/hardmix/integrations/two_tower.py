"""Two towers, such as CLIP's: open_clip's ClipLoss, with filters, weights or mixed hard negatives.

loss = TwoTowerLoss()
loss(**model(images, texts)).backward()     # open_clip's own call, with its dictionary
"""

import math
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.integrations.mixing_options import MixingOptions, replacement_loss
from hardmix.mixing.queue import UNKNOWN
from hardmix.mixing.random_draws import RandomSource
from hardmix.runtime.distributed import gather, rank
from hardmix.settings.facts import check_choice


class PairOptions(TypedDict, total=False):
    """Options of a call of `TwoTowerLoss`."""

    own_texts: Float[Tensor, "batch M dim"] | None
    """Hard negatives of each image alone."""
    own_images: Float[Tensor, "batch L dim"] | None
    """Hard negatives of each text alone."""
    more_texts: Float[Tensor, "texts dim"] | None
    """Further texts that are negatives of all images, such as the hard captions of all pairs."""
    more_images: Float[Tensor, "images dim"] | None
    """Further images that are negatives of all texts."""
    ids: Int[Tensor, " batch"] | None
    """Pairs of one id, such as two captions of one image, are not negatives of each other."""
    labels: Int[Tensor, " batch"] | None
    """Pairs of one label are further positives of each other, as in SupCon."""
    exclude: Bool[Tensor, "batch all"] | None
    """Pairs that are not negatives in either direction: this process's rows, and columns for the
    pairs of all processes."""
    mix: bool
    """False for no points."""
    generator: RandomSource
    """The random number generator; None uses PyTorch's default."""


class TwoTowerLoss(nn.Module):
    """CLIP's symmetric cross-entropy over the batch of all processes.

    The negatives of an image are texts, and points are mixed from texts alone (and with the image,
    if num_with_query is not 0); those of a text are images. With gradients averaged over the
    processes (DistributedDataParallel), the result is that of one process with the whole batch.
    """

    def __init__(
        self,
        logit_scale: float = math.log(1 / 0.07),
        *,
        max_scale: float = 100.0,
        **mixing: Unpack[MixingOptions],
    ) -> None:
        """Create the loss.

        Args:
            logit_scale: log(1 / temperature) at the start of training, learnt as in CLIP. Pass the
                loss's parameters to the optimizer, or a scale to each call.
            max_scale: the learnt scale is kept at or below it, as in CLIP.
            mixing: arguments of `MochiLoss`, such as filter_negatives="above-positive" or
                num_pairs=64.
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
        self.mochi = replacement_loss(self.temperature, mixing)

    def temperature(self) -> Float[Tensor, ""]:
        """Return the learnt temperature, 1 / exp(logit_scale)."""
        return (-self.logit_scale).exp()

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float | None = None,
        logit_bias: Tensor | None = None,
        output_dict: Literal[False] = False,
        **options: Unpack[PairOptions],
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float | None = None,
        logit_bias: Tensor | None = None,
        *,
        output_dict: Literal[True],
        **options: Unpack[PairOptions],
    ) -> dict[str, Tensor]: ...

    def forward(
        self,
        image_features: Float[Tensor, "batch dim"],
        text_features: Float[Tensor, "batch dim"],
        logit_scale: Tensor | float | None = None,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        **options: Unpack[PairOptions],
    ) -> Float[Tensor, ""] | dict[str, Float[Tensor, ""]]:
        """Return the mean of both directions' losses over this process's pairs.

        Args:
            image_features: one row for each pair.
            text_features: one row for each pair.
            logit_scale: 1 / temperature, as open_clip's models give it; None for the loss's own. It
                gets its gradient.
            logit_bias: ignored: added to all logits, it does not change a softmax.
            output_dict: whether to return {"contrastive_loss": loss}, as open_clip's loop asks.
            options: see `PairOptions`.
        """
        del logit_bias
        for name in options:
            check_choice("option", name, PairOptions.__annotations__)
        loss = self.mochi
        if logit_scale is None:
            with torch.no_grad():
                self.logit_scale.clamp_(max=math.log(self.max_scale))
        else:
            scale = torch.as_tensor(logit_scale, device=image_features.device).reshape(())
            loss = replacement_loss(lambda: 1 / scale, self.mixing)
        common: dict[str, Any] = {
            name: options[name] for name in ("ids", "labels", "mix", "generator") if name in options
        }
        common["first_row"] = rank() * len(image_features)
        there = loss.in_batch(
            image_features,
            text_features,
            own_negatives=options.get("own_texts"),
            **_candidates(text_features, options.get("more_texts"), options),
            **common,
        )
        back = loss.in_batch(
            text_features,
            image_features,
            own_negatives=options.get("own_images"),
            **_candidates(image_features, options.get("more_images"), options),
            **common,
        )
        value = (there + back) / 2
        return {"contrastive_loss": value} if output_dict else value


def _candidates(features: Tensor, more: Tensor | None, options: PairOptions) -> dict[str, Any]:
    """Return the negatives of one direction: all processes' rows, then the further ones."""
    ids, labels = options.get("ids"), options.get("labels")
    rows = gather(features, with_gradient=True)
    columns = {
        "negative_ids": None if ids is None else gather(ids),
        "negative_labels": None if labels is None else gather(labels),
        "exclude": options.get("exclude"),
    }
    if more is not None:
        further = gather(more, with_gradient=True)
        rows = torch.cat([rows, further])
        columns = {name: _padded(values, len(further)) for name, values in columns.items()}
    return {"gathered": rows, **columns}


def _padded(values: Tensor | None, number: int) -> Tensor | None:
    """Return labels, ids or a mask with further columns: unknown, and not left out."""
    if values is None:
        return None
    fill = False if values.dtype == torch.bool else UNKNOWN
    return torch.cat([values, values.new_full((*values.shape[:-1], number), fill)], dim=-1)
