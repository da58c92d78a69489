"""Measures how fast two views of an image are made, compared with official MoCo's pipeline.

Both use the same cores and return batches on the training device. A block is measured at full
speed: from the arrival of one batch to that of a later one, while workers are busy.
"""

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.images import as_files, photographs, repeated, small_data
from benchmarks.jobs import SEED, BenchJob, Row, Setup, Tell
from benchmarks.official import OfficialViews
from benchmarks.rounds import milliseconds, take_turns
from hardmix.data.image_set import ImageSet
from hardmix.data.loading import ViewLoader
from hardmix.data.sources import open_images
from hardmix.settings.config import DataConfig

SMALL_IMAGES, PHOTOGRAPHS = "small images, 32 px", "photographs, 224 px"
SMALL_FILES = "small images in files, 32 px"
NUM_SHAPES, NUM_GENERATED = 10_000, 100
FLOW = 4
"""Batches from each worker in a block: batches of many workers come in bursts."""

Views = Callable[[Image.Image], Sequence[Tensor]]
"""A PIL image to its two views."""
Pair = tuple[Float[Tensor, "batch 3 size size"], Float[Tensor, "batch 3 size size"]]


class LoaderSize(NamedTuple):
    """The images and batches that are loaded."""

    source: str
    """small, png (the same in files) or jpeg."""
    root: str | None
    image_size: int
    batch: int
    batches: int
    """Batches in a block."""
    workers: int
    number: int
    """Number of images, if they are generated."""


def small_size(setup: Setup) -> LoaderSize:
    """Return the size of CIFAR-10's images, or of generated ones."""
    if setup.quick:
        return LoaderSize("small", setup.cifar, 32, 8, 2, 1, 128)
    batches = max(16, FLOW * setup.cores)
    return LoaderSize("small", setup.cifar, 32, 256, batches, setup.cores, NUM_SHAPES)


def jpeg_size(setup: Setup, workers: int | None = None) -> LoaderSize:
    """Photographs in files."""
    if setup.quick:
        return LoaderSize("jpeg", setup.jpeg, 32, 4, 2, workers or 1, 8)
    workers = workers or setup.cores
    batches = max(8, FLOW * workers)
    return LoaderSize("jpeg", setup.jpeg, 224, 32, batches, workers, NUM_GENERATED)


def plan(setup: Setup) -> list[BenchJob]:
    """Small images, in memory and in files, and photographs."""
    photographs, small = jpeg_size(setup), small_size(setup)
    name = f"photographs, {photographs.image_size} px"
    in_files = small._replace(source="png", workers=0)  # nor has a set in memory any
    items = {SMALL_IMAGES: small, SMALL_FILES: in_files, name: photographs}
    return [loader_job("loader", setup, items, setup.rounds)]


def loader_job(title: str, setup: Setup, items: dict[str, LoaderSize], rounds: int) -> BenchJob:
    """Return a job of `measure`: these sizes, by name."""
    settings = {**setup.common, "rounds": rounds, "items": items}
    turns, allocator = rounds * len(items), setup.allocators[0]
    return BenchJob(title=title, kind="loader", settings=settings, turns=turns, allocator=allocator)


def measure(settings: dict[str, Any], tell: Tell) -> list[Row]:
    """Every size, one after the other."""
    device, rows = settings["device"], []
    for name, sizes in settings["items"].items():
        size = LoaderSize(*sizes)
        with TemporaryDirectory() as folder:
            images = _images(size, Path(folder))
            blocks = {
                "official": partial(official_block, images, size, device),
                "hardmix": partial(hardmix_block, images, size, device),
            }
            if size.source == "png":
                images = images.subset(NUM_SHAPES, SEED)
                files = as_files(images, Path(folder))
                blocks = {
                    "memory": partial(hardmix_block, images, size, device),
                    "files": partial(hardmix_block, files, size, device),
                }
            row = take_turns(name, blocks, settings["rounds"], tell)
        facts = {
            "images": size.batches * size.batch,
            "workers": size.workers,
            "data": data_name(size, images),
        }
        rows.append({**row, **facts, "judged": True})
    return rows


def data_name(size: LoaderSize, images: ImageSet) -> str:
    """Return which images were used, without the user's folders."""
    if size.source != "jpeg":
        return images.name
    return "generated" if size.root is None else Path(size.root).name


def _images(size: LoaderSize, folder: Path) -> ImageSet:
    if size.source == "jpeg":
        return photographs(size.root, folder, size.number)
    return open_images(small_data(size.root, size.image_size, size.number))


def official_block(images: ImageSet, size: LoaderSize, device: str) -> float:
    """Milliseconds of a block, by PIL and worker processes."""
    views = OfficialViews(size.image_size)
    with closing(pil_batches(images, views, size, device)) as batches:
        return full_flow(batches, size, device)


def hardmix_block(images: ImageSet, size: LoaderSize, device: str) -> float:
    """Milliseconds of a block, as `hardmix pretrain` loads it."""
    config = DataConfig(image_size=size.image_size, workers=size.workers)
    images = repeated(images, size.batch * _batches(size))
    loader = ViewLoader(images, config, size.batch, SEED, torch.device(device))
    with closing(loader):
        pairs = ((batch.query, batch.key) for batch in loader.epoch(0))
        return full_flow(pairs, size, device)


def full_flow(batches: Iterator[Pair], size: LoaderSize, device: str) -> float:
    """Milliseconds that a block's batches take, after one from each worker or the first."""
    _drop(batches, size.workers or 1)
    return milliseconds(partial(_drop, batches, size.batches), device)


def _drop(batches: Iterator[Pair], number: int) -> None:
    for _ in itertools.islice(batches, number):
        pass


def _batches(size: LoaderSize) -> int:
    """Return enough batches for every worker to be two batches ahead."""
    return size.batches + 3 * (size.workers or 1)


def pil_batches(
    images: ImageSet, views: Views, size: LoaderSize, device: str
) -> Generator[Pair, None, None]:
    """Batches as official MoCo and lightly load them; the workers end with the iterator."""
    images = repeated(images, size.batch * _batches(size))
    loader = DataLoader(
        PilImages(images, views),
        batch_size=size.batch,
        shuffle=True,
        drop_last=True,
        num_workers=size.workers,
        pin_memory=device == "cuda",
    )
    iterator = iter(loader)
    try:
        for query, key in iterator:
            yield query.to(device, non_blocking=True), key.to(device, non_blocking=True)
    finally:
        iterator._shutdown_workers()  # type: ignore[attr-defined]  # and waits for them


class PilImages(Dataset[Sequence[Tensor]]):
    """Images one by one, each opened by PIL and turned into its views."""

    def __init__(self, images: ImageSet, views: Views) -> None:
        self.files, self.views = images.files, views
        self.pixels = None
        if images.tensor is not None:  # as torchvision's CIFAR10 keeps them
            self.pixels = images.tensor.permute(0, 2, 3, 1).contiguous().numpy()

    def __len__(self) -> int:
        return len(self.files or ()) if self.pixels is None else len(self.pixels)

    def __getitem__(self, index: int) -> Sequence[Tensor]:
        if self.pixels is not None:
            return self.views(Image.fromarray(self.pixels[index]))
        assert self.files is not None
        with Image.open(self.files[index]) as image:
            return self.views(image.convert("RGB"))
