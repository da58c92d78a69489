"""JPEGs decoded by the GPU: data.decoder=cuda, for machines with few cores for each GPU.

Worker processes only read the files. torchcodec decodes those of a batch in one call (nvJPEG), and
crops are cut on the GPU from the random numbers that are always used, so that a run still depends
on nothing but (seed, epoch, image, view). The pixels are not a CPU's: nvJPEG rounds in its own way,
and crops are not rounded to bytes in between. What the GPU cannot decode (PNG, a turned or CMYK
photograph, damaged files) is decoded as usual.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int64, UInt8
from PIL import Image
from torch import Tensor

from hardmix.data.image_files import UnreadableImage, check_size, errors_named, read_image
from hardmix.data.image_set import ImageSet
from hardmix.data.resized_jpegs import ResizedJpegs
from hardmix.errors import InputError
from hardmix.runtime.device import send
from hardmix.settings.config import DataConfig

ORIENTATION, UPRIGHT = 0x0112, (None, 1)

Decode = Callable[[list[Tensor], torch.device], list[Tensor]]


class ReadFiles(NamedTuple):
    """A list of images as a worker has read them for a GPU that decodes."""

    files: Sequence[UInt8[Tensor, "..."]]
    """The bytes of each JPEG, or the pixels of an image that was decoded."""
    ids: Int64[Tensor, " batch"]
    wanted: Int64[Tensor, " batch"]
    """The images that were asked for; an unreadable one is replaced by the next."""
    unreadable: dict[int, str]
    seconds: float = 0.0


class DecodedBatch(NamedTuple):
    """Images of different sizes in one tensor on the GPU, each in its upper left corner."""

    pixels: UInt8[Tensor, "batch channels height width"]
    heights: Int64[Tensor, " batch"]
    widths: Int64[Tensor, " batch"]


def check_decoder(config: DataConfig, device: torch.device) -> None:
    """Raise InputError, in one sentence, if a GPU is to decode and cannot."""
    if config.decoder == "cpu":
        return
    reasons = {
        f"train.device={device} is none": device.type != "cuda",
        "torchcodec is missing (pip install 'hardmix[jpeg]')": _decode_jpeg() is None,
        f"data.channels={config.channels} is not 3": config.channels != 3,
        "data.views has pipelines for CPUs": config.views is not None,
        "data.augmentation=infomin is for CPUs": config.augmentation == "infomin",
    }
    for reason, holds in reasons.items():
        if holds:
            raise InputError(
                f"data.decoder=cuda decodes JPEGs on a GPU, but {reason}: set data.decoder to cpu."
            )


def read_files(images: ImageSet, most: int, job: tuple[int, list[int]]) -> ReadFiles:
    """Read the files of a batch: a worker's part. It ends if more than `most` are unreadable."""
    started, (_, wanted) = time.perf_counter(), job
    read = _read(images, wanted, most, _bytes_or_pixels)
    return read._replace(seconds=time.perf_counter() - started)


def _read(
    images: ImageSet, wanted: list[int], most: int, load: Callable[[ImageSet, int], Tensor]
) -> ReadFiles:
    """Load these images; the next one replaces an unreadable one."""
    files: dict[int, Tensor] = {}
    ids: list[int] = []
    unreadable: dict[int, str] = {}
    for index in wanted:
        while index in unreadable or index not in files:
            try:
                files[index] = load(images, index)
            except UnreadableImage as error:
                unreadable[index] = str(error)
                if len(unreadable) > most:
                    return ReadFiles([], torch.empty(0).long(), torch.tensor(wanted), unreadable)
                index = (index + 1) % len(images)
        ids.append(index)
    found = [files[index] for index in ids]
    return ReadFiles(found, torch.tensor(ids), torch.tensor(wanted), unreadable)


def _bytes_or_pixels(images: ImageSet, index: int) -> UInt8[Tensor, "..."]:
    """Return a JPEG's bytes if the GPU can decode them, otherwise the pixels."""
    assert images.files is not None
    name = images.files[index]
    if isinstance(images.read, ResizedJpegs) and (data := images.read.data(name)):
        return _as_tensor(data)
    if images.read is not read_image or not name.lower().endswith((".jpg", ".jpeg")):
        return images.image(index)
    with errors_named(name, images.max_pixels):
        with Image.open(name) as image:
            check_size(image.width, image.height, images.max_pixels)
            usual = image.format == "JPEG" and image.mode in ("RGB", "L")
            upright = image.getexif().get(ORIENTATION) in UPRIGHT
        if usual and upright:
            return _as_tensor(Path(name).read_bytes())
    return images.image(index)


def _as_tensor(data: bytes) -> UInt8[Tensor, " bytes"]:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decoded(
    read: ReadFiles, images: ImageSet, most: int, device: torch.device
) -> tuple[ReadFiles, DecodedBatch]:
    """Decode a batch on the GPU; return it with what was read, which damaged files may change."""
    decode = _decode_jpeg()
    assert decode is not None, "checked before"
    jpegs = [place for place, file in enumerate(read.files) if file.ndim == 1]
    pixels = list(read.files)
    try:
        for place, image in zip(jpegs, decode([pixels[i] for i in jpegs], device), strict=True):
            pixels[place] = image
    except RuntimeError:  # one of them is damaged, and nobody says which
        again = _read(images, read.wanted.tolist(), most, ImageSet.image)
        read = again._replace(unreadable=read.unreadable | again.unreadable)
        if len(read.unreadable) > most:
            return read, DecodedBatch(
                torch.empty(0, 3, 1, 1, dtype=torch.uint8), *torch.empty(2, 0).long()
            )
        pixels = list(read.files)
    heights, widths = torch.tensor([image.shape[1:] for image in pixels]).T
    shape = len(pixels), 3, int(heights.max()), int(widths.max())
    whole = torch.zeros(shape, dtype=torch.uint8, device=device)
    for place, image in enumerate(pixels):
        whole[place, :, : image.shape[1], : image.shape[2]] = send(image, device)
    return read, DecodedBatch(whole, heights, widths)


@cache
def _decode_jpeg() -> Decode | None:
    try:
        decode = import_module("torchcodec.decoders").decode_jpeg
    except (AttributeError, ImportError, OSError, RuntimeError):
        return None
    return lambda files, device: decode(files, device=device) if files else []
