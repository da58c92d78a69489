"""Encoders loaded from files, and features of images from a frozen trunk."""

import math
import shlex
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor, nn

from hardmix.data.augment import channel_statistics, evaluation_crop
from hardmix.data.image_files import convert_image, read_image
from hardmix.data.image_ops import normalise
from hardmix.data.image_set import ImageSet
from hardmix.data.loading import evaluation_batches
from hardmix.errors import InputError
from hardmix.models.backbones import build_backbone
from hardmix.runs.checkpoints import Checkpoint, load_newest
from hardmix.runs.folder import ENCODER_FORMAT, OWN_TRUNK, Run
from hardmix.runs.weight_files import read_safetensors
from hardmix.runtime.console import progress, say
from hardmix.runtime.device import Compute, Late
from hardmix.runtime.distributed import agree_on_max, gather_uneven, rank, world_size
from hardmix.runtime.own_code import allowing, check_allowed, is_own
from hardmix.settings.config import DataConfig

MOST_CHANNELS = 16
MOST_PIXELS = 4096
"""Largest side of the images that an encoder may be for."""


class Features(NamedTuple):
    """Features of a data set, in its order, on the CPU."""

    features: Float[Tensor, "n dim"]
    """The trunk's features, in float32."""
    labels: Int[Tensor, " n"]
    """Class of each image, -1 if unknown."""
    ids: Int[Tensor, " n"]
    """Index of each image in the data set; unreadable images are missing."""


class TrainedEncoder(nn.Module):
    """A trained trunk with the preprocessing it expects: a module from images to features."""

    def __init__(self, trunk: nn.Module, backbone: str, image_size: int, channels: int) -> None:
        super().__init__()
        self.trunk, self.backbone = trunk, backbone
        self.image_size, self.channels = image_size, channels

    def forward(
        self, images: Float[Tensor, "batch channels y x"]
    ) -> Float[Tensor, "batch features"]:
        """Return the trunk's features, without the head (Sec. 4.3), of preprocessed images."""
        features: Tensor = self.trunk(images)
        return features

    def preprocess(
        self, image: str | Path | Image.Image | UInt8[Tensor, "channels y x"]
    ) -> Float[Tensor, "channels size size"]:
        """Return the normalised evaluation crop of a file, a Pillow image or a uint8 tensor."""
        if isinstance(image, Image.Image):
            image = convert_image(image, self.channels)
        elif not isinstance(image, Tensor):
            image = read_image(image, self.channels)
        crop = evaluation_crop(image, self.image_size)[None].float().div_(255)
        return normalise(crop, *channel_statistics(self.channels))[0]


def load_encoder(
    run_or_file: Path | str,
    *,
    trunk: nn.Module | None = None,
    backbone: str | Callable[..., nn.Module] | None = None,
    device: str = "cpu",
    or_checkpoint: bool = False,
) -> TrainedEncoder:
    """Load the encoder of a run, or of its encoder.safetensors, in evaluation mode.

    A run that was trained with your own network needs that network again: as `trunk`, or as
    `backbone`, the function that makes it or the function's name, "mypackage:make_net". A name in
    the file itself is not used, since a file may come from anyone. With `or_checkpoint`, the
    encoder of an unfinished run is loaded from its last checkpoint.
    """
    file = Path(run_or_file)
    if file.is_dir():
        file = Run.open(file).encoder_file
    if Path(run_or_file).is_dir() and not file.exists():
        facts, weights = _read_checkpoint(Run(run_or_file), or_checkpoint)
    else:
        facts, weights = _read_encoder(file)
    channels, image_size = _sizes(facts, file)
    if trunk is None and backbone is None:
        _check_named(facts["backbone"], file)
    if trunk is None:
        with allowing(*([backbone] if isinstance(backbone, str) else ())):
            trunk = build_backbone(backbone or facts["backbone"], channels, image_size).trunk
    _load_exactly(trunk, weights, file)
    encoder = TrainedEncoder(trunk, facts["backbone"], image_size, channels)
    return encoder.eval().to(device)


def _sizes(facts: dict[str, str], file: Path) -> tuple[int, int]:
    """Return the channels and the size of the images that an encoder is for."""
    said = [facts.get(name, "") for name in ("channels", "image_size")]
    if "backbone" in facts and all(each.isascii() and each.isdecimal() for each in said):
        channels, image_size = map(int, said)
        if 1 <= channels <= MOST_CHANNELS and 8 <= image_size <= MOST_PIXELS:
            return channels, image_size
    raise InputError(
        f"{file} is for images of {said[0]!r} channels and {said[1]!r} pixels a side: it must name"
        f" its backbone, 1 to {MOST_CHANNELS} channels and 8 to {MOST_PIXELS} pixels; copy or"
        " download it again."
    )


def _check_named(backbone: str, file: Path) -> None:
    """Raise InputError if the file needs code that the user has not named."""
    if backbone == OWN_TRUNK:
        raise InputError(
            f"{file} was trained with your own network: pass it as trunk=, or train with"
            " model.backbone=mypackage:make_net, which every command can build."
        )
    if is_own(backbone):
        check_allowed(backbone, "model.backbone", str(file))


