"""Copies of a picture that were cropped, bordered, brightened, compressed, or given a logo.

Pairs that may be copies are neighbours by features, or by the middle of the picture at a few
scales. Each pair is then checked: one picture is laid over the other. A coarse search over scales
and offsets, which differ in x and y, finds where it fits; Gauss-Newton steps refine the place. Then
the edges of both are compared block by block where they overlap, and the blocks that agree least
are left out, since a logo may cover them. Edges survive compression, brightness and a change of
size; two photographs of similar things have different ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, Int64, UInt8
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, grid_sample, max_pool2d, pad

from hardmix.explore.near_duplicates import DuplicateGroup, Duplicates
from hardmix.explore.neighbourhoods import Neighbours, neighbours
from hardmix.explore.pictures import Pictures

MIDDLES = (0.75, 0.66, 0.84)
"""Shares of the side of which the middle is compared, to find candidates."""
MIDDLE = 12
"""Side in pixels of the middle of a picture."""
LIMIT, EVEN = 2.5, 4.0
"""Largest difference from the median, in units of the usual difference, and the least of these."""
BY_MIDDLE, LEAST_MIDDLE = 4, 0.6
"""Candidates of a picture at each scale, and the smallest correlation of the middles."""
BY_FEATURES, LEAST_FEATURES = 4, 0.5
"""Candidates of a picture by features, and the smallest cosine."""
SAME_SIZE = 0.93
"""Share of the largest copy's pixels, without borders, from which a copy is as large."""
BORDERED, CLIPPED, WITH_LOGO = 0.02, 0.01, 0.2
"""Share of a border, more clipped pixels, and more edges in few blocks that an edit leaves."""

SIDE = 64
"""Side in pixels of the grey pictures that are compared."""
COARSE = 16
"""Side in pixels in the coarse search."""
SCALES = (0.8, 0.9, 1.0, 1.11, 1.25)
"""Scales of one picture within the other: a crop or border of up to a tenth on each side."""
OFFSETS = (-0.1, 0.0, 0.1)
"""Offsets in units of half a side."""
PROMISING = 0.8
"""Smallest correlation in the coarse search of pairs that are examined further."""
LEAST_OVERLAP = 0.5
"""Smallest share of the first picture that must lie within the second."""
STEPS = ((32, 6), (64, 4))
"""Side in pixels and number of Gauss-Newton steps of each refinement."""
DIFFERENT = 0.5
"""Difference, in deviations of the grey values, from which a pixel counts little in a step."""
LONGEST_STEP = 0.1
"""Largest change of a scale or offset in a step."""
UNMOVED = torch.tensor([1.0, 0.0, 1.0, 0.0])
"""The place of a picture that lies exactly over another one."""
LOWEST = torch.tensor([0.6, -0.6, 0.6, -0.6])
HIGHEST = torch.tensor([1.6, 0.6, 1.6, 0.6])
"""Limits of scales and offsets."""
BLOCKS = 8
"""Blocks along a side."""
LEFT_OUT = 0.2
"""Share of the blocks that may differ, under a logo."""
LOGO = 4
"""Blocks in which a logo is looked for."""
PLAIN = 3.0
"""Contrast in grey values below which a picture is plain: its edges are noise."""
CHUNK = 256
"""Pairs that are examined at once."""

