"""The menu of methods: their names, titles, options of their own, and what they do not use.

A new method is an entry here, a class in methods/ and its line in `METHODS` there; a test holds
both tables equal. Imports no torch.
"""

from dataclasses import dataclass
from fnmatch import fnmatch

MethodName = str
"""A key of `METHOD_FACTS`."""


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Settings that only one method has; those of the method NAME are --NAME.* on the command line.

    A method without any has none of these.
    """


@dataclass(frozen=True)
class MethodFacts:
    """What is known of a method without building it."""

    title: str
    """The paper's name."""
    options: type[MethodOptions] | None = None
    """Its own settings."""
    unused: tuple[str, ...] = ()
    """Shared settings that do nothing here, as patterns: help and tables leave them out."""

    def uses(self, setting: str) -> bool:
        """Whether a shared setting, by its dotted name, means anything to the method."""
        return not any(fnmatch(setting, pattern) for pattern in self.unused)


NO_NEGATIVES = ("oracle", "mix.*", "train.queue_*", "train.exclude_same_image", "train.temperature")
"""Settings of methods that contrast nothing."""
NO_KEYS = ("model.head", "model.dim", "model.key_*")
"""Settings of methods without a second encoder and a head."""

METHOD_FACTS: dict[MethodName, MethodFacts] = {
    "moco-v1": MethodFacts("MoCo", unused=("mix.*",)),
    "moco-v2": MethodFacts("MoCo-v2", unused=("mix.*",)),
    "mochi": MethodFacts("MoCHi"),
    "supervised": MethodFacts("supervised", unused=(*NO_NEGATIVES, *NO_KEYS)),
}
"""What --method can be. "supervised" is cross-entropy with labels: the paper's upper bound."""
