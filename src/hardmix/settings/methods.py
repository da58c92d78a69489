"""The methods: their names, titles, own options, and the settings they do not use.

A new method is an entry here, a class in methods/ and its line in `METHODS` there; a test keeps
both tables equal. Imports no torch.
"""

from dataclasses import dataclass
from fnmatch import fnmatch

from hardmix.settings.method_options import (
    ByolOptions,
    CmcOptions,
    Co2Options,
    InstDisOptions,
    MethodOptions,
    PclOptions,
    PirlOptions,
    SwavOptions,
    UnmixOptions,
)

MethodName = str
"""A key of `METHOD_FACTS`."""


@dataclass(frozen=True)
class MethodFacts:
    """What is known about a method without building it."""

    title: str
    """The paper's name."""
    options: type[MethodOptions] | None = None
    """Class of its own settings, if it has any."""
    unused: tuple[str, ...] = ()
    """Patterns of shared settings that have no effect on it; help and tables omit them."""
    no_mixing: str = ""
    """Why hard negatives cannot be mixed on top of it; empty if they can."""
    whole_batch: bool = False
    """Whether its loss compares the images of a batch, which train.accumulate would divide."""

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

NO_JIGSAW = ("loss.jigsaw",)
"""Settings not used by methods other than MoCo and MoCHi."""

NO_PAIR = ("model.key_*", "train.queue_start", "train.exclude_same_image", *NO_JIGSAW)
"""Settings not used by methods without a key encoder whose keys are queued."""

METHOD_FACTS: dict[MethodName, MethodFacts] = {
    "moco-v1": MethodFacts("MoCo", unused=("mix.*",)),
    "moco-v2": MethodFacts("MoCo-v2", unused=("mix.*",)),
    "mochi": MethodFacts("MoCHi"),
    "simclr": MethodFacts("SimCLR", unused=(*NO_PAIR, "train.queue_size"), whole_batch=True),
    "unmix": MethodFacts("MoCo-v2 + Image Mixture", UnmixOptions, NO_JIGSAW),
    "co2": MethodFacts("MoCo-v2 + CO2", Co2Options, NO_JIGSAW),
    "instdis": MethodFacts("InstDis", InstDisOptions, NO_PAIR),
    "pirl": MethodFacts("PIRL", PirlOptions, NO_PAIR),
    "cmc": MethodFacts("CMC", CmcOptions, NO_PAIR),
    "pcl": MethodFacts("PCL", PclOptions, NO_JIGSAW),
    "swav": MethodFacts(
        "SwAV",
        SwavOptions,
        (
            *(each for each in NO_NEGATIVES if each != "train.temperature"),
            "model.key_*",
            "model.head",
        ),
        no_mixing="SwAV compares images with prototypes and has no negatives to mix",
        whole_batch=True,
    ),
    "byol": MethodFacts(
        "BYOL",
        ByolOptions,
        (*NO_NEGATIVES, "model.head", "model.key_bn_splits"),
        no_mixing="BYOL has no negatives to mix",
    ),
    "supervised": MethodFacts("supervised", unused=(*NO_NEGATIVES, *NO_KEYS)),
}
"""The choices of --method. "supervised" is cross-entropy with labels: the paper's upper bound."""
