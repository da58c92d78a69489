"""`hardmix export`: a trained encoder for other programs, verified before it is written.

The projection head of pre-training is not exported.
"""

import shlex
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision.models.resnet as torchvision_resnet
from jaxtyping import Float, Int64, UInt8
from safetensors.torch import save
from torch import Tensor, nn

from hardmix.data.colours import channel_statistics
from hardmix.data.crops import resized_side
from hardmix.errors import InputError
from hardmix.evaluation.hub import CARD, WEIGHTS, encoder_file, is_shared
from hardmix.evaluation.trained_encoder import TrainedEncoder, load_encoder
from hardmix.models.backbones import RESNETS, parse_timm
from hardmix.runs.folder import Run, pack_encoder
from hardmix.runs.reading import read_run
from hardmix.runtime.console import say
from hardmix.runtime.files import most_weights, read_file, write_atomically
from hardmix.settings.config import PretrainConfig
from hardmix.settings.facts import check_choice
from hardmix.weights.detectron2_files import PLUG_IN_FILE, SHAPES, side_files, weights_file
from hardmix.weights.hub_folder import hub_files

OPSET = 20
"""ONNX opset: torch's default, supported by every onnxruntime that the extra allows."""
ONNX_LIMIT = 2**31
"""Largest ONNX file in bytes: the limit of a protobuf message."""
ANYWHERE = "safetensors and onnx support every backbone"


class ExportJob(NamedTuple):
    """The encoder to export, and the file to write."""

    source: Path
    """The file of the encoder."""
    encoder: TrainedEncoder
    out: Path
    with_preprocessing: bool = False
    """Whether an ONNX file takes uint8 images of any size."""
    config: PretrainConfig | None = None
    """The run's config if the encoder is that of a checkpoint, and not that of `source`."""
    run: Path | None = None
    """The run's folder, if it is at hand."""
    licence: str = ""
    """The weights' licence, for a model card."""


class Format(NamedTuple):
    """A format: its file suffixes, and the function that makes the files."""

    suffixes: tuple[str, ...]
    """Empty if it is a folder, whatever its name."""
    build: Callable[[ExportJob], dict[str, bytes]]
    """Returns file name -> content, for files in one folder."""


def export(
    run_or_file: Path | str,
    kind: str,
    out: Path | str,
    *,
    trunk: nn.Module | None = None,
    with_preprocessing: bool = False,
    checkpoint: str | None = None,
    licence: str | None = None,
) -> list[Path]:
    """Write the encoder of a run, or of an encoder.safetensors, in one of `FORMATS`.

    Returns the files written, `out` first. A run that was trained with your own network needs that
    network again, as `trunk`. An ONNX file `with_preprocessing` takes uint8 images of any size.
    `checkpoint` names one of the run's checkpoints instead, by its step or epoch. The format "hf"
    writes a folder for the Hugging Face Hub, whose model card states the weights' `licence`.
    """
    check_choice("format", kind, FORMATS)
    if licence is not None and kind != "hf":
        raise InputError(f"licence needs the format hf: a {kind} file has no model card.")
    if with_preprocessing and kind != "onnx":
        raise InputError(
            f"with_preprocessing needs the format onnx: a {kind} file holds weights only, not a"
            " graph that could preprocess images."
        )
    out = Path(out)
    is_folder = not FORMATS[kind].suffixes
    if not is_folder:
        _check_suffix(kind, out)
    if not (is_folder and out.is_dir() and not any(out.iterdir())):
        _refuse_existing(out)
    encoder = load_encoder(run_or_file, trunk=trunk, checkpoint=checkpoint)
    place = encoder.source or Path(run_or_file)
    is_run = place.is_dir() and not is_shared(place)
    job = ExportJob(
        source=encoder_file(place),
        encoder=encoder,
        out=out,
        with_preprocessing=with_preprocessing,
        config=None if checkpoint is None else Run(place).config(),
        run=place if is_run else None,
        licence=licence or "",
    )
    contents = FORMATS[kind].build(job)
    files = _write(out if is_folder else out.parent, contents)
    say(f"Wrote {', '.join(str(file) for file in files)}")
    return files


