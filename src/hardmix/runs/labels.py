"""Names for runs side by side: as short as tells them apart, in the paper's words."""

from collections.abc import Mapping, Sequence
from typing import Any

from hardmix.settings.config import PretrainConfig

WORDS = {
    "data.name": "{}",
    "data.image_size": "{} px",
    "model.backbone": "{}",
    "train.queue_size": "K = {}",
    "train.temperature": "tau = {}",
    "train.epochs": "{} epochs",
    "train.batch_size": "batches of {}",
    "optimizer.lr": "learning rate {}",
    "mix.strategy": "{}",
    "mix.real_negatives": "real negatives {}",
    "mix.sampling_temperature": "tau' = {}",
    "train.seed": "seed {}",
}
"""What people compare, in the order in which it is written; any other difference, by the folder."""
PLAIN = ("mochi", "keep")
"""The paper's own mixing, which goes without saying."""


def method_name(config: PretrainConfig) -> str:
    """The paper's name: between MoCo and MoCo-v2 with what was added (App. B.1)."""
    if config.method == "supervised":
        return "supervised"
    parts = {
        "cosine": config.optimizer.schedule == "cosine",
        "MLP": config.model.head == "mlp",
        "augmentation": config.data.augmentation == "moco-v2",
    }
    if config.method == "moco-v1" and not all(parts.values()):
        name = "MoCo" + "".join(f" + {part}" for part, there in parts.items() if there)
    else:
        name = "MoCo-v2"
        if config.method == "mochi":
            mix = config.mix
            name = f"MoCHi ({mix.num_hardest}, {mix.num_pairs}, {mix.num_with_query})"
            name += f" {mix.strategy}" if mix.strategy != "mochi" else ""
        name += "".join(f" without {part}" for part, there in parts.items() if not there)
    return name + (" oracle" if config.oracle else "")


def tell_apart(labels: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Equal labels with the settings in which their runs differ: "MoCHi (256, 256, 32), K = 1024".

    `settings` by their dotted names. Runs that differ in nothing of `WORDS` keep equal labels;
    settings of mixing count for MoCHi alone.
    """
    told = []
    for label, own in zip(labels, settings, strict=True):
        same = [each for other, each in zip(labels, settings, strict=True) if other == label]
        parts = [
            words.format(own[name])
            for name, words in WORDS.items()
            if name in own
            and own[name] not in PLAIN
            and (own.get("method") == "mochi" or not name.startswith("mix."))
            and any(each.get(name) != own[name] for each in same)
        ]
        told.append(", ".join([label, *parts]))
    return told