Greys = UInt8[np.ndarray, "n side side"]
Places = Float[Tensor, "pairs 4"]
"""Scale and offset in x, then in y: what is at x in the first is at scale * x + offset."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """How pairs of pictures compare, in the order of the pairs."""

    agreement: Float32[np.ndarray, " pairs"]
    """Correlation of their edges where they overlap, 0 to 1; the blocks that differ most are left
    out."""
    added: Float32[np.ndarray, " pairs"]
    """How many more edges the first picture has where they differ most, -1 to 1: 1 for a logo."""
    overlap: Float32[np.ndarray, " pairs"]
    """Share of the first picture that lies within the second."""


def find_copies(
    pictures: Pictures,
    near: Neighbours,
    threshold: float,
    exact: Sequence[Int64[np.ndarray, " m"]] = (),
) -> tuple[Duplicates, Int64[np.ndarray, "pairs 2"], Float32[np.ndarray, " pairs"]]:
    """Return groups of copies, the most certain first, and all confirmed pairs.

    Args:
        pictures: all images.
        near: neighbours by features.
        threshold: smallest agreement.
        exact: groups of files with the same bytes, whose agreement is 1.
    """
    pairs = candidates(pictures.greys, near)
    known = _Known(pictures.greys, [rows for rows in exact if len(rows) > 1])
    known.check(pairs)
    groups, left = [], known.confirmed(threshold)
    while left:
        components = _components(left)
        keeps = [_best(rows, pictures, known) for rows in components]
        wanted = [
            (keep, row)
            for keep, rows in zip(keeps, components, strict=True)
            for row in rows
            if row != keep
        ]
        known.check(np.array(wanted, np.int64).reshape(-1, 2))
        taken = set()
        for keep, rows in zip(keeps, components, strict=True):
            others = [row for row in rows if row != keep and known[keep, row] >= threshold]
            taken |= {keep, *others}
            if others:
                others.sort(key=lambda row: (-known[keep, row], row))
                values = np.array([known[keep, row] for row in others], np.float32)
                groups.append(DuplicateGroup(keep, np.array(others), values))
        left = [pair for pair in left if not taken & set(pair)]
    groups.sort(key=lambda group: (-float(group.similarities.min()), group.keep))
    confirmed = known.confirmed(threshold)
    values = np.array([known[pair] for pair in confirmed], np.float32)
    return (
        Duplicates(tuple(groups), threshold),
        np.array(confirmed, np.int64).reshape(-1, 2),
        values,
    )


def candidates(greys: Greys, near: Neighbours) -> Int64[np.ndarray, "pairs 2"]:
    """Return pairs of pictures that may be copies, each once."""
    middles = [middles_of(greys, share) for share in MIDDLES]
    finds = [neighbours(middles[0], BY_MIDDLE + 1, queries=each) for each in middles]
    asked = [(found, LEAST_MIDDLE) for found in finds]
    parts = []
    for found, least in [(near.first(BY_FEATURES), LEAST_FEATURES), *asked]:
        rows = np.arange(len(greys))[:, None].repeat(found.indices.shape[1], axis=1)
        close = (found.similarities >= least) & (found.indices != rows)
        parts.append(np.stack([rows[close], found.indices[close]], axis=1))
    return np.unique(np.sort(np.concatenate(parts), axis=1), axis=0)


def middles_of(greys: Greys, share: float) -> Float[Tensor, "n values"]:
    """Return the middle of each picture at 12 x 12 pixels, minus its mean."""
    margin = round(SIDE * (1 - share) / 2)
    middle = torch.from_numpy(greys[:, margin : SIDE - margin, margin : SIDE - margin])
    return _limited(adaptive_avg_pool2d(middle.float()[:, None], MIDDLE).flatten(1))


def _limited(rows: Float[Tensor, "n values"]) -> Float[Tensor, "n values"]:
    """Return pixels relative to their median, limited, so that a logo does not count much."""
    rows = rows - rows.median(dim=1, keepdim=True).values
    usual = rows.abs().median(dim=1, keepdim=True).values.clamp_min(EVEN)
    rows = (rows / usual).clamp(-LIMIT, LIMIT)
    return rows - rows.mean(dim=1, keepdim=True)


class _Known:
    """The agreement of pairs that were checked, in either order."""

    def __init__(self, greys: Greys, exact: Sequence[Int64[np.ndarray, " m"]]) -> None:
        self._greys = greys
        self._same = {int(row): number for number, rows in enumerate(exact) for row in rows}
        self._agreement: dict[tuple[int, int], float] = {}
        self._added: dict[tuple[int, int], float] = {}
        for rows in exact:
            for row in rows[1:].tolist():
                self._agreement[int(rows[0]), row] = 1.0

    def __getitem__(self, pair: tuple[int, int]) -> float:
        row, other = min(pair), max(pair)
        if self._same.get(row, -1) == self._same.get(other, -2):
            return 1.0
        return self._agreement.get((row, other), 0.0)

    def check(self, pairs: Int64[np.ndarray, "pairs 2"]) -> None:
        """Compare pairs that were not compared yet."""
        wanted = {(min(pair), max(pair)) for pair in pairs.tolist()} - self._agreement.keys()
        if not wanted:
            return
        ordered = np.array(sorted(wanted))
        comparison = compare(self._greys, ordered)
        for pair, agreement, added in zip(
            map(tuple, ordered.tolist()),
            comparison.agreement.tolist(),
            comparison.added.tolist(),
            strict=True,
        ):
            self._agreement[pair] = agreement
            if agreement > 0:
                self._added[pair] = added

    def confirmed(self, threshold: float) -> list[tuple[int, int]]:
        """Return all pairs that agree."""
        return sorted(pair for pair in self._agreement if self[pair] >= threshold)

    def added(self, row: int, other: int) -> float:
        """Return how many more edges a picture has than another where they differ most."""
        value = self._added.get((min(row, other), max(row, other)), 0.0)
        return value if row < other else -value


def _components(pairs: list[tuple[int, int]]) -> list[list[int]]:
    """Return rows that are connected by pairs."""
    root: dict[int, int] = {}

    def find(row: int) -> int:
        while root.setdefault(row, row) != row:
            root[row] = root[root[row]]
            row = root[row]
        return row

    for row, other in pairs:
        root[find(other)] = find(row)
    parts: dict[int, list[int]] = {}
    for row in sorted(root):
        parts.setdefault(find(row), []).append(row)
    return list(parts.values())


def _best(rows: list[int], pictures: Pictures, known: _Known) -> int:
    """Return the copy to keep: the largest without its border, unedited, with the most bytes."""
    area = {row: float(pictures.pixels[row] * (1 - pictures.border[row])) for row in rows}
    largest = [row for row in rows if area[row] >= SAME_SIZE * max(area.values())]
    least = min(float(pictures.clipped[row]) for row in largest)

    def edits(row: int) -> int:
        clipped = pictures.clipped[row] > least + CLIPPED
        logo = not clipped and any(
            known.added(row, other) > WITH_LOGO
            for other in largest
            if pictures.clipped[other] <= pictures.clipped[row] + CLIPPED
        )
        return int(pictures.border[row] > BORDERED) + int(clipped) + int(logo)

    return min(largest, key=lambda row: (edits(row), -int(pictures.bytes[row]), row))


def compare(greys: Greys, pairs: Int64[np.ndarray, "pairs 2"]) -> Comparison:
    """Compare pairs of pictures, each given by two rows of `greys`."""
    agreement, added, overlap = (np.zeros(len(pairs), np.float32) for _ in range(3))
    pictures, sides = torch.from_numpy(greys), torch.from_numpy(pairs)
    places, fit = coarse_places(pictures, sides)
    contrast = torch.from_numpy(greys.reshape(len(greys), -1).std(axis=1)[pairs].min(axis=1))
    promising = ((fit > PROMISING) & (contrast >= PLAIN)).nonzero().flatten()
    for rows in promising.split(CHUNK):
        first, second = (pictures[sides[rows, side]].float()[:, None] for side in (0, 1))
        place, findings = places[rows], _edges_compared(first, second, places[rows])
        # Most edits leave the frame as it is; and refining may fail if a picture is mostly even.
        for other in (UNMOVED.expand(len(rows), -1), None):
            other = _refined(first, second, place) if other is None else other
            compared = _edges_compared(first, second, other)
            better = compared[0] > findings[0]
            place = torch.where(better[:, None], other, place)
            findings = [
                torch.where(better, new, old) for new, old in zip(compared, findings, strict=True)
            ]
        for values, array in zip(findings, (agreement, added, overlap), strict=True):
            array[rows.numpy()] = values.numpy()
    return Comparison(agreement, added, overlap)


def coarse_places(
    pictures: UInt8[Tensor, "n side side"], pairs: Int[Tensor, "pairs 2"]
) -> tuple[Places, Float[Tensor, " pairs"]]:
    """Return where the first picture of each pair fits best in the second, and the correlation.

    Resampling is a product with one matrix for the rows and one for the columns, and a picture is
    resampled once for all pairs in which it is the second.
    """
    small = _limited(adaptive_avg_pool2d(pictures.float()[:, None], COARSE).flatten(1))
    small = small.unflatten(1, (COARSE, COARSE))
    lines = list(product(SCALES, OFFSETS))
    matrices = torch.stack([_line(scale, offset) for scale, offset in lines])
    inside = (matrices.sum(dim=2) > 0).float()
    masks = torch.einsum("vy,wx->vwyx", inside, inside).flatten(2).flatten(0, 1)
    number = masks.sum(dim=1)
    flat = small.flatten(1)
    mean = flat @ masks.T / number
    spread = (flat.square() @ masks.T / number - mean.square()).clamp_min(1e-6)
    best, fit = torch.zeros(len(pairs), dtype=torch.int64), torch.full((len(pairs),), -1.0)
    order = pairs[:, 1].argsort(stable=True)
    seconds, counts = pairs[order, 1].unique_consecutive(return_counts=True)
    for second, rows in zip(seconds.tolist(), order.split(counts.tolist()), strict=True):
        moved = torch.einsum("vyi,ij,wxj->vwyx", matrices, small[second], matrices)
        moved = moved.flatten(2).flatten(0, 1)
        other, others = moved.sum(dim=1) / number, moved.square().sum(dim=1) / number
        first = pairs[rows, 0]
        covariance = flat[first] @ moved.T / number - mean[first] * other
        correlation = (
            covariance / (spread[first] * (others - other.square()).clamp_min(1e-6)).sqrt()
        )
        correlation[:, number < LEAST_OVERLAP * flat.shape[1]] = -1
        fit[rows], best[rows] = correlation.max(dim=1)
    across = torch.tensor(lines)
    down, right = best // len(lines), best % len(lines)
    return torch.cat([across[right], across[down]], dim=1), fit


def _line(scale: float, offset: float) -> Float[Tensor, "out in"]:
    """Return the matrix that resamples a line of pixels; rows outside it are zero."""
    centres = (torch.arange(COARSE, dtype=torch.float64) + 0.5) * (2 / COARSE) - 1
    at = (scale * centres + offset + 1) / 2 * COARSE - 0.5
    inside = (at > -0.5 - 1e-6) & (at < COARSE - 0.5 + 1e-6)
    place = at.clamp(0, COARSE - 1)
    matrix = (1 - (torch.arange(COARSE)[None] - place[:, None]).abs()).clamp_min(0)
    return (matrix * inside[:, None]).float()


def _sampled(
    pictures: Float[Tensor, "pairs c y x"], places: Places, side: int
) -> tuple[Float[Tensor, "pairs c side side"], Float[Tensor, "pairs 1 side side"]]:
    """Return the second pictures as they lie over the first ones, and a mask of the overlap."""
    centres = (torch.arange(side) + 0.5) * (2 / side) - 1
    x = places[:, 0, None] * centres + places[:, 1, None]
    y = places[:, 2, None] * centres + places[:, 3, None]
    grid = torch.stack(
        [x[:, None, :].expand(-1, side, -1), y[:, :, None].expand(-1, -1, side)], dim=3
    )
    moved = grid_sample(pictures, grid, padding_mode="border", align_corners=False)
    inside = ((x.abs() <= 1)[:, None, :] & (y.abs() <= 1)[:, :, None]).float()[:, None]
    return moved, inside


def _refined(
    first: Float[Tensor, "pairs 1 y x"], second: Float[Tensor, "pairs 1 y x"], places: Places
) -> Places:
    """Improve the places by Gauss-Newton steps on the difference of both, at equal contrast."""
    for side, number in STEPS:
        target, source = (adaptive_avg_pool2d(each, side) for each in (first, second))
        centres = (torch.arange(side) + 0.5) * (2 / side) - 1
        slopes = _slopes(source) * (side / 2)
        stacked = torch.cat([source, slopes], dim=1)
        for _ in range(number):
            moved, inside = _sampled(stacked, places, side)
            value, dx, dy = moved.unbind(dim=1)
            mask = inside[:, 0]
            a, b, scale = _at_equal_contrast(target[:, 0], value, mask)
            dx, dy = dx * scale, dy * scale
            residual = ((a - b) * mask).flatten(1)
            columns = torch.stack(
                [dx * centres[None, None, :], dx, dy * centres[None, :, None], dy], dim=3
            )
            columns = (columns * mask[..., None]).flatten(1, 2)
            places = (places + _step(columns, residual)).clamp(LOWEST, HIGHEST)
    return places


def _step(
    columns: Float[Tensor, "pairs pixels 4"], residual: Float[Tensor, "pairs pixels"]
) -> Places:
    """Return a damped step of least squares in which pixels that differ much count little."""
    weights = 1 / (1 + (residual / DIFFERENT).square())
    weighted = columns * weights[..., None]
    normal = weighted.mT @ columns
    damping = 1e-3 * normal.diagonal(dim1=1, dim2=2).mean(dim=1) + 1e-6
    normal = normal + damping[:, None, None] * torch.eye(4)
    step: Tensor = torch.linalg.solve(normal, weighted.mT @ residual[..., None])
    return step[..., 0].clamp(-LONGEST_STEP, LONGEST_STEP)


def _at_equal_contrast(
    a: Float[Tensor, "pairs y x"], b: Float[Tensor, "pairs y x"], mask: Float[Tensor, "pairs y x"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return both with mean 0 and deviation 1 inside the mask, and b's factor."""
    number = mask.sum(dim=(1, 2), keepdim=True).clamp_min(1)
    results = []
    for values in (a, b):
        centred = values - (values * mask).sum(dim=(1, 2), keepdim=True) / number
        spread = ((centred.square() * mask).sum(dim=(1, 2), keepdim=True) / number).sqrt()
        results.append((centred, 1 / spread.clamp_min(1e-3)))
    (a, a_scale), (b, b_scale) = results
    return a * a_scale, b * b_scale, b_scale


