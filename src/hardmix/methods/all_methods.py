"""The methods by their names on the command line, one line each."""

from hardmix.methods.base import Materials, Method
from hardmix.methods.moco import Moco
from hardmix.methods.supervised import Supervised
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import MethodName

METHODS: dict[MethodName, type[Method]] = {
    "moco-v1": Moco,
    "moco-v2": Moco,
    "mochi": Moco,
    "supervised": Supervised,
}
"""Every method by name; titles are in `settings.methods`."""


def build_method(config: PretrainConfig, materials: Materials) -> Method:
    """Build the method of a run, with random weights."""
    return METHODS[config.method](config, materials)
