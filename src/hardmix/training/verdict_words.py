"""The verdict in words: one sentence, and what to do next."""

import shlex
from typing import NamedTuple

from torch import Tensor

from hardmix.evaluation.comparison import Scores
from hardmix.runs.folder import Run
from hardmix.settings.config import PretrainConfig

NAMES = {
    "start": "the weights it started from",
    "untrained": "the untrained network",
    "pixels": "raw pixels",
    "colours": "a colour histogram",
}
"""What a sentence calls the encoders that the trained one is compared with."""
FEW = 5000
"""Images below which pre-trained weights are the first thing to try."""


class Compared(NamedTuple):
    """The encoder's lead over another one."""

    difference: float
    """Mean over the images of its score minus the other's."""
    error: float
    """Standard error of that mean."""
    better: bool
    """Whether the lead is beyond the noise: more than two standard errors."""
    worse: bool

    def as_json(self) -> dict[str, float | bool]:
        """Return the numbers by name."""
        return dict(self._asdict())


def tell(scores: Scores, compared: dict[str, Compared], *, labelled: bool, keep: str) -> str:
    """Return the verdict as one sentence, and a second one if the encoder was not kept."""
    number = len(scores.each["encoder"])
    own = f"{_percent(scores.each['encoder'])} ± {_error(scores.each['encoder'])}"
    if labelled:
        what = f"the {scores.k} nearest neighbours give the right class for {own} of"
        what += f" {number:,} images"
    else:
        what = f"two views of an image agree on {own} of its {scores.k} nearest neighbours"
        what += f" ({number:,} images)"
    ranked = sorted(compared, key=lambda name: compared[name].difference)
    others = ", ".join(f"{NAMES[name]} {_percent(scores.each[name])}" for name in ranked)
    text = f"{_judgement(compared)}: {what}; {others}."
    if keep == "start":
        text += (
            " Training made the weights it started from worse, so these are kept:"
            " encoder.safetensors holds them, encoder-trained.safetensors the trained ones."
        )
    return text


def _judgement(compared: dict[str, Compared]) -> str:
    worse = [NAMES[name] for name, each in compared.items() if each.worse]
    even = [NAMES[n] for n, each in compared.items() if not each.worse and not each.better]
    if not worse and not even:
        return "The encoder is better than everything it was compared with"
    said = [f"worse than {_listed(worse)}"] if worse else []
    said += [f"not clearly better than {_listed(even)}"] if even else []
    return f"The encoder is {' and '.join(said)}"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _percent(scores: Tensor) -> str:
    return f"{float(scores.mean()):.1%}"


def _error(scores: Tensor) -> str:
    """Two standard errors."""
    return f"{2 * float(scores.std()) / len(scores) ** 0.5:.1%}" if len(scores) > 1 else "100%"


def advise(
    config: PretrainConfig, compared: dict[str, Compared], images: int, run: Run
) -> list[str]:
    """Return what to try, the likeliest cure first."""
    advice = []
    if config.uses("train.queue_size") and 5 * config.train.queue_size > images:
        advice.append(
            f"a smaller queue: it holds {config.train.queue_size} keys for {images} images;"
            f" --train.queue-size {max(1, images // 5)}"
        )
    colours, data = compared["colours"], config.data
    if not colours.better and data.augmentation != "plain" and data.colour_strength > 0:
        weaker = f"{data.colour_strength / 2:.2g}" if data.colour_strength > 0.3 else "0"
        advice.append(
            "weaker colour changes, because colour tells these images apart:"
            f" --data.colour-strength {weaker}"
        )
    weights = (
        "start from pre-trained weights: --model.init timm with --model.backbone timm:NAME, or"
        " --model.init FILE"
    )
    longer = (
        f"train longer: hardmix pretrain --out {shlex.quote(str(run.path))} --resume"
        f" --train.epochs {2 * config.train.last_epoch}"
    )
    if config.model.init is not None:
        lower = f"{config.trunk_lr / 10:g}"
        advice.append(f"a lower learning rate of the trunk: --optimizer.trunk-lr {lower}")
        return [*advice, longer]
    return [*advice, *([weights, longer] if images < FEW else [longer, weights])]