def _slopes(pictures: Float[Tensor, "pairs 1 y x"]) -> Float[Tensor, "pairs 2 y x"]:
    """Return the slopes in x and in y, by central differences."""
    padded = pad(pictures, (1, 1, 1, 1), mode="replicate")
    across = (padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]) / 2
    down = (padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]) / 2
    return torch.cat([across, down], dim=1)


def _edges_compared(
    first: Float[Tensor, "pairs 1 y x"], second: Float[Tensor, "pairs 1 y x"], places: Places
) -> list[Tensor]:
    """Return agreement, added edges and overlap at these places."""
    moved, inside = _sampled(second, places, SIDE)
    kept = -max_pool2d(-pad(inside, (2, 2, 2, 2)), 5, stride=1)
    a, b = _slopes(first) * kept, _slopes(moved) * kept
    ab, aa, bb = (
        BLOCKS_AREA * adaptive_avg_pool2d(each.sum(dim=1, keepdim=True), BLOCKS).flatten(1)
        for each in (a * b, a * a, b * b)
    )
    # Brightness changes contrast; the median over blocks with edges ignores a logo.
    edged = (aa + bb) >= (aa + bb).median(dim=1, keepdim=True).values
    ratio = torch.where(edged, ab / bb.clamp_min(1e-6), torch.nan)
    gain = ratio.nanmedian(dim=1, keepdim=True).values.clamp(0.3, 3)
    ab, bb = ab * gain, bb * gain.square()
    worst = (aa + bb - 2 * ab).topk(int(LEFT_OUT * BLOCKS * BLOCKS), dim=1).indices
    here, there = (each.gather(1, worst[:, :LOGO]).sum(dim=1) for each in (aa, bb))
    added = (here - there) / (here + there).clamp_min(1e-6)
    ab, aa, bb = (each.scatter(1, worst, 0).sum(dim=1) for each in (ab, aa, bb))
    agreement = (2 * ab / (aa + bb).clamp_min(1e-6)).clamp(0, 1)
    overlap = inside.mean(dim=(1, 2, 3))
    agreement[overlap < LEAST_OVERLAP] = 0
    return [agreement, added, overlap]


BLOCKS_AREA = (SIDE // BLOCKS) ** 2
"""Pixels of a block."""
