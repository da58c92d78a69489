"""An embedded data set: each image shows one form, and only the outline tells forms apart.

An image repeats its form on a tilted lattice. Colour, size, place and turn differ from cell to
cell, so that two crops of an image share the form and little else. (One large form per image was
tried first: after 12 epochs, contrastive learning was no better than an untrained network.)

Images are drawn in blocks, each with its own generator: image i depends on (seed, split, i), not on
how many are drawn. A form is a signed distance to its outline, negative inside, in a disc of radius
1 with y pointing up; a pixel that is nearer than half its width is partly covered.
"""

import hashlib
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from hardmix.data.cache import cache_folder
from hardmix.data.image_set import Split
from hardmix.errors import InputError
from hardmix.runtime.random_numbers import seed_of

Field = Float[Tensor, "block height width"]

Bands = Float[Tensor, "block bands height width"]
Outline = Callable[[Tensor, Tensor], Tensor]

BLOCK = 240
"""Images that are drawn together, a multiple of the number of classes."""

# These amounts are chosen so that raw pixels fail and networks do not. With 10,000 training images
# at 32 pixels, the k-NN accuracy is 0.13 with raw pixels, 0.24 with the untrained `small` network,
# and 0.78 after 20 epochs of MoCo-v2 (seed 0); a ConvNet with labels reaches 0.999.
# Lengths are in halves of the image's width; colours go from 0 to 1.
CELL = (0.75, 1.05)
SIZE = (0.85, 1.0)
TURN = 25.0
BRIGHTNESS = (0.44, 0.56)
CONTRAST = (0.35, 0.45)

HUE = 0.08
TEXTURE = 0.06
GRAIN = 0.06


def draw_shapes(
    num_images: int, image_size: int = 32, seed: int = 0, split: Split = "train"
) -> tuple[UInt8[Tensor, "n 3 size size"], Int[Tensor, " n"]]:
    """Return images and labels, the classes in turn: the first n of any longer drawing."""
    if num_images < 1:
        raise InputError(f"num_images={num_images} is below 1: nothing would be drawn.")
    blocks = range(math.ceil(num_images / BLOCK))
    images = torch.cat([_draw_block(block, image_size, seed, split) for block in blocks])
    return images[:num_images].clone(), torch.arange(num_images) % len(CLASSES)


def cached_shapes(
    num_images: int, image_size: int = 32, seed: int = 0, split: Split = "train"
) -> tuple[UInt8[Tensor, "n 3 size size"], Int[Tensor, " n"]]:
    """Return the same as `draw_shapes`, from the cache folder if they were drawn before."""
    file = _cache_file(num_images, image_size, seed, split)
    labels = torch.arange(num_images) % len(CLASSES)
    try:
        images = torch.from_numpy(np.load(file, allow_pickle=False))
        if images.dtype == torch.uint8 and images.shape == (num_images, 3, image_size, image_size):
            return images, labels
    except (OSError, ValueError, EOFError):
        pass  # not drawn yet, or damaged
    images, labels = draw_shapes(num_images, image_size, seed, split)
    _keep(file, images)
    return images, labels


def _cache_file(num_images: int, image_size: int, seed: int, split: Split) -> Path:
    """Return a file named by everything that the images depend on, including this source file."""
    text = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    return cache_folder() / f"shapes-{text}-{split}-{seed}-{num_images}x{image_size}.npy"


