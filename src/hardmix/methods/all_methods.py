"""The methods by their names on the command line, one line each."""

from hardmix.methods.base import Materials, Method
from hardmix.methods.byol import Byol
from hardmix.methods.cmc import Cmc
from hardmix.methods.co2 import Co2
from hardmix.methods.instdis import InstDis
from hardmix.methods.moco import Moco
from hardmix.methods.pcl import Pcl
from hardmix.methods.pirl import Pirl
from hardmix.methods.simclr import SimClr
from hardmix.methods.supervised import Supervised
from hardmix.methods.swav import Swav
from hardmix.methods.unmix import Unmix
from hardmix.settings.config import PretrainConfig
from hardmix.settings.methods import MethodName

METHODS: dict[MethodName, type[Method]] = {
    "moco-v1": Moco,
    "moco-v2": Moco,
    "mochi": Moco,
    "simclr": SimClr,
    "unmix": Unmix,
    "co2": Co2,
    "instdis": InstDis,
    "pirl": Pirl,
    "cmc": Cmc,
    "pcl": Pcl,
    "swav": Swav,
    "byol": Byol,
    "supervised": Supervised,
}
"""Every method by name; titles are in `settings.methods`."""


def build_method(config: PretrainConfig, materials: Materials) -> Method:
    """Build the method of a run, with random weights."""
    return METHODS[config.method](config, materials)
