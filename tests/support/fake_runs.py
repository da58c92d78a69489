"""Run folders written by hand: every number in them is known."""

import base64
import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

from PIL import Image

from hardmix.settings.recipes import RECIPES

VERSIONS = {"python": "3.11.0", "hardmix": "0.1.0", "torch": "2.15.0"}
STEPS = 10
"""Steps of an epoch."""

ACTIVE_SVG = [
    "<script>alert(1)</script>",
    "<style>* { display: none }</style>",
    "<foreignObject><body xmlns='http://www.w3.org/1999/xhtml' onload='x'/></foreignObject>",
    "<a href='javascript:alert(1)'><text>x</text></a>",
    "<use href='https://evil.example/x.svg#a'/>",
    "<image href='https://evil.example/x.png'/>",
    "<image href='data:image/svg+xml;base64,PHN2Zz4='/>",
    "<rect onclick='alert(1)' width='1'/>",
    "<rect style='fill: url(https://evil.example/#a)'/>",
    "<rect fill='url(https://evil.example/#a)'/>",
    "<rect style='background: red; behavior: url(#x)'/>",
    "<animate attributeName='href' to='javascript:alert(1)'/>",
    "<set attributeName='onload' to='alert(1)'/>",
    "<text>&lt;script&gt;</text>",
]
"""Contents of an SVG that would act or fetch if they were markup of the page."""


def config_of(method: str = "mochi", seed: int = 0, recipe: str = "demo", **changes: Any) -> dict:
    """Return a saved config; changes have two underscores for the dot: train__epochs=3."""
    config = json.loads(json.dumps(dataclasses.asdict(RECIPES[recipe].build(method, False))))
    config["train"]["seed"] = seed
    for name, value in changes.items():
        group, _, setting = name.partition("__")
        if setting:
            config[group][setting] = value
        else:
            config[group] = value
    return config


def metrics_of(
    epochs: int, labelled: bool = True, offset: float = 0.0, lines: int = 2
) -> list[dict]:
    """Return metrics with `lines` lines per epoch; the loss falls from 8, k-NN rises."""
    found = []
    for number in range(1, epochs * lines + 1):
        step = number * STEPS // lines
        done = number / lines / epochs
        line = {
            "step": step,
            "epoch": (step - 1) // STEPS,
            "loss": 8 - 2 * done + offset,
            "lr": 0.06 * (1 + math.cos(math.pi * done)),
            "proxy_accuracy": 0.5 * done,
            "proxy_accuracy_mixed": 0.3 * done,
            "positive_similarity": 0.5 + 0.4 * done,
            "hardest_similarity": 0.9 - 0.2 * done,
            "spread": 0.5,
            "synthetic_one_false": float("nan") if done < 0.2 else 0.15,
            "images_per_second": 1000.0 + number,
        }
        if labelled:
            line["false_negatives_top"] = 0.1 * done
        found.append(line)
        if labelled and step % STEPS == 0:
            found.append(
                {"step": step, "epoch": line["epoch"], "knn": 0.2 + 0.5 * done + offset / 10}
            )
    return found


def result_of(config: dict, top1: float, **more: Any) -> dict:
    """Return a result as Run.write_result writes it."""
    return {
        "top1": top1,
        "top5": min(1.0, top1 + 0.2),
        "data": "shapes",
        **more,
        "command": "hardmix knn 'my run'",
        "written": "2026-01-02T03:04:05+00:00",
        "versions": VERSIONS,
        "run": config,
    }


def write_run(
    path: Path,
    config: dict,
    metrics: list[dict] | None = None,
    results: dict[str, dict] | None = None,
) -> Path:
    """Write the folder of a run that has ended."""
    (path / "results").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    if metrics is not None:
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    ended = {"seconds": 100.0, "steps": 60, "seed": 0, "versions": VERSIONS, "run": config}
    for name, result in {"pretrain": ended, **(results or {})}.items():
        (path / "results" / f"{name}.json").write_text(json.dumps(result))
    return path


def picture(shade: int, size: int = 8) -> str:
    """Return a grey square as a data URI."""
    out = io.BytesIO()
    Image.new("RGB", (size, size), (shade % 256, 90, 120)).save(out, "WEBP")
    return "data:image/webp;base64," + base64.b64encode(out.getvalue()).decode()


def gallery_of(labels: list[str], queries: int = 2, caption: str = "How to read it.") -> dict:
    """Return figures/gallery.json; the second negative of each query is false."""

    def neighbour(number: int, false: bool) -> dict:
        return {
            "id": number,
            "image": picture(40 * number),
            "label": labels[number % len(labels)],
            "similarity": 0.9 - number / 100,
            "false": false,
        }

    found = []
    for number in range(queries):
        pair = {
            "kind": "pair",
            "similarity": 0.95,
            "share": 0.25,
            "parents": [neighbour(1, False), neighbour(2, True)],
        }
        with_query = {
            "kind": "query",
            "similarity": 0.97,
            "share": 0.4,
            "parents": [neighbour(3, True)],
        }
        found.append(
            {
                "id": number,
                "name": f"{number}.png",
                "image": picture(number),
                "label": labels[number % len(labels)],
                "hardest": [neighbour(each, each == 1) for each in range(4)],
                "synthetic": [pair, with_query],
            }
        )
    return {"title": "Gallery", "caption": caption, "numbers": {"queries": found}}


def neighbours_of(names: list[str], queries: int = 2, caption: str = "How to read it.") -> dict:
    """Return figures/neighbours.json; the images have files, and no labels."""

    def image(number: int) -> dict:
        name = f"/photos/{names[number % len(names)]}"
        return {
            "id": number,
            "name": name,
            "file": name,
            "image": picture(9 * number, 128),
            "label": None,
        }

    rows = [
        image(number)
        | {"near": [image(each) | {"similarity": 0.8 - each / 10} for each in range(4)]}
        for number in range(queries)
    ]
    return {"title": "Neighbours", "caption": caption, "numbers": {"queries": rows}}


def verdict_of(better: bool = False, **more: Any) -> dict:
    """Return results/verdict.json of a run that started from weights."""
    scores = {"encoder": 0.625, "start": 0.75, "untrained": 0.25, "pixels": 0.3, "colours": 0.5}
    return {
        "text": "The encoder is worse than the weights it started from.",
        "better": better,
        "next": ["a lower learning rate of the trunk", "train longer"],
        "measure": "knn",
        "scores": {name: {"score": value, "error": 0.01} for name, value in scores.items()},
        "images": 1000,
        "k": 20,
        "chance": 0.1,
        **more,
    }


def map_of(labels: list[str], number: int = 60) -> dict:
    """Return figures/embedding-map.json: a spiral, each third point with an image."""
    turns = [each / 5 for each in range(number)]
    return {
        "title": "Map",
        "caption": "A spiral.",
        "numbers": {
            "x": [turn * math.cos(turn) for turn in turns],
            "y": [turn * math.sin(turn) for turn in turns],
            "label": [each % len(labels) for each in range(number)],
            "classes": labels,
            "thumbnails": [
                {
                    "point": each,
                    "image": picture(each),
                    "name": f"{each}.png",
                    "file": f"/photos/{each}.png",
                }
                for each in range(0, number, 3)
            ],
        },
    }


def write_figures(run: Path, files: dict[str, Any]) -> None:
    """Write RUN/figures: text as it is, everything else as JSON."""
    (run / "figures").mkdir(exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (run / "figures" / name).write_text(text)
