"""`python -m benchmarks duplicates | unusual`: how many planted pictures `hardmix explore` finds.

    python -m benchmarks duplicates --images FOLDER [--number 2550] [--weights RUN]
    python -m benchmarks unusual --images FOLDER --foreign OTHER [--weights RUN]

`duplicates` plants ten copies of each kind among photographs and counts those that are found, the
groups of different pictures, and the groups in which the original is the one to keep. `unusual`
plants five pictures of another set, several times, and counts those among the first 24.
"""

import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from hardmix import explore
from hardmix.data.folders import find_images
from hardmix.errors import InputError

COPIES = 10
"""Copies of each kind."""
FOREIGN, ROUNDS, FIRST = 5, 4, 24
"""Foreign pictures of a round, rounds, and pictures that a person looks at."""


@dataclass(frozen=True, kw_only=True)
class Planting:
    """Count planted pictures that hardmix explore finds."""

    images: Path
    """Folder of photographs."""
    foreign: Path | None = None
    """Folder of the pictures to plant, for `unusual`."""
    number: int = 2550
    """Photographs, chosen by the seed."""
    weights: str | None = None
    """Weights by which images are compared; None means plain features."""
    seed: int = 0


def re_encoded(image: Image.Image, _: random.Random) -> Image.Image:
    """Return the picture as it is, which is saved with less quality than the others."""
    return image


def brightened(image: Image.Image, chance: random.Random) -> Image.Image:
    """Return the picture brighter by a fifth to two fifths."""
    return ImageEnhance.Brightness(image).enhance(chance.uniform(1.2, 1.4))


def cropped(image: Image.Image, _: random.Random) -> Image.Image:
    """Return the picture without a twentieth on each side."""
    width, height = image.size
    x, y = round(0.05 * width), round(0.05 * height)
    return image.crop((x, y, width - x, height - y))


def bordered(image: Image.Image, chance: random.Random) -> Image.Image:
    """Return the picture in a frame of a twentieth of its width."""
    border = round(0.05 * image.width)
    return ImageOps.expand(image, border, chance.choice(["white", "black", "darkred"]))


def with_logo(image: Image.Image, chance: random.Random) -> Image.Image:
    """Return the picture with a sign in a corner."""
    copy, (width, height) = image.copy(), image.size
    x, y = chance.choice([0.03, 0.72]) * width, chance.choice([0.03, 0.82]) * height
    draw = ImageDraw.Draw(copy)
    draw.rectangle((x, y, x + 0.25 * width, y + 0.15 * height), fill="white")
    draw.text((x + 2, y + 1), "LOGO", fill="red")
    return copy


KINDS: dict[str, Callable[[Image.Image, random.Random], Image.Image]] = {
    "re-encoded": re_encoded,
    "brightened": brightened,
    "cropped by 5 %": cropped,
    "bordered": bordered,
    "with a logo": with_logo,
}


def main(words: list[str]) -> None:
    """Run `duplicates` or `unusual`."""
    options = tyro.cli(Planting, prog=f"python -m benchmarks {words[0]}", args=words[1:])
    with tempfile.TemporaryDirectory() as folder:
        {"duplicates": duplicates, "unusual": unusual}[words[0]](options, Path(folder))


def sample(folder: Path, number: int, chance: random.Random) -> list[Path]:
    """Return images of a folder, chosen by chance."""
    files = [Path(file) for file in find_images([folder]).files]
    return chance.sample(files, min(number, len(files)))


def plant(files: list[Path], folder: Path, word: str) -> list[Path]:
    """Link files into a folder as WORD-00000.jpg and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    links = [folder / f"{word}-{n:05}{file.suffix.lower()}" for n, file in enumerate(files)]
    for link, file in zip(links, files, strict=True):
        os.symlink(file.resolve(), link)
    return links


def duplicates(options: Planting, folder: Path) -> None:
    """Plant copies; print how many of each kind are found."""
    chance = random.Random(options.seed)
    links = plant(sample(options.images, options.number, chance), folder, "photo")
    origins: dict[str, tuple[str, str]] = {}
    chosen = chance.sample(links, COPIES * len(KINDS))
    for place, link in enumerate(chosen):
        kind = list(KINDS)[place // COPIES]
        file = folder / f"copy-{place:03}.jpg"
        image = Image.open(link).convert("RGB")
        quality = [35, 50, 65] if kind == "re-encoded" else [80, 90, 97]
        KINDS[kind](image, chance).save(file, quality=chance.choice(quality))
        origins[file.name] = kind, link.name
    started, worked = time.perf_counter(), time.process_time()
    result = explore.folder(folder, options.weights)
    spent = f"{time.perf_counter() - started:.0f} s, {time.process_time() - worked:.0f} s of CPU"
    hits, kept, others = Counter[str](), Counter[str](), []
    for group in result.duplicates.groups:
        names = [Path(result.name(int(row))).name for row in (group.keep, *group.others)]
        sources = {origins.get(name, ("", name))[1] for name in names}
        if len(sources) > 1:
            others.append([str((folder / source).resolve()) for source in sources])
            continue
        for name in names:
            if name in origins:
                hits[origins[name][0]] += 1
                kept[origins[name][0]] += names[0] not in origins
    for kind in KINDS:
        print(f"{kind:16} {hits[kind]:2} of {COPIES} found, the original kept in {kept[kind]}")
    print(f"{len(others)} groups of different photographs among {len(links)}")
    for photographs in others:
        print("   ", *photographs)
    print(f"{spent}, without the page")


def unusual(options: Planting, folder: Path) -> None:
    """Plant foreign pictures; print how many are among the first and how many stand out."""
    if options.foreign is None:
        raise InputError("unusual needs --foreign, the folder of the pictures to plant.")
    shares = []
    for turn in range(ROUNDS):
        chance = random.Random(options.seed + turn)
        here = folder / str(turn)
        plant(sample(options.images, options.number, chance), here, "photo")
        plant(sample(options.foreign, FOREIGN, chance), here, "foreign")
        outliers = explore.folder(here, options.weights)
        ranked = [Path(row["name"]).name for row in outliers.table("outliers")]
        ranks = sorted(n for n, name in enumerate(ranked, 1) if name.startswith("foreign"))
        shares.append(sum(rank <= FIRST for rank in ranks))
        stand = sum(rank <= outliers.outliers.number for rank in ranks)
        print(f"ranks {ranks} of {len(ranked)}; {stand} of {FOREIGN} stand out")
        shutil.rmtree(here)
    print(f"among the first {FIRST}: {sum(shares) / ROUNDS:.1f} of {FOREIGN} on average")


if __name__ == "__main__":
    main(sys.argv[1:])