def _check_suffix(kind: str, out: Path) -> None:
    known = FORMATS[kind].suffixes
    if out.suffix not in known:
        raise InputError(
            f"out={out} ends in {out.suffix!r}: a file of the format {kind} must end in"
            f" {' or '.join(known)}."
        )


def _refuse_existing(file: Path) -> None:
    if file.exists():
        raise InputError(f"{file} already exists: choose another name or delete it.")


def _write(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    """Write all files or none: obstacles are found before the first file is written."""
    files = {folder / name: data for name, data in contents.items()}
    for file, data in files.items():
        # Two exports to the same folder share the plug-in.
        shared = file.name == PLUG_IN_FILE and file.is_file() and file.read_bytes() == data
        if not shared:
            _refuse_existing(file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, data in files.items():
            write_atomically(file, data)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}.") from error
    return list(files)


def _own(job: ExportJob) -> dict[str, bytes]:
    if job.config is not None:
        return {job.out.name: pack_encoder(job.encoder.trunk, job.config)}
    return {job.out.name: read_file(job.source, most_weights())}


def _torchvision(job: ExportJob) -> dict[str, bytes]:
    name, channels = job.encoder.backbone, job.encoder.channels
    _refuse_other_networks(job, "torchvision", RESNETS)
    if channels != 3:
        raise InputError(
            f"the format torchvision does not support channels={channels}: torchvision's {name}"
            " takes 3; timm, safetensors and onnx support any number."
        )
    official = getattr(torchvision_resnet, name)()
    official.fc = nn.Identity()
    _load_and_compare(official, job, f"torchvision's {name}")
    say(f"Load it with model = torchvision.models.{name}(); model.fc = torch.nn.Identity();")
    say(f"model.load_state_dict({_loading(job.out)})")
    return {job.out.name: _state_dict_file(job)}


def _timm(job: ExportJob) -> dict[str, bytes]:
    if not job.encoder.backbone.startswith("timm:"):
        _refuse_other_networks(job, "timm", RESNETS)
    name, options = _timm_model(job.encoder)
    _check_with_timm(job, name, options)
    shown = ", ".join(f"{key}={value!r}" for key, value in options.items())
    say(f'Load it with model = timm.create_model("{name}", {shown});')
    say(f"model.load_state_dict({_loading(job.out)})")
    return {job.out.name: _state_dict_file(job)}


def _timm_model(encoder: TrainedEncoder) -> tuple[str, dict[str, Any]]:
    """Return timm's name of the network, and the options to create it with."""
    name, options = parse_timm(encoder.backbone)
    channels = {"in_chans": encoder.channels} if encoder.channels != 3 else {}
    return name, options | {"num_classes": 0} | channels


def _check_with_timm(job: ExportJob, name: str, options: dict[str, Any]) -> None:
    try:
        timm = import_module("timm")
    except ModuleNotFoundError:
        say("Not verified with timm, which is not installed: pip install 'hardmix[timm]'.")
    else:
        _load_and_compare(timm.create_model(name, **options), job, f"timm's {name}")


def _hub(job: ExportJob) -> dict[str, bytes]:
    """Return a folder for the Hugging Face Hub; timm can load it if it has the network."""
    model = None
    if job.encoder.backbone.startswith("timm:") or job.encoder.backbone in RESNETS:
        model = _timm_model(job.encoder)
        _check_with_timm(job, *model)
    (weights,) = _own(job._replace(out=job.out / WEIGHTS)).values()
    record = None if job.run is None else read_run(job.run)
    if record is not None and job.config is not None:  # its results are those of the last encoder
        recipe = f"{record.settings.get('recipe')}, an intermediate checkpoint"
        settings = record.settings | {"recipe": recipe}
        record = replace(record, results={}, settings=settings)
    upload = shlex.join(["hf", "upload", "OWNER/NAME", str(job.out)])
    say(f"Read {job.out / CARD}, then upload the folder: {upload}")
    return {WEIGHTS: weights, **hub_files(job.encoder, record, model, job.licence)}


def _detectron2(job: ExportJob) -> dict[str, bytes]:
    _refuse_other_networks(job, "detectron2", SHAPES)
    if job.encoder.channels != 3:
        raise InputError(
            f"the format detectron2 does not support channels={job.encoder.channels}: its images"
            " have 3; safetensors and onnx support any number."
        )
    contents = {job.out.name: weights_file(_weights(job), job.out.suffix)}
    return contents | side_files(job.encoder.backbone, job.out.name)


def _refuse_other_networks(
    job: ExportJob, kind: str, known: tuple[str, ...] | dict[str, Any]
) -> None:
    if job.encoder.backbone not in known:
        raise InputError(
            f"the format {kind} does not support backbone={job.encoder.backbone!r}: it supports"
            f" {', '.join(known)}. {_fitting(job.encoder.backbone)}"
        )


def _fitting(backbone: str) -> str:
    return f"{ANYWHERE}{'; timm supports this one' if backbone.startswith('timm:') else ''}."


def _weights(job: ExportJob) -> dict[str, Tensor]:
    """Return weights that share no memory, so that a file contains nothing else."""
    state = job.encoder.trunk.state_dict()
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}


