"""Pictures of detected objects next to the true ones."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from hardmix.data.image_files import read_image
from hardmix.evaluation.detection.samples import DetectionImage, FoundObjects, Mask, decode_mask

SHOWN = 0.5
"""Detections below this score are not drawn."""

LONGEST = 640
"""Pixels of a picture's longest side."""

# Okabe and Ito's colours, which colour-blind people can distinguish.
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")

_HEAD = 20
_GAP = 8


def compare(
    sample: DetectionImage, found: FoundObjects, classes: Sequence[str], score: float = SHOWN
) -> Image.Image:
    """Draw the image twice: with its true objects, and with those detected above `score`."""
    kept = found.scores >= score
    masks = found.masks and tuple(
        mask for mask, keep in zip(found.masks, kept, strict=True) if keep
    )
    names = [classes[number] for number in sample.classes]
    guesses = [
        f"{classes[number]} {value:.2f}"
        for number, value in zip(found.classes[kept], found.scores[kept], strict=True)
    ]
    truth = _draw(sample, sample.boxes, sample.classes, names, sample.masks)
    answer = _draw(sample, found.boxes[kept], found.classes[kept], guesses, masks)
    titles = (f"true: {len(names)}", f"detected (score {score:g} or more): {len(guesses)}")
    return _side_by_side((truth, answer), titles)


def _draw(
    sample: DetectionImage,
    boxes: np.ndarray,
    numbers: np.ndarray,
    texts: Sequence[str],
    masks: Sequence[Mask] | None,
) -> Image.Image:
    pixels = read_image(sample.path).permute(1, 2, 0).numpy().copy()
    for number, mask in zip(numbers, masks or (), strict=False):
        inside = decode_mask(mask, sample.height, sample.width)
        colour = np.array(_rgb(int(number)))
        pixels[inside] = (0.55 * pixels[inside] + 0.45 * colour).astype(np.uint8)
    picture = Image.fromarray(pixels)
    scale = min(1.0, LONGEST / max(picture.size))
    size = tuple(max(1, round(side * scale)) for side in picture.size)
    picture = picture.resize((size[0], size[1]))
    pen = ImageDraw.Draw(picture)
    for box, number, text in zip(boxes * scale, numbers, texts, strict=True):
        colour_name = COLOURS[int(number) % len(COLOURS)]
        pen.rectangle([float(value) for value in box], outline=colour_name, width=2)
        place = (float(box[0]) + 3, float(box[1]) + 2)
        pen.rectangle(pen.textbbox(place, text), fill=colour_name)
        pen.text(place, text, fill="black")
    return picture


def _side_by_side(pictures: Sequence[Image.Image], titles: Sequence[str]) -> Image.Image:
    width = sum(max(picture.width, 160) for picture in pictures) + _GAP * (len(pictures) + 1)
    height = max(picture.height for picture in pictures) + _HEAD + _GAP
    sheet = Image.new("RGB", (width, height), "white")
    pen, left = ImageDraw.Draw(sheet), _GAP
    for picture, title in zip(pictures, titles, strict=True):
        pen.text((left, 4), title, fill="black")
        sheet.paste(picture, (left, _HEAD))
        left += max(picture.width, 160) + _GAP
    return sheet


def _rgb(number: int) -> tuple[int, int, int]:
    colour = COLOURS[number % len(COLOURS)]
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
