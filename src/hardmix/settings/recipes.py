"""One function per recipe: what it is, its place and result in the paper, what it costs.

A recipe returns a complete config for a method; every setting can be overridden.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from hardmix.settings.config import DataConfig, ModelConfig, PretrainConfig, TrainConfig
from hardmix.settings.fitting_rules import CHOSEN
from hardmix.settings.loss_options import MixConfig
from hardmix.settings.methods import MethodName
from hardmix.settings.optimizer_options import OptimizerConfig
from hardmix.settings.presets import PRESETS


def imagenet100(method: MethodName = "mochi", oracle: bool = False) -> PretrainConfig:
    """ImageNet-100 as in Table 1: ResNet-50, 200 epochs, batch 128, queue of 16384.

    The paper's 100 classes are taken from an ImageNet folder. The paper does not name the backbone
    of these runs; ResNet-50 is official MoCo's.
    """
    data = DataConfig(name="imagenet100")
    return _with_method(PretrainConfig(recipe="imagenet100", oracle=oracle, data=data), method)


def imagenet1k(method: MethodName = "mochi", oracle: bool = False) -> PretrainConfig:
    """ImageNet-1k as in Table 2: ResNet-50, 200 epochs, batch 256, queue of 65536."""
    config = PretrainConfig(
        recipe="imagenet1k",
        oracle=oracle,
        data=DataConfig(name="imagenet"),
        mix=MixConfig(num_hardest=512, num_pairs=1024, num_with_query=512, warm_up_epochs=15),
        train=TrainConfig(batch_size=256, queue_size=65536),
    )
    return _with_method(config, method)


def cifar10(method: MethodName = "mochi", oracle: bool = False) -> PretrainConfig:
    """CIFAR-10 on a laptop's CPU with the `small` backbone.

    Not in the paper. N/K, s/K and the fraction of epochs without mixing are close to those of its
    ImageNet-100 runs; the key encoder's momentum is lower because the run is short.
    """
    config = PretrainConfig(
        recipe="cifar10",
        oracle=oracle,
        data=DataConfig(name="cifar10", image_size=32, blur=False),
        model=ModelConfig(backbone="small", key_momentum=0.99),
        mix=MixConfig(num_hardest=256, num_pairs=256, num_with_query=32, warm_up_epochs=3),
        optimizer=OptimizerConfig(lr=0.06, weight_decay=5e-4),
        train=TrainConfig(epochs=60, batch_size=128, queue_size=4096, temperature=0.1, knn_every=5),
    )
    return _with_method(config, method)


def demo(method: MethodName = "mochi", oracle: bool = False) -> PretrainConfig:
    """The built-in shapes on a laptop's CPU, to try hardmix out."""
    config = PretrainConfig(
        recipe="demo",
        oracle=oracle,
        data=DataConfig(name="shapes", image_size=32, blur=False),
        model=ModelConfig(backbone="small", key_momentum=0.99),
        mix=MixConfig(num_hardest=128, num_pairs=128, num_with_query=16, warm_up_epochs=2),
        optimizer=OptimizerConfig(lr=0.12, weight_decay=5e-4),
        train=TrainConfig(epochs=16, batch_size=128, queue_size=2048, log_every=20, knn_every=5),
    )
    return _with_method(config, method)


def photos(method: MethodName = "mochi", oracle: bool = False) -> PretrainConfig:
    """Your own images: looks at the folder and chooses what fits it and a time budget.

    Not in the paper, except for N/K, s/K and s'/K. Settings in `choose` are chosen when the run
    starts; here they have values that go with any that a user gives.
    """
    config = PretrainConfig(
        recipe="photos",
        oracle=oracle,
        data=DataConfig(image_size=32, blur=False),
        model=ModelConfig(backbone="small", key_momentum=0.99),
        mix=MixConfig(num_hardest=2, num_pairs=2, num_with_query=1, warm_up_epochs=12),
        optimizer=OptimizerConfig(lr=0.06, weight_decay=5e-4),
        train=TrainConfig(
            epochs=100,
            batch_size=64,
            queue_size=512,
            temperature=0.1,
            exclude_same_image=True,
            log_every=20,
            knn_every=30,
        ),
        choose=CHOSEN,
    )
    return _with_method(config, method)


@dataclass(frozen=True)
class Entry:
    """A recipe and what `hardmix recipes` prints about it."""

    build: Callable[[MethodName, bool], PretrainConfig]
    place: str
    expected: str
    cost: str


RECIPES: dict[str, Entry] = {
    "imagenet100": Entry(
        imagenet100,
        "Table 1, App. C.1",
        "linear top-1: MoCo 74.0, MoCo-v2 78.0, MoCHi 79.0, oracles 81.8 and 82.5, supervised 86.2",
        "days on 4 GPUs",
    ),
    "imagenet1k": Entry(
        imagenet1k,
        "Table 2, App. C.1",
        "linear top-1: MoCo-v2 67.9, MoCHi 67.6 (its gains are in transfer: VOC AP50 82.5, 82.7)",
        "6-7 days on 4 V100s",
    ),
    "cifar10": Entry(
        cifar10,
        "not in the paper",
        "k-NN: raw pixels 41.5, MoCo-v2 61.7, MoCHi 61.2 (one seed, docs/results.md)",
        "35 minutes on 2 CPU cores",
    ),
    "photos": Entry(
        photos,
        "not in the paper",
        "better neighbours than a colour histogram; says so if not (docs/own-images.md)",
        "10 minutes, or --minutes",
    ),
    "demo": Entry(
        demo,
        "not in the paper",
        "k-NN after 16 epochs: raw pixels 12.7, MoCo-v2 72.4, MoCHi 74.3 (docs/results.md)",
        "2 minutes on 2 CPU cores",
    ),
}


def _with_method(config: PretrainConfig, method: MethodName) -> PretrainConfig:
    """Return the recipe's config for a method, with the method's preset if it has one."""
    preset = PRESETS.get(method)
    return replace(config if preset is None else preset(config), method=method)