def _keep(file: Path, images: Tensor) -> None:
    """Write the file completely or not at all; if that fails, images will be drawn again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            part = Path(folder) / file.name
            np.save(part, images.numpy())
            part.replace(file)
    except OSError:
        pass


class _Draws:
    """Uniform random numbers for the images of a block."""

    def __init__(self, seed: int, split: Split, block: int) -> None:
        seed = seed_of("shapes", seed, split, block)
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(BLOCK, *shape, generator=self.generator)

    def smooth(self, low: float, high: float, bands: int, points: int, image_size: int) -> Bands:
        """Return clouds: random numbers at points x points places, interpolated."""
        table = self.uniform(low, high, bands, points, points)
        size = (image_size, image_size)
        clouds: Bands = interpolate(table, size, mode="bilinear", align_corners=True)
        return clouds


class _Lattice:
    """Square cells, tilted and moved at random, and random numbers that are constant in a cell.

    `right` and `up` count cells over the whole image, `x` and `y` go from -1 to 1 within a cell.
    """

    SIDE = 6  # most cells of an image in one direction, at the smallest width and any tilt

    def __init__(self, draws: _Draws, image_size: int) -> None:
        steps = (torch.arange(image_size) + 0.5) / image_size * 2 - 1
        y, x = torch.meshgrid(-steps, steps, indexing="ij")
        self.width = draws.uniform(*CELL, 1, 1)
        tilt = draws.uniform(-TURN, TURN, 1, 1).deg2rad()
        right = (x * tilt.cos() + y * tilt.sin()) / self.width + draws.uniform(0, 1, 1, 1)
        up = (y * tilt.cos() - x * tilt.sin()) / self.width + draws.uniform(0, 1, 1, 1)
        column, row = right.round(), up.round()
        self.right, self.up = right, up
        self.x, self.y = 2 * (right - column), 2 * (up - row)
        self.cell = ((column + 2) * self.SIDE + row + 2).long().flatten(1)
        self.draws, self.image_size = draws, image_size

    def bands(self, low: float, high: float, bands: int) -> Bands:
        """Return numbers for each cell, at each of its pixels."""
        table = self.draws.uniform(low, high, bands, self.SIDE**2)
        pixels = table.gather(2, self.cell[:, None].expand(-1, bands, -1))
        return pixels.view(BLOCK, bands, self.image_size, self.image_size)

    def uniform(self, low: float, high: float) -> Field:
        """Return one number for each cell, at each of its pixels."""
        return self.bands(low, high, 1)[:, 0]

    def sign(self) -> Field:
        """Return -1 or 1 for each cell."""
        return self.uniform(-1, 1).sign()


def _draw_block(
    block: int, image_size: int, seed: int, split: Split
) -> UInt8[Tensor, "block 3 size size"]:
    """Draw forms over a ground; the brightness of each differs from the ground beneath it."""
    draws = _Draws(seed, split, block)
    lattice = _Lattice(draws, image_size)
    inside = _inside(lattice)[:, None]
    brightness = draws.smooth(*BRIGHTNESS, 1, 3, image_size)
    contrast = (lattice.sign() * lattice.uniform(*CONTRAST))[:, None]
    ground = brightness + _hue(draws.smooth(-HUE, HUE, 3, 3, image_size))
    form = brightness + contrast + _hue(lattice.bands(-HUE, HUE, 3))
    image = ground + _texture(draws, lattice)
    image = image.lerp(form + _texture(draws, lattice), inside)
    image += draws.uniform(-GRAIN, GRAIN, 1, image_size, image_size)
    return (image.clamp_(0, 1) * 255).round_().to(torch.uint8)


def _inside(lattice: _Lattice) -> Field:
    """Return the share of each pixel that a form covers."""
    size, turn = lattice.uniform(*SIZE), lattice.uniform(-TURN, TURN).deg2rad()
    x = lattice.x - (1 - size) * lattice.uniform(-1, 1)
    y = lattice.y - (1 - size) * lattice.uniform(-1, 1)
    mirrored = lattice.sign()
    across = mirrored * (x * turn.cos() + y * turn.sin()) / size
    along = (y * turn.cos() - x * turn.sin()) / size
    distance = torch.empty_like(across)
    for label, outline in enumerate(OUTLINES.values()):
        images = slice(label, None, len(OUTLINES))
        distance[images] = outline(across[images], along[images])
    pixels = lattice.width / 2 * lattice.image_size / 2
    return (0.5 - distance * size * pixels).clamp_(0, 1)


def _hue(colour: Bands) -> Bands:
    """Remove the brightness of a colour, so that form and ground keep the contrast drawn."""
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    return colour - (colour * weights).sum(dim=1, keepdim=True)


def _texture(draws: _Draws, lattice: _Lattice) -> Bands:
    """Draw stripes, checks or clouds, one of them for each image, with a random strength."""
    angle, phase = draws.uniform(0, math.pi, 1, 1), draws.uniform(0, 2 * math.pi, 1, 1)
    frequency = draws.uniform(6, 14, 1, 1)
    x = frequency * (lattice.right * angle.cos() + lattice.up * angle.sin())
    y = frequency * (lattice.up * angle.cos() - lattice.right * angle.sin())
    stripes = (x + phase).sin()
    clouds = draws.smooth(-1, 1, 1, 7, lattice.image_size)[:, 0]
    kinds = torch.stack([stripes, stripes * y.sin(), clouds])
    kind = draws.uniform(0, len(kinds)).long().clamp(max=len(kinds) - 1)
    strength = TEXTURE * draws.uniform(0, 1, 1, 1)
    return (strength * kinds[kind, torch.arange(BLOCK)])[:, None]


def _polygon(*corners: tuple[float, float]) -> Outline:
    """Return the distance to a polygon that fits the disc, with a sign by the even-odd rule."""
    reach = max(math.hypot(*corner) for corner in corners)
    points = [(x / reach, y / reach) for x, y in corners]

    def distance(x: Tensor, y: Tensor) -> Tensor:
        nearest, side = torch.full_like(x, math.inf), torch.ones_like(x)
        for (ax, ay), (bx, by) in zip(points, points[1:] + points[:1], strict=True):
            px, py, ex, ey = x - ax, y - ay, bx - ax, by - ay
            share = ((px * ex + py * ey) / (ex * ex + ey * ey)).clamp_(0, 1)
            gap = (px - share * ex).square_() + (py - share * ey).square_()
            nearest = torch.minimum(nearest, gap)
            crossed = ((y >= ay) != (y >= by)) & ((px * ey - py * ex) * ey < 0)
            side = torch.where(crossed, -side, side)
        return side * nearest.sqrt_()

    return distance


def _star(points: int, dent: float) -> Outline:
    radii = [dent if i % 2 else 1.0 for i in range(2 * points)]
    angles = [math.pi / 2 + i * math.pi / points for i in range(2 * points)]
    corners = zip(radii, angles, strict=True)
    return _polygon(*((radius * math.cos(a), radius * math.sin(a)) for radius, a in corners))


def _disc(x: Tensor, y: Tensor) -> Tensor:
    return torch.hypot(x, y) - 0.9


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return (torch.hypot(x, y) - 0.7).abs() - 0.2


def _crescent(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(torch.hypot(x, y) - 0.95, 0.8 - torch.hypot(x - 0.5, y))


def _bars(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum((x.abs() - 0.42).abs() - 0.2, y.abs() - 0.75)


def _heart(x: Tensor, y: Tensor) -> Tensor:
    """Return the distance to two half discs on a square that stands on its corner (Quilez)."""
    x, y = 0.64 * x.abs(), 0.64 * y + 0.63
    lobe = torch.hypot(x - 0.25, y - 0.75) - math.sqrt(2) / 4
    foot = 0.5 * (x + y).clamp(min=0)
    flank = torch.minimum(torch.hypot(x, y - 1), torch.hypot(x - foot, y - foot))
    return torch.where(x + y > 1, lobe, flank * (x - y).sign()) / 0.64


_CROSS = [(1, 3), (-1, 3), (-1, 1), (-3, 1), (-3, -1), (-1, -1)]

OUTLINES: dict[str, Outline] = {
    "disc": _disc,
    "ring": _ring,
    "square": _polygon((1, 1), (-1, 1), (-1, -1), (1, -1)),
    "triangle": _polygon((-9, -7), (9, -7), (0, 10)),
    "star": _star(5, dent=0.42),
    "cross": _polygon(*_CROSS, *((-x, -y) for x, y in _CROSS)),
    "crescent": _crescent,
    "heart": _heart,
    "arrow": _polygon((-9, -3), (1, -3), (1, -8), (10, 0), (1, 8), (1, 3), (-9, 3)),
    "bars": _bars,
    "angle": _polygon((-8, -8), (8, -8), (8, -3), (-3, -3), (-3, 8), (-8, 8)),
    "hourglass": _polygon((-8, -9), (8, -9), (1, 0), (8, 9), (-8, 9), (-1, 0)),
}
"""Distances to the forms, in the order of the labels."""

CLASSES: tuple[str, ...] = tuple(OUTLINES)
"""Names of the classes."""