def _state_dict_file(job: ExportJob) -> bytes:
    if job.out.suffix == ".safetensors":
        return save(_weights(job), metadata={"format": "pt"})
    buffer = BytesIO()
    torch.save(_weights(job), buffer)
    return buffer.getvalue()


def _loading(file: Path) -> str:
    function = "safetensors.torch.load_file" if file.suffix == ".safetensors" else "torch.load"
    return f'{function}("{file}")'


def _load_and_compare(official: nn.Module, job: ExportJob, name: str) -> None:
    try:
        official.load_state_dict(_weights(job), strict=True)
    except RuntimeError as error:
        raise InputError(f"the installed {name} has different tensors: {error}.") from error
    compare(official.eval(), job.encoder, (2,), name)


def _onnx(job: ExportJob) -> dict[str, bytes]:
    runtime = _import_onnx()
    encoder = job.encoder
    size = sum(tensor.nbytes for tensor in encoder.trunk.state_dict().values())
    if size >= ONNX_LIMIT:
        raise InputError(
            f"backbone={encoder.backbone!r} has {size} bytes of weights: an ONNX file is limited"
            f" to {ONNX_LIMIT}; use the format safetensors."
        )
    data = _onnx_model(encoder, job.with_preprocessing)
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

    if job.with_preprocessing:
        compare_whole(run, encoder)
        if encoder.reduced_to is not None:
            say(
                f"Images are reduced to {encoder.reduced_to} pixels first, as in training. hardmix"
                " features reduces large JPEG files while decoding: features differ slightly."
            )
    else:
        compare(run, encoder, (1, 3), "onnxruntime")
    return {job.out.name: data}


def _import_onnx() -> Any:
    try:
        for name in ("onnx", "onnxscript"):  # torch imports them during its export
            import_module(name)
        return import_module("onnxruntime")
    except ModuleNotFoundError as error:
        raise InputError(
            f"the format onnx needs {error.name}, which is not installed:"
            " pip install 'hardmix[onnx]'."
        ) from error


