"""A folder for the Hugging Face Hub: config, preprocessing, and a model card filled from the run.

The card says what is known and no more: numbers come from the run's files, and nothing in it names
a path of this machine. Its author reads it before it is uploaded.
"""

import json
import math
from collections.abc import Iterator
from typing import Any, TypeGuard

from hardmix import __version__
from hardmix.data.colours import channel_statistics
from hardmix.data.crops import resized_side
from hardmix.evaluation.hub import CARD, CONFIG, PREPROCESSING
from hardmix.evaluation.trained_encoder import TrainedEncoder
from hardmix.runs.reading import RunRecord, number
from hardmix.runs.summary import (
    ResultNumber,
    data_of,
    describe_protocol,
    num_images_of,
    numbers_of,
    stale_results,
    verdict_of,
)
from hardmix.settings.methods import method_title

PAPER = """@inproceedings{kalantidis2020hard,
  title     = {Hard Negative Mixing for Contrastive Learning},
  author    = {Kalantidis, Yannis and Sariyildiz, Mert Bulent and Pion, Noe and
               Weinzaepfel, Philippe and Larlus, Diane},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {33},
  year      = {2020}
}"""
NORMAL = 1.96
"""Standard deviations on each side of a 95 % interval."""
RECIPE = {
    "recipe": "recipe",
    "data.image_size": "image size",
    "data.augmentation": "augmentation",
    "train.epochs": "epochs",
    "train.batch_size": "batch size",
    "train.queue_size": "queue",
    "train.temperature": "temperature",
    "optimizer.name": "optimizer",
    "optimizer.lr": "learning rate",
    "model.head": "head (not included)",
    "train.seed": "seed",
}
"""Settings that the card lists, and their names there."""

TimmModel = tuple[str, dict[str, Any]]
"""timm's name of a network, and the options to create it with."""


def hub_files(
    encoder: TrainedEncoder, record: RunRecord | None, timm_model: TimmModel | None, licence: str
) -> dict[str, bytes]:
    """Return the files beside the weights; `record` is None for an encoder without its run."""
    config: dict[str, Any] = {
        "hardmix": {
            "version": __version__,
            "backbone": encoder.backbone,
            "channels": encoder.channels,
            "image_size": encoder.image_size,
        }
    }
    if timm_model is not None:
        config |= _for_timm(encoder, timm_model)
    files = {CONFIG: config, PREPROCESSING: _preprocessing(encoder)}
    texts = {name: json.dumps(value, indent=2) + "\n" for name, value in files.items()}
    texts[CARD] = model_card(encoder, record, timm_model, licence)
    return {name: text.encode() for name, text in texts.items()}


def _for_timm(encoder: TrainedEncoder, timm_model: TimmModel) -> dict[str, Any]:
    """Return what `timm.create_model("local-dir:DIR", pretrained=True)` reads."""
    name, options = timm_model
    size, (mean, std) = encoder.image_size, channel_statistics(encoder.channels)
    return {
        "architecture": name,
        "num_classes": 0,
        "model_args": {key: value for key, value in options.items() if key != "num_classes"},
        "pretrained_cfg": {
            "input_size": [encoder.channels, size, size],
            "interpolation": "bilinear",
            "crop_pct": size / (resized_side(size) + 0.25),  # timm rounds size / crop_pct down
            "crop_mode": "center",
            "mean": list(mean),
            "std": list(std),
            "num_classes": 0,
        },
    }


def _preprocessing(encoder: TrainedEncoder) -> dict[str, Any]:
    """Return the evaluation crop as transformers' image processors describe it."""
    size, (mean, std) = encoder.image_size, channel_statistics(encoder.channels)
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": encoder.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": resized_side(size)},
        "resample": 2,
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }


# The model card


def model_card(
    encoder: TrainedEncoder, record: RunRecord | None, timm_model: TimmModel | None, licence: str
) -> str:
    """Return README.md: the Hub's front matter, and sections on use, training and limits."""
    title = "An encoder" if not _is_trained(record) else _cell(method_title(record.settings))
    sections = [
        "\n".join(_front_matter(record, timm_model, licence)),
        f"# {title}: {encoder.backbone}",
        _about(encoder, record),
        "## Use\n\n" + _use(encoder, timm_model),
        "## Training\n\n" + "\n".join(_training(record)),
        "## Evaluation\n\n" + "\n".join(_evaluation(record)),
        "## Limits\n\n" + "\n".join(f"- {each}" for each in _limits(encoder, record)),
        "## Licence\n\n" + (f"{licence}." if licence else NO_LICENCE),
        f"## Citation\n\n{_citation(record)}",
    ]
    return "\n\n".join(sections) + "\n"


NO_LICENCE = (
    "None is stated yet. The weights' author chooses one that the licence of the training images"
    " allows, here and as `license:` at the top of this file."
)


def _front_matter(
    record: RunRecord | None, timm_model: TimmModel | None, licence: str
) -> Iterator[str]:
    yield from ("---", "library_name: hardmix", "pipeline_tag: image-feature-extraction")
    if licence:
        yield f"license: {json.dumps(licence)}"
    method = str(record.settings.get("method", "")) if _is_trained(record) else ""
    tags = ["hardmix", "contrastive-learning", "self-supervised-learning", method]
    tags += [] if timm_model is None else ["timm"]
    yield "tags:"
    yield from (f"- {json.dumps(tag)}" for tag in tags if tag)
    yield "---"


