"""One function per recipe: what it is, its place and result in the paper, what it costs.

A recipe returns a complete config for a method; every setting can be overridden.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from hardmix.settings.config import (
    DataConfig,
    MixConfig,
    ModelConfig,
    OptimizerConfig,
    PretrainConfig,
    TrainConfig,
)
from hardmix.settings.fitting_rules import CHOSEN
from hardmix.settings.methods import (
    METHOD_FACTS,
    ByolOptions,
    MethodName,
    MethodOptions,
    MocoV3Options,
    PclOptions,
    PirlOptions,
    SwavOptions,
    jigsaw_sizes,
)


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
        "k-NN: raw pixels 41.5, MoCo-v2 61.7, MoCHi 61.2 (one seed)",
        "35 minutes on 2 CPU cores",
    ),
    "photos": Entry(
        photos,
        "not in the paper",
        "better neighbours than a colour histogram; says so if not",
        "10 minutes, or --minutes",
    ),
    "demo": Entry(
        demo,
        "not in the paper",
        "k-NN after 16 epochs: raw pixels 12.7, MoCo-v2 72.4, MoCHi 74.3 (one seed)",
        "2 minutes on 2 CPU cores",
    ),
}


def _with_method(config: PretrainConfig, method: MethodName) -> PretrainConfig:
    """Return the recipe's config for a method, with the method's preset if it has one.

    A method without a preset has MoCo-v2's settings, and only MoCHi starts with points.
    """
    preset = PRESETS.get(method)
    if preset is not None:
        return replace(preset(config), method=method)
    if method != "mochi" and METHOD_FACTS[method].uses("mix.num_pairs"):
        return _unmixed(config, method)
    return replace(config, method=method)


SMALL = 64
"""Pixels up to which images count as small."""


def is_small(config: PretrainConfig) -> bool:
    """Return whether a recipe is for small images."""
    return config.data.image_size <= SMALL


def _moco_v1(config: PretrainConfig) -> PretrainConfig:
    """Return the settings of official MoCo's first version."""
    epochs = config.train.epochs
    return replace(
        config,
        data=replace(config.data, augmentation="moco-v1"),
        model=replace(config.model, head="linear"),
        optimizer=replace(
            config.optimizer, schedule="step", milestones=(epochs * 3 // 5, epochs * 4 // 5)
        ),
        train=replace(config.train, temperature=0.07),
    )


def _supervised(config: PretrainConfig) -> PretrainConfig:
    """Return crops and flips, and the learning rate of PyTorch's ImageNet example.

    The paper does not describe how it trained its supervised network. Ours, and not the example's:
    crops from 0.2 of the image as in the other methods (there from 0.08), the recipe's batches,
    epochs and cosine schedule (there 256, 90, and steps of 30 epochs).
    """
    return replace(
        config,
        data=replace(config.data, augmentation="plain"),
        optimizer=replace(config.optimizer, lr=0.1 * config.train.batch_size / 256),
    )


def _unmixed(
    config: PretrainConfig, method: MethodName, options: MethodOptions | None = None
) -> PretrainConfig:
    """Return the recipe for a method, as published: without points."""
    mix = replace(config.mix, num_pairs=0, num_with_query=0)
    return replace(config, method=method, options=options, mix=mix)


def _lars(config: PretrainConfig, lr: float, decay: float, batch: int) -> PretrainConfig:
    """Return LARS as SimCLR and BYOL use it, `lr` per 256 images, in batches of `batch`."""
    epochs = 10.0 if not is_small(config) else config.train.epochs / 16
    optimizer = replace(
        config.optimizer,
        name="lars",
        lr=lr * batch / 256,
        weight_decay=decay,
        decay_all=False,
        warm_up_epochs=epochs,
    )
    return replace(config, optimizer=optimizer, train=replace(config.train, batch_size=batch))


def _simclr(config: PretrainConfig) -> PretrainConfig:
    """SimCLR: batch 4096, lr 0.075 sqrt(4096) = 4.8, tau 0.1, crops from 0.08.

    For small images the authors' settings for CIFAR-10: batch 512, lr 1.0 per 256, tau 0.5.
    """
    config = _unmixed(config, "simclr")
    small = is_small(config)
    batch = min(512, 4 * config.train.batch_size) if small else 4096
    config = _lars(config, 1.0 if small else 0.3, 1e-4, batch)
    return replace(
        config,
        data=replace(config.data, augmentation="moco-v2" if small else "simclr", min_scale=0.08),
        model=replace(config.model, head="mlp-bn"),
        train=replace(config.train, temperature=0.5 if small else 0.1),
    )


def _byol(config: PretrainConfig) -> PretrainConfig:
    """BYOL: batch 4096, lr 0.2 per 256, momentum from 0.996.

    For small images the authors' settings for short runs: lr 2.0 per 256, momentum from 0.97.
    """
    small = is_small(config)
    options = ByolOptions(hidden=512 if small else 4096)
    config = _unmixed(config, "byol", options)
    batch = 2 * config.train.batch_size if small else 4096
    config = _lars(config, 2.0 if small else 0.2, 1e-6 if small else 1.5e-6, batch)
    model = replace(config.model, dim=128 if small else 256, key_momentum=0.97 if small else 0.996)
    return replace(config, model=model, data=replace(config.data, min_scale=0.2 if small else 0.08))


def _moco_v3(config: PretrainConfig) -> PretrainConfig:
    """MoCo v3, ResNet-50: batch 4096, LARS 0.6 per 256, tau 1, momentum from 0.99.

    These are the authors' settings for 100 epochs; `for_backbone` has those for transformers.
    Views are BYOL's. For small images MoCo-v2's views, the recipe's tau, and a rate per 256 images
    as BYOL's there.
    """
    small = is_small(config)
    config = _unmixed(config, "moco-v3", MocoV3Options(hidden=512 if small else 4096))
    batch = 2 * config.train.batch_size if small else 4096
    config = _lars(config, 2.0 if small else 0.6, 1e-6, batch)
    temperature = config.train.temperature if small else 1.0
    return replace(
        config,
        data=replace(config.data, augmentation="moco-v2" if small else "byol"),
        model=replace(config.model, dim=128 if small else 256, key_momentum=0.99),
        train=replace(config.train, temperature=temperature),
    )


def _swav(config: PretrainConfig) -> PretrainConfig:
    """SwAV: batch 256, LARS 0.6, tau 0.1, crops from 0.14.

    For small images fewer prototypes and crops, sharper codes (epsilon 0.03, the authors' advice if
    the loss stays at the logarithm of the prototypes), and the recipe's own batches and SGD.
    """
    small = is_small(config)
    options = SwavOptions()
    if small:
        options = SwavOptions(
            prototypes=100,
            epsilon=0.03,
            small_crops=2,
            small_size=config.data.image_size // 2,
            queue_size=4 * config.train.batch_size,
            queue_epoch=max(1, config.train.epochs // 8),
        )
    config = _unmixed(config, "swav", options)
    data = replace(config.data, augmentation="moco-v2" if small else "simclr", min_scale=0.14)
    config = replace(config, data=data, train=replace(config.train, temperature=0.1))
    if small:
        return config
    optimizer = replace(config.optimizer, name="lars", lr=0.6, weight_decay=1e-6)
    return replace(config, optimizer=optimizer, train=replace(config.train, batch_size=256))


def _bank(config: PretrainConfig, method: MethodName) -> PretrainConfig:
    """MoCo-v1's settings, crops from 0.08 (PyContrast); for small images tau 0.1 (lemniscate)."""
    config = _unmixed(_moco_v1(config), method)
    small = is_small(config)
    return replace(
        config,
        data=replace(config.data, min_scale=0.2 if small else 0.08),
        train=replace(config.train, temperature=0.1 if small else 0.07),
    )


def _instdis(config: PretrainConfig) -> PretrainConfig:
    return _bank(config, "instdis")


def _pirl(config: PretrainConfig) -> PretrainConfig:
    """PIRL: like InstDis, with a jigsaw in proportion to the image, 255 and 64 for 224."""
    config = _bank(config, "pirl")
    size, tile = jigsaw_sizes(config.data.image_size)
    return replace(config, options=PirlOptions(jigsaw_size=size, tile_size=tile))


def _cmc(config: PretrainConfig) -> PretrainConfig:
    """CMC: L and ab of crops from 0.2, only flipped, K = 16384; a trunk of two halves."""
    config = _bank(config, "cmc")
    data = replace(config.data, augmentation="plain", min_scale=0.2)
    model = replace(config.model, backbone=f"lab-{config.model.backbone}")
    train = replace(config.train, queue_size=min(16384, config.train.queue_size))
    return replace(config, data=data, model=model, train=train)


def _pcl(config: PretrainConfig) -> PretrainConfig:
    """PCL v2: MoCo-v2's settings with r = 16384, and clusters after a tenth of the epochs."""
    options = PclOptions(warm_up_epochs=max(1, config.train.epochs // 10))
    config = _unmixed(config, "pcl", options)
    queue = min(16384, config.train.queue_size)
    return replace(config, train=replace(config.train, queue_size=queue))


VISION_TRANSFORMERS = ("timm:vit_", "timm:deit")
"""Beginnings of the names of Vision Transformers."""


def for_backbone(config: PretrainConfig, backbone: str) -> PretrainConfig:
    """Return a recipe's config for another backbone, on which the settings of MoCo v3 depend.

    MoCo v3, ViT: batch 4096, AdamW 1.5e-4 per 256, weight decay 0.1, warm-up of 40 epochs of 300,
    tau 0.2, crops from 0.08. For small images the recipe's own batches, crops and tau.
    """
    config = replace(config, model=replace(config.model, backbone=backbone))
    if config.method != "moco-v3" or not backbone.startswith(VISION_TRANSFORMERS):
        return config
    small = is_small(config)
    optimizer = replace(
        config.optimizer,
        name="adamw",
        lr=1.5e-4 * config.train.batch_size / 256,
        weight_decay=0.1,
        decay_all=True,
        warm_up_epochs=config.train.epochs * 40 / 300 if small else 40,
    )
    if small:
        return replace(config, optimizer=optimizer)
    train = replace(config.train, temperature=0.2)
    data = replace(config.data, min_scale=0.08)
    return replace(config, optimizer=optimizer, train=train, data=data)


PRESETS: dict[MethodName, Callable[[PretrainConfig], PretrainConfig]] = {
    "moco-v1": _moco_v1,
    "simclr": _simclr,
    "instdis": _instdis,
    "pirl": _pirl,
    "cmc": _cmc,
    "pcl": _pcl,
    "swav": _swav,
    "byol": _byol,
    "moco-v3": _moco_v3,
    "supervised": _supervised,
}
"""Functions from a recipe's config to that of a method, as published or for small images.

Small images are those of at most 64 pixels: CIFAR-10 and the built-in shapes, on a laptop's CPU.
Every method starts without mixing; --mix.num-pairs and --mix.num-with-query add it to those that
have negatives. (A `PretrainConfig` of your own starts with the points of `MixConfig` for all of
them.) Sources are the papers and the authors' code, as docs/methods.md lists them."""
