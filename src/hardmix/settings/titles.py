"""Titles of methods and evaluations. Imports no torch: tables, pages and help need them."""

from collections.abc import Mapping
from typing import Any

from hardmix.settings.methods import METHOD_FACTS

STEPS_TO_V2 = {
    "cosine": ("optimizer.schedule", "cosine"),
    "MLP": ("model.head", "mlp"),
    "augmentation": ("data.augmentation", "moco-v2"),
}
"""What MoCo-v2 adds to MoCo (App. B.1): setting and value."""

COUNTS = ("mix.num_hardest", "mix.num_pairs", "mix.num_with_query")
"""N, s, s'."""

EVALUATION_TITLES = {
    "linear": "Linear evaluation",
    "linear-cached": "Linear probe",
    "knn": "k-NN",
    "transfer": "Linear probe on other images",
    "finetune": "Fine-tuned",
    "detection": "Detection",
    "embedding": "Embedding space",
    "queue": "Queue",
}
"""Kinds of results in RUN/results: the paper's own first, then others with an accuracy, then the
rest. A file's name begins with its kind; a suffix distinguishes it: finetune-0.1.json."""

NO_TOP1 = ("finetune", "detection", "embedding", "queue")
"""Kinds without a single accuracy per run: several files, average precisions, losses."""


def accuracy_titles() -> dict[str, str]:
    """Return the kinds with a single accuracy per run, and their titles in columns and axes."""
    known = {name: title for name, title in EVALUATION_TITLES.items() if name not in NO_TOP1}
    return {name: f"{title} top-1" for name, title in known.items()}


def evaluation_kind(name: str) -> str:
    """Return the key of `EVALUATION_TITLES` that a result's name belongs to, or the name."""
    fitting = [kind for kind in EVALUATION_TITLES if name == kind or name.startswith(f"{kind}-")]
    return max(fitting, key=len, default=name)


def evaluation_title(name: str) -> str:
    """Return the title of a result file, given its name."""
    kind = evaluation_kind(name)
    title = EVALUATION_TITLES.get(kind, name)
    share, _, start = name.removeprefix("finetune-").partition("-")
    if kind == "finetune" and share.replace(".", "", 1).isdigit():
        title = f"{title} on {float(share):.4g} of the labels"
        title += ", from random weights" if start == "untrained" else ""
    return title


def method_title(settings: Mapping[str, Any]) -> str:
    """Return the paper's name for a run: MoCHi (N, s, s'), MoCo + MLP, MoCo-v2 oracle.

    `settings` are given by dotted name; those that older versions do not record are shown as "?".
    """
    method = settings.get("method", "unknown method")
    if not isinstance(method, str) or method not in METHOD_FACTS:
        return str(method)
    facts = METHOD_FACTS[method]
    title = facts.title
    points = [settings.get(name, "?") for name in COUNTS[1:]]
    if facts.uses("mix.num_pairs") and (method == "mochi" or any(points)):
        title += "" if method == "mochi" else " + MoCHi"
        title += f" ({', '.join(str(settings.get(name, '?')) for name in COUNTS)})"
        strategy = settings.get("mix.strategy", "mochi")
        title += "" if strategy == "mochi" else f" {strategy}"
    if method in ("moco-v1", "moco-v2", "mochi"):
        title += _steps(method, settings)
    if method == "cmc" and settings.get("cmc.unmix") is True:
        title += " + iMix"
    if settings.get("data.augmentation") == "infomin":
        title += " with InfoMin Aug."
    if facts.uses("loss.jigsaw") and settings.get("loss.jigsaw"):
        title += " + jigsaw"
    if facts.uses("loss.denominator"):
        title += _family(settings)
    return f"{title} oracle" if settings.get("oracle") is True else title


def _family(settings: Mapping[str, Any]) -> str:
    """Return what the loss has of later papers: " + hcl weights + debiased"."""
    weights, denominator, chosen = (
        settings.get(f"loss.{name}", "none") for name in ("weights", "denominator", "filter")
    )
    added = "" if weights == "none" else f" + {weights} weights"
    added += "" if denominator in ("none", "infonce") else f" + {denominator}"
    return added if chosen == "none" else f"{added} + {chosen} filter"


def _steps(method: str, settings: Mapping[str, Any]) -> str:
    """Return what the settings add to MoCo, or lack of MoCo-v2."""
    there = {
        step: settings.get(name, value) in (value, "infomin")
        for step, (name, value) in STEPS_TO_V2.items()
    }
    if method != "moco-v1":
        views = "" if there.pop("augmentation") else f" with {settings['data.augmentation']} views"
        return "".join(f" without {step}" for step, found in there.items() if not found) + views
    if all(there.values()):
        return "-v2"
    return "".join(f" + {step}" for step, found in there.items() if found)
