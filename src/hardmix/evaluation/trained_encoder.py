"""A trained encoder with its preprocessing, loaded from a run or from encoder.safetensors."""

import hashlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor, nn

from hardmix.data.colours import channel_statistics, normalise
from hardmix.data.crops import evaluation_crop
from hardmix.data.image_files import convert_image, reduced
from hardmix.data.video_frames import read_image_or_frame
from hardmix.errors import InputError
from hardmix.evaluation.hub import encoder_file, is_shared, located, upload
from hardmix.models.backbones import build_backbone
from hardmix.runs.checkpoints import Checkpoint, load_named, load_newest
from hardmix.runs.folder import ENCODER_FORMAT, OWN_TRUNK, Run, encoder_facts
from hardmix.runs.weight_files import read_safetensors
from hardmix.runtime.console import say
from hardmix.runtime.own_code import allowing, check_allowed, is_own
from hardmix.settings.config import DataConfig
from hardmix.settings.small_html import facts_html

MOST_CHANNELS, MOST_PIXELS = 16, 4096
"""Most channels, and largest side, of the images that an encoder may be for."""


class TrainedEncoder(nn.Module):
    """A trained trunk with the preprocessing it expects: a module from images to features.

    `source` is the file or folder it was loaded from. `reduced_to` is the shorter side to which
    larger images are reduced first, as in a run with data.reduce; None if they are not.
    """

    def __init__(
        self,
        trunk: nn.Module,
        backbone: str,
        image_size: int,
        channels: int,
        source: Path | None = None,
        reduced_to: int | None = None,
    ) -> None:
        super().__init__()
        self.trunk, self.backbone = trunk, backbone
        self.image_size, self.channels = image_size, channels
        self.source, self.reduced_to = source, reduced_to

    def forward(
        self, images: Float[Tensor, "batch channels y x"]
    ) -> Float[Tensor, "batch features"]:
        """Return the trunk's features, without the head (Sec. 4.3), of preprocessed images."""
        features: Tensor = self.trunk(images)
        return features

    @classmethod
    def from_pretrained(
        cls,
        name: Path | str,
        *,
        trunk: nn.Module | None = None,
        backbone: str | Callable[..., nn.Module] | None = None,
        **options: Any,
    ) -> "TrainedEncoder":
        """Load an encoder from the Hugging Face Hub, or from a folder for it.

        Args:
            name: "owner/name" on the Hub, or the path of a folder.
            trunk: see `load_encoder`.
            backbone: see `load_encoder`.
            options: revision, token, cache_dir, local_files_only and others of huggingface_hub's
                `snapshot_download`.

        Returns:
            The encoder, in evaluation mode.
        """
        place = Path(name) if Path(name).is_dir() else located(f"hf:{name}", **options)
        return load_encoder(place, trunk=trunk, backbone=backbone)

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        message: str = "Encoder trained with hardmix",
    ) -> str:
        """Upload the folder that this encoder was loaded from to the Hugging Face Hub.

        It must be one that `hardmix export --format hf` wrote: with a model card, which you have
        read. Nothing but the files in that folder is uploaded.

        Args:
            name: "owner/name"; the repository is created if there is none.
            private: whether a new repository is private; None means the owner's default.
            token: an access token; None means the one that `hf auth login` stored.
            message: the commit's message.

        Returns:
            The address of the commit.
        """
        return upload(self.source, name, private=private, token=token, message=message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._facts().values())})"

    def _repr_html_(self) -> str:
        return facts_html(type(self).__name__, self._facts())

    def _facts(self) -> dict[str, str]:
        """Return what it is in a few words; `encoder.trunk` shows every layer."""
        number = sum(each.numel() for each in self.trunk.parameters())
        return {
            "backbone": self.backbone,
            "images": f"{self.channels} x {self.image_size} x {self.image_size}",
            "parameters": f"{number / 1e6:.2f} M parameters",
        }

    def preprocess(
        self, image: str | Path | Image.Image | UInt8[Tensor, "channels y x"]
    ) -> Float[Tensor, "channels size size"]:
        """Return the normalised evaluation crop of a file, a Pillow image or a uint8 tensor.

        A file is read as `hardmix features` reads it. With `reduced_to`, images that are decoded
        already are reduced too; but large JPEG files are reduced while decoding, to slightly other
        pixels.
        """
        if isinstance(image, Image.Image):
            image = convert_image(image, self.channels)
        elif not isinstance(image, Tensor):
            image = read_image_or_frame(str(image), self.channels, reduce=self.reduced_to)
        image = reduced(image, self.reduced_to)
        crop = evaluation_crop(image, self.image_size)[None].float().div_(255)
        return normalise(crop, *channel_statistics(self.channels))[0]