def _onnx_model(encoder: TrainedEncoder, with_preprocessing: bool) -> bytes:
    """Return the content of an ONNX file from images to features, with preprocessing metadata."""
    size, dim = encoder.image_size, torch.export.Dim
    network: nn.Module = encoder.trunk
    example, dynamic = torch.randn(2, encoder.channels, size, size), {0: dim("batch")}
    if with_preprocessing:
        network = WithPreprocessing(encoder).eval()
        example = torch.zeros(2, encoder.channels, size + 7, size + 19, dtype=torch.uint8)
        dynamic |= {2: dim("height"), 3: dim("width")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings to its own developers
            program = torch.onnx.export(
                network,
                (example,),
                dynamic_shapes=(dynamic,),
                input_names=["images"],
                output_names=["features"],
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise InputError(
            f"torch {torch.__version__} cannot export backbone={encoder.backbone!r} to ONNX:"
            f" {reason}; use the format safetensors."
        ) from error
    assert program is not None  # only the older exporter returns nothing
    model = program.model_proto
    mean, deviation = channel_statistics(encoder.channels)
    facts: dict[str, Any] = {"backbone": encoder.backbone, "image_size": size}
    facts |= {"preprocessing": True} if with_preprocessing else {"mean": mean, "std": deviation}
    for name, value in facts.items():
        model.metadata_props.add(key=name, value=str(value))
    return bytes(model.SerializeToString())


FORMATS: dict[str, Format] = {
    "safetensors": Format((".safetensors",), _own),
    "torchvision": Format((".pth", ".pt", ".safetensors"), _torchvision),
    "timm": Format((".pth", ".pt", ".safetensors"), _timm),
    "onnx": Format((".onnx",), _onnx),
    "detectron2": Format((".pth", ".pkl"), _detectron2),
    "hf": Format((), _hub),
}
"""Every format by name."""

TOLERANCE = 1e-3
"""Largest allowed difference of features, relative to the largest feature."""
ROUNDED = 2e-2
"""The same for resized images, whose uint8 values may differ by one between implementations."""


@torch.no_grad()
def compare(
    other: Callable[[Tensor], Tensor], encoder: TrainedEncoder, batches: tuple[int, ...], name: str
) -> None:
    """Print how much another program's features differ on random images; raise if too much."""
    size, generator = encoder.image_size, torch.Generator().manual_seed(0)
    worst = 0.0
    for number in batches:
        images = torch.randn(number, encoder.channels, size, size, generator=generator)
        worst = max(worst, difference(encoder(images), other(images)))
    if worst > TOLERANCE:
        raise InputError(
            f"features of {name} differ from hardmix's by {worst:.1e} of the largest, above the"
            f" limit of {TOLERANCE:.0e}: nothing was written; please report this."
        )
    say(f"Verified with {name} on random images: features differ by {worst:.1e} of the largest.")


def difference(
    ours: Float[Tensor, "batch features"], theirs: Float[Tensor, "batch features"]
) -> float:
    """Return the largest difference relative to the largest feature; infinite for NaN."""
    part = float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-12))
    return part if part == part else float("inf")


