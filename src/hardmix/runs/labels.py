"""One label for every run: the paper's name of what it trained, and what tells it from its like.

Settings are plain values by their dotted names, as recorded: they may be of any version.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hardmix.settings.methods import METHOD_FACTS
from hardmix.settings.saved import FACTS, LABELS, MAY_DIFFER, own_facts
from hardmix.settings.titles import method_title

UNSAID = ("mochi", "keep", None)
"""The paper's own mixing, which goes without saying, and what was left unset."""


def method_uses(settings: Mapping[str, Any], name: str, *, unknown: bool = True) -> bool:
    """Whether a setting means anything to the method; `unknown` for one this version lacks."""
    method = settings.get("method")
    facts = METHOD_FACTS.get(method) if isinstance(method, str) else None
    return unknown if facts is None else facts.uses(name)


def known_settings(settings: Mapping[str, Any]) -> set[str]:
    """Names of all that this version knows of a run of this method."""
    return FACTS.keys() | own_facts(settings.get("method")).keys()


def identity(settings: Mapping[str, Any], *, pooled: Collection[str] = ()) -> dict[str, Any]:
    """The settings that make a run what it is; without those its method does not use.

    `pooled` are left out too: runs that differ in them alone are taken together.
    """
    own = own_facts(settings.get("method"))
    free = {name for name, facts in own.items() if not facts.identity}
    return {
        name: value
        for name, value in settings.items()
        if name not in MAY_DIFFER
        and name not in free
        and name not in pooled
        and method_uses(settings, name)
    }


def label_runs(
    settings: Sequence[Mapping[str, Any]], names: Sequence[str], *, pooled: Collection[str] = ()
) -> list[str]:
    """The label of each run, in tables and figures alike; no two are equal.

    The method, then the settings in which it differs from runs of the same method, then, where
    that is not enough, its name. A run of which no setting is known has its name alone. `pooled`
    settings tell nothing apart: a label of several seeds is without them.
    """
    known = [{k: v for k, v in each.items() if k not in pooled} for each in settings]
    titles = [method_title(each) if each else name for each, name in zip(known, names, strict=True)]
    labels = tell_apart(titles, known)
    count = Counter(labels)
    return [
        f"{label}, {name}" if count[label] > 1 else label
        for label, name in zip(labels, names, strict=True)
    ]


def tell_apart(labels: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Equal labels with the settings in which their runs differ: "MoCHi (256, 256, 32), K = 1024".

    Runs that differ in nothing that has a label keep equal ones; a setting that the method does
    not use tells nothing.
    """
    told = []
    for label, own in zip(labels, settings, strict=True):
        same = [each for other, each in zip(labels, settings, strict=True) if other == label]
        of_method = own_facts(own.get("method"))
        words = LABELS | {k: facts.label for k, facts in of_method.items() if facts.label}
        parts = [
            text.format(own[name])
            for name, text in words.items()
            if name in own
            and own[name] not in UNSAID
            and any(each.get(name) != own[name] for each in same)
            and method_uses(own, name)
        ]
        told.append(", ".join([label, *parts]))
    return told