def load_encoder(
    run_or_file: Path | str,
    *,
    trunk: nn.Module | None = None,
    backbone: str | Callable[..., nn.Module] | None = None,
    device: str = "cpu",
    or_checkpoint: bool = False,
    checkpoint: str | None = None,
) -> TrainedEncoder:
    """Load the encoder of a run, or of its encoder.safetensors, in evaluation mode.

    `run_or_file` may also be a folder that `hardmix export --format hf` wrote, or such a folder on
    the Hugging Face Hub: "hf:owner/name", or "hf:owner/name@revision".
    A run that was trained with your own network needs that network again: as `trunk`, or as
    `backbone`, the function that makes it or the function's name, "mypackage:make_net". A name in
    the file itself is not used, since a file may come from anyone. With `or_checkpoint`, the
    encoder of an unfinished run is loaded from its last checkpoint. `checkpoint` names one of the
    run's checkpoints instead of its encoder, by its step ("step-00000012") or epoch ("100").
    """
    place = located(run_or_file)
    file = encoder_file(place)
    if checkpoint is not None and (not place.is_dir() or is_shared(place)):
        raise InputError(f"checkpoint={checkpoint} with {run_or_file}: name the folder of a run.")
    if checkpoint is not None or (place.is_dir() and not file.exists()):
        facts, weights = _read_checkpoint(Run(place), or_checkpoint, checkpoint)
    else:
        facts, weights = _read_encoder(file)
    channels, image_size = _sizes(facts, file)
    if trunk is None and backbone is None:
        _check_named(facts["backbone"], file)
    if trunk is None:
        with allowing(*([backbone] if isinstance(backbone, str) else ())):
            trunk = build_backbone(backbone or facts["backbone"], channels, image_size).trunk
    _load_exactly(trunk, weights, file)
    reduced_to = 2 * image_size if facts.get("reduce") == "True" else None
    encoder = TrainedEncoder(trunk, facts["backbone"], image_size, channels, place, reduced_to)
    return encoder.eval().to(device)


def _sizes(facts: dict[str, str], file: Path) -> tuple[int, int]:
    """Return the channels and the size of the images that an encoder is for."""
    words = [facts.get(name, "") for name in ("channels", "image_size")]
    if "backbone" in facts and all(each.isascii() and each.isdecimal() for each in words):
        channels, image_size = map(int, words)
        if 1 <= channels <= MOST_CHANNELS and 8 <= image_size <= MOST_PIXELS:
            return channels, image_size
    raise InputError(
        f"{file} is for images of {words[0]!r} channels and {words[1]!r} pixels a side: it must"
        f" name its backbone, 1 to {MOST_CHANNELS} channels and 8 to {MOST_PIXELS} pixels; copy or"
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
    run = Run(file.parent.parent)
    if file.parent == run.checkpoints and run.exists:
        step = "-".join(file.stem.split("-")[:2])
        raise InputError(
            f"{file} is a checkpoint of a run: give the run's folder,"
            f" {shlex.quote(str(run.path))} --checkpoint {step}."
        )
    if facts.get("format") != ENCODER_FORMAT:
        raise InputError(
            f"{file} is not a hardmix encoder: hardmix import {shlex.quote(str(file))} --out RUN"
            " imports weights of other programs."
        )
    return facts, weights


def _read_checkpoint(
    run: Run, allowed: bool, name: str | None
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the trunk's weights in the checkpoint named, or else in the newest intact one.

    The folder is not changed.
    """
    checkpoint = load_newest(run.checkpoints, set_aside=False) if allowed and not name else None
    if name is not None:
        checkpoint = load_named(run.checkpoints, name)
    if checkpoint is None:
        raise InputError(
            f"{run.path} has no encoder.safetensors{' and no checkpoint' if allowed else ''}: it is"
            f" still training, or was stopped; hardmix pretrain --out {shlex.quote(str(run.path))}"
            " --resume continues it."
        )
    config, prefix = run.config(), _trunk_prefix(checkpoint)
    weights = {
        name.removeprefix(prefix): tensor
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(prefix)
    }
    step = checkpoint.manifest["step"]
    if name is None:
        say(f"{run.path} is unfinished: using its encoder after step {step}.")
    else:
        say(f"Using the encoder of {run.path} after step {step}.")
    return encoder_facts(config), weights


def _trunk_prefix(checkpoint: Checkpoint) -> str:
    """Return the prefix of the trunk's tensors, which older versions did not record."""
    recorded = checkpoint.manifest.get("trunk")
    places = [recorded] if isinstance(recorded, str) else ["pair.query.trunk", "trunk"]
    prefixes = [f"objective.{place}." for place in places]
    used = [each for each in prefixes if any(name.startswith(each) for name in checkpoint.tensors)]
    if not used:
        raise InputError(
            f"{checkpoint.manifest['file']} does not say which of its tensors belong to the"
            " encoder: resume the run to its end, or evaluate it with the version that wrote it."
        )
    return used[0]


def _load_exactly(trunk: nn.Module, weights: dict[str, Tensor], file: Path) -> None:
    wanted = trunk.state_dict()
    missing, extra = sorted(wanted.keys() - weights), sorted(weights.keys() - wanted)
    other = [name for name in wanted.keys() & weights if wanted[name].shape != weights[name].shape]
    faults = {"are missing": missing, "are unknown": extra, "differ in shape": other}
    for fault, names in faults.items():
        if names:
            raise InputError(
                f"{file} does not fit {type(trunk).__name__}: {len(names)} tensors {fault}"
                f" ({', '.join(names[:3])}): use the file and the network of the same run."
            )
    trunk.load_state_dict(weights)


def check_channels(encoder: TrainedEncoder, data: DataConfig, run: Path) -> None:
    """Raise InputError if the images have other channels than the encoder's."""
    if data.channels != encoder.channels:
        raise InputError(
            f"data.channels={data.channels}, but {run} was trained on images of"
            f" {encoder.channels} channels: use such images."
        )


def weights_hash(network: nn.Module) -> str:
    """Return a hash of every parameter and buffer of a network."""
    digest = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
