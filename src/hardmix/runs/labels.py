"""One label for every run: the paper's name of its method, and what distinguishes it from others.

Settings are plain values by dotted name, as recorded by any version.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hardmix.settings.methods import METHOD_FACTS
from hardmix.settings.saved import FACTS, LABELS, MAY_DIFFER, own_facts
from hardmix.settings.titles import method_title

UNSAID = ("mochi", "keep", None)
"""Values that are not shown: the paper's own mixing, and unset values."""


def method_uses(settings: Mapping[str, Any], name: str, *, unknown: bool = True) -> bool:
    """Return whether the method uses a setting; `unknown` for one this version lacks."""
    method = settings.get("method")
    facts = METHOD_FACTS.get(method) if isinstance(method, str) else None
    return unknown if facts is None else facts.uses(name)


def known_settings(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of all settings that this version knows for a run's method."""
    return FACTS.keys() | own_facts(settings.get("method")).keys()


def identity(settings: Mapping[str, Any], *, pooled: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that identify a run, without those that its method does not use.

    `pooled` settings are omitted too: runs that differ only in these are grouped.
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
    """Return a unique label for each run, the same in tables and figures.

    It consists of the method, the settings in which the run differs from others of that method,
    and its name if that is not enough. A run without known settings is labelled by its name.
    `pooled` settings are not used, so that a label can stand for several seeds.
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
    """Extend equal labels by the settings that differ: "MoCHi (256, 256, 32), K = 1024".

    Labels stay equal if the runs differ in no setting that has a label and that the method uses.
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
