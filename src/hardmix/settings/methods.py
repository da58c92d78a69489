"""The methods: their names, titles, own options, and the settings they do not use.

A new method is an entry here, a class in methods/ and its line in `METHODS` there; a test keeps
both tables equal. Imports no torch.
"""

from dataclasses import dataclass
from fnmatch import fnmatch

MethodName = str
"""A key of `METHOD_FACTS`."""


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Base class of the settings that only one method has; on the command line, --NAME.*."""


@dataclass(frozen=True)
class MethodFacts:
    """What is known about a method without building it."""

    title: str
    """The paper's name."""
    options: type[MethodOptions] | None = None
    """Class of its own settings, if it has any."""
    unused: tuple[str, ...] = ()
    """Patterns of shared settings that have no effect on it; help and tables omit them."""

    def uses(self, setting: str) -> bool:
        """Return whether the method uses a shared setting, given by its dotted name."""
        return not any(fnmatch(setting, pattern) for pattern in self.unused)


NO_NEGATIVES = (
    "oracle",
    "mix.*",
    "loss.*",
    "train.queue_*",
    "train.exclude_same_image",
    "train.temperature",
)
"""Settings not used by methods without negatives."""
NO_KEYS = ("model.head", "model.dim", "model.key_*")
"""Settings not used by methods without a key encoder and a head."""

METHOD_FACTS: dict[MethodName, MethodFacts] = {
    "moco-v1": MethodFacts("MoCo", unused=("mix.*",)),
    "moco-v2": MethodFacts("MoCo-v2", unused=("mix.*",)),
    "mochi": MethodFacts("MoCHi"),
    "supervised": MethodFacts("supervised", unused=(*NO_NEGATIVES, *NO_KEYS)),
}
"""The choices of --method. "supervised" is cross-entropy with labels: the paper's upper bound."""