def _read_encoder(file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    weights, facts, _ = read_safetensors(file)
    if facts.get("format") != ENCODER_FORMAT:
        raise InputError(
            f"{file} is not a hardmix encoder: hardmix import {shlex.quote(str(file))} --out RUN"
            " imports weights of other programs."
        )
    return facts, weights


def _read_checkpoint(run: Run, wanted: bool) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the trunk's weights in the newest intact checkpoint, without changing the folder."""
    found = load_newest(run.checkpoints, set_aside=False) if wanted else None
    if found is None:
        raise InputError(
            f"{run.path} has no encoder.safetensors{' and no checkpoint' if wanted else ''}: it is"
            f" still training, or was stopped; hardmix pretrain --out {shlex.quote(str(run.path))}"
            " --resume continues it."
        )
    config, prefix = run.config(), _trunk_prefix(found)
    weights = {
        name.removeprefix(prefix): tensor
        for name, tensor in found.tensors.items()
        if name.startswith(prefix)
    }
    say(f"{run.path} is unfinished: using its encoder after step {found.manifest['step']}.")
    facts = {"backbone": config.model.backbone, "channels": str(config.data.channels)}
    return facts | {"image_size": str(config.data.image_size)}, weights


def _trunk_prefix(found: Checkpoint) -> str:
    """Return the prefix of the trunk's tensors, which older versions do not record."""
    told = found.manifest.get("trunk")
    places = [told] if isinstance(told, str) else ["pair.query.trunk", "trunk"]
    prefixes = [f"objective.{place}." for place in places]
    known = [each for each in prefixes if any(name.startswith(each) for name in found.tensors)]
    if not known:
        raise InputError(
            f"{found.manifest['file']} does not say which of its tensors belong to the encoder:"
            " resume the run to its end, or evaluate it with the version that wrote it."
        )
    return known[0]


def _load_exactly(trunk: nn.Module, weights: dict[str, Tensor], file: Path) -> None:
    wanted = trunk.state_dict()
    missing, extra = sorted(wanted.keys() - weights), sorted(weights.keys() - wanted)
    other = [name for name in wanted.keys() & weights if wanted[name].shape != weights[name].shape]
    faults = [(missing, "are missing"), (extra, "are unknown"), (other, "differ in shape")]
    for names, what in faults:
        if names:
            raise InputError(
                f"{file} does not fit {type(trunk).__name__}: {len(names)} tensors {what}"
                f" ({', '.join(names[:3])}): use the file and the network of the same run."
            )
    trunk.load_state_dict(weights)


@torch.no_grad()
def extract(
    trunk: nn.Module,
    images: ImageSet,
    data: DataConfig,
    *,
    compute: Compute | None = None,
    batch_size: int = 256,
    title: str = "features",
    between: Callable[[], None] = lambda: None,
    gathered: bool = True,
) -> Features:
    """Return the trunk's features (without the head: Sec. 4.3), computed in evaluation mode.

    `data` gives the size of the crops, the workers, and how many images may be unreadable.
    `compute` is where to compute; None means the trunk's own device, in float32. With several
    processes, each takes consecutive images, and all get the features of every image once; unless
    `gathered`, each keeps those of its own images. `between` is called before each batch, equally
    often on every process. The trunk's mode is restored.
    """
    compute = compute or where_it_is(trunk)
    training = trunk.training
    trunk.eval()
    first, share, rounds = _share_of(images, batch_size)
    rows = _Rows(len(share))
    late: tuple[Late, Tensor, Tensor] | None = None
    batches = evaluation_batches(
        share, data.image_size, batch_size, compute.device, data.workers, data.max_unreadable
    )
    try:
        with progress(title, len(share)) as meter:
            for _ in range(rounds):
                between()
                for pictures, labels, ids in islice(batches, 1):  # none if all are unreadable
                    with compute.autocast():
                        features = trunk(pictures.to(memory_format=torch.channels_last))
                    rows.add(late)  # of the previous batch: the device stays busy
                    late = Late(features.float()), labels, ids + first
                    meter.advance(rows.filled + len(labels))
        rows.add(late)
    finally:
        batches.close()
        trunk.train(training)
    columns = rows.columns()
    return Features(*(gather_uneven(column) for column in columns) if gathered else columns)


class _Rows:
    """Features, labels and ids in the order they arrive, in memory that is taken once."""

    def __init__(self, number: int) -> None:
        self.number, self.filled = number, 0
        self._columns: list[Tensor] = []

    def add(self, late: tuple[Late, Tensor, Tensor] | None) -> None:
        """Copy a batch out of pinned memory, which is scarce."""
        if late is None:
            return
        batch = late[0].read(), *late[1:]
        self._columns = self._columns or [
            each.new_empty(self.number, *each.shape[1:]) for each in batch
        ]
        for column, each in zip(self._columns, batch, strict=True):
            column[self.filled : self.filled + len(each)] = each
        self.filled += len(batch[1])

    def columns(self) -> list[Tensor]:
        """Return what was added; the features are as wide as on the other processes."""
        width = agree_on_max(self._columns[0].shape[1] if self._columns else 0)
        number = torch.empty(0, dtype=torch.int64)
        columns = self._columns or [torch.empty(0, width), number, number]
        return [column[: self.filled] for column in columns]


def where_it_is(trunk: nn.Module) -> Compute:
    """Return the device of a network's weights, with float32."""
    device = next(trunk.parameters(), torch.empty(0)).device
    return Compute(device, False, "fp32: the network as it is")


def _share_of(images: ImageSet, batch_size: int) -> tuple[int, ImageSet, int]:
    """Return this process's first image, its images, and the batches of the largest share."""
    number, many = len(images), world_size()
    first, end = (number * each // many for each in (rank(), rank() + 1))
    rounds = math.ceil(math.ceil(number / many) / batch_size)
    share = images if many == 1 else images.select(torch.arange(first, end))
    return first, share, rounds