@torch.no_grad()
def compare_whole(other: Callable[[Tensor], Tensor], encoder: TrainedEncoder) -> None:
    """Compare features of images of several sizes, preprocessed on both sides."""
    size, generator = encoder.image_size, torch.Generator().manual_seed(0)
    worst = 0.0
    sizes = [(size, size), (size // 2 + 1, size), (5 * size + 1, 4 * size), (size, 6 * size)]
    for height, width in sizes:
        shape = 2, encoder.channels, height, width
        images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        ours = encoder(torch.stack([encoder.preprocess(image) for image in images]))
        worst = max(worst, difference(ours, other(images)))
    if worst > ROUNDED:
        raise InputError(
            f"features of onnxruntime with preprocessing differ from hardmix's by {worst:.1e} of"
            f" the largest, above the limit of {ROUNDED:.0e}: nothing was written; please report"
            " this."
        )
    say(f"Verified on random images of {len(sizes)} sizes: features differ by {worst:.1e}.")


LONGEST = 4
"""Sides longer than this many times the short one are cut first, as `evaluation_crop` does."""


class WithPreprocessing(nn.Module):
    """uint8 images to features: `TrainedEncoder.preprocess`, trunk."""

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: TrainedEncoder) -> None:
        super().__init__()
        self.trunk, self.size = encoder.trunk, encoder.image_size
        self.reduced_to = encoder.reduced_to
        mean, std = channel_statistics(encoder.channels)
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])

    def forward(
        self, images: UInt8[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch features"]:
        """Features of images that have one size, whichever."""
        height, width = (torch.full((1,), images.shape[axis], dtype=torch.int64) for axis in (2, 3))
        down = self._weights(height, width, images.shape[2])
        across = self._weights(width, height, images.shape[3])
        crops = down @ images.float() @ across.T
        crops = crops.round().clamp(0, 255) / 255  # uint8 again, as a file's crop would be
        features: Tensor = self.trunk((crops - self.mean) / self.std)
        return features

    def _weights(
        self,
        side: Int64[Tensor, " 1"],
        other: Int64[Tensor, " 1"],
        pixels: int | torch.SymInt | torch.SymInt,
    ) -> Float[Tensor, "size pixels"]:
        """Return how much each of a side's pixels counts in each of the crop's."""
        kept, pixel = torch.arange(self.size), torch.arange(pixels)
        if self.reduced_to is None:
            return self._crop(side, other).weights(kept, pixel)
        short = torch.minimum(side, other)
        target = torch.minimum(short, torch.full_like(short, self.reduced_to))
        reduced, other = side * target // short, other * target // short
        crop = self._crop(reduced, other)
        reducing = Resizing(torch.zeros_like(side), side, torch.zeros_like(side), side / reduced)
        between = crop.first_used() + torch.arange(self.reduced_to + 8)  # more than the crop uses
        return crop.weights(kept, between) @ reducing.weights(between, pixel)

    def _crop(self, side: Int64[Tensor, " 1"], other: Int64[Tensor, " 1"]) -> "Resizing":
        """Return what `evaluation_crop` does with this side of an image."""
        short = torch.minimum(side, other)
        length = torch.minimum(side, LONGEST * short)
        ready = (side == self.size) & (other == self.size)  # stays as it is
        resized = torch.where(ready, side, resized_side(self.size) * length // short)
        first, scale = _middle(resized - self.size), length.float() / resized.float()
        return Resizing(_middle(side - length), length, first, scale)


class Resizing(NamedTuple):
    """A side that is resized with antialiasing, and of which a part is kept."""

    start: Int64[Tensor, " 1"]
    """The first pixel that is resized."""
    length: Int64[Tensor, " 1"]
    """The number of pixels that are resized."""
    first: Int64[Tensor, " 1"]
    """The first pixel of the result that is kept."""
    scale: Float[Tensor, " 1"]
    """Pixels for each of the result."""

    def first_used(self) -> Int64[Tensor, " 1"]:
        """Return a pixel before all those that count in what is kept."""
        reach = self.scale.clamp_min(1)
        return (self.start + self.first * self.scale - reach).floor().long()

    def weights(
        self, kept: Int64[Tensor, " kept"], pixel: Int64[Tensor, " pixels"]
    ) -> Float[Tensor, "kept pixels"]:
        """Return how much these pixels count in these of the kept ones."""
        centre = (kept.float() + self.first.float() + 0.5) * self.scale
        place = pixel.float() + 0.5 - self.start.float()
        inside = (place > 0) & (place < self.length.float())
        distance = (place[None] - centre[:, None]) / self.scale.clamp_min(1)
        weights = (1 - distance.abs()).clamp_min(0) * inside
        return weights / weights.sum(dim=1, keepdim=True).clamp_min(1e-6)


def _middle(spare: Int64[Tensor, " 1"]) -> Int64[Tensor, " 1"]:
    """Return where the middle begins: as torchvision's center_crop rounds."""
    return (spare.float() / 2).round().long()