def _about(encoder: TrainedEncoder, record: RunRecord | None) -> str:
    size = f"{encoder.channels} x {encoder.image_size} x {encoder.image_size}"
    data = _data(record) if _is_trained(record) else ""
    trained = f" It was trained on {data} with hardmix {__version__}." if data else ""
    return (
        f"It turns images ({size}) into features, to compare, search, cluster or classify them. It"
        f" has no classifier.{trained} hardmix is an independent implementation of hard negative"
        " mixing (MoCHi, NeurIPS 2020) and related methods."
    )


def _is_trained(record: RunRecord | None) -> TypeGuard[RunRecord]:
    """Return whether the run is known, and not one of imported weights."""
    return record is not None and record.settings.get("recipe") != "imported"


def _data(record: RunRecord) -> str:
    count = num_images_of(record)
    images = "images" if count is None else f"{count:,} images"
    name = " ".join(data_of(record).split()).replace("`", "'")
    return f"{images} of `{name}`" if name else ""


def _use(encoder: TrainedEncoder, timm_model: TimmModel | None) -> str:
    text = """```python
import hardmix  # pip install 'hardmix[hf]'

encoder = hardmix.load_encoder("hf:OWNER/NAME")  # or the path of this folder
features = encoder(encoder.preprocess("photo.jpg")[None])
```
"""
    if timm_model is None:
        why = f"`{encoder.backbone}` is hardmix's own network, or yours"
        return f"{text}\ntimm cannot load it ({why}): use hardmix as above."
    return f"""{text}
or with timm, without hardmix:

```python
import timm

model = timm.create_model("hf-hub:OWNER/NAME", pretrained=True)  # or "local-dir:PATH"
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```"""


def _training(record: RunRecord | None) -> Iterator[str]:
    if record is None:
        yield "The run is not at hand: this encoder was exported from its file alone."
        return
    if not _is_trained(record):
        yield "These weights were imported into hardmix, which did not train them."
        return
    yield from ("| setting | value |", "|---|---|")
    yield f"| method | {_cell(method_title(record.settings))} |"
    yield f"| data | {_cell(_data(record) or 'not recorded')} |"
    for name, title in RECIPE.items():
        if record.settings.get(name) is not None:
            yield f"| {title} | {_cell(record.settings[name])} |"
    versions = record.results.get("pretrain", {}).get("versions")
    if isinstance(versions, dict):
        yield f"| versions | {_cell(', '.join(f'{k} {v}' for k, v in versions.items()))} |"


def _cell(value: object) -> str:
    """Return a value as one cell of a table, without markup of its own."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def _evaluation(record: RunRecord | None) -> Iterator[str]:
    """Yield the verdict, and a table of every evaluation of the run."""
    results = {} if record is None else record.results
    verdict = verdict_of(results.get("verdict"))
    if verdict is not None:
        yield f"At the end of training: {_cell(verdict.text)}\n"
    stale = set() if record is None else {each.name for each in stale_results(record)}
    found = [
        each
        for name, result in results.items()
        if name not in stale
        for each in numbers_of(name, result)
    ]
    if not found:
        yield "No evaluation was run."
        return
    yield from ("| evaluation | result | 95 % interval | protocol |", "|---|---|---|---|")
    for each in found:
        cells = [each.title, f"{100 * each.value:.1f} % {each.metric}"]
        cells += [interval_of(each), describe_protocol(each.result)]
        yield f"| {' | '.join(map(_cell, cells))} |"
    yield "\nIntervals are those of the test images alone (Wilson's); other seeds differ by more."


def interval_of(result: ResultNumber) -> str:
    """Return Wilson's interval of an accuracy over a recorded number of test images."""
    images = number(result.result.get("test"))
    if result.metric != "Top-1" or images is None or images < 1:
        return "not known"
    low, high = wilson(result.value, images)
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return the 95 % interval of a share of `count` trials (Wilson 1927)."""
    square = NORMAL**2 / count
    middle = (share + square / 2) / (1 + square)
    half = NORMAL * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return middle - half, middle + half


def _limits(encoder: TrainedEncoder, record: RunRecord | None) -> Iterator[str]:
    verdict = None if record is None else verdict_of(record.results.get("verdict"))
    if verdict is not None and verdict.better is False:
        yield "It is **not** clearly better than everything it was compared with: see the verdict."
    if record is not None and record.settings.get("data.name") == "shapes":
        yield "Its images are generated shapes: it is a demonstration, useless for photographs."
    yield (
        "Its features describe images like those it was trained on; on others they may be worse"
        " than a colour histogram. Evaluate it on your own images before you rely on it."
    )
    yield (
        f"Images must be preprocessed as in {PREPROCESSING}: {encoder.image_size} pixels a side,"
        f" {encoder.channels} channels, normalised."
    )
    yield (
        "Whatever the training images over-represent, leave out or misrepresent is in the features"
        " too. It was not checked for that."
    )


def _citation(record: RunRecord | None) -> str:
    mixes = _is_trained(record) and "MoCHi" in method_title(record.settings)
    why = "the method" if mixes else "the paper that hardmix implements"
    return f"Please cite {why}, and hardmix as the software:\n\n```bibtex\n{PAPER}\n```"
