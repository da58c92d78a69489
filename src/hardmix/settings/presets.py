"""How a method changes the settings of every recipe: as published, or for small images.

Small images are those of at most 64 pixels: CIFAR-10 and the built-in shapes, on a laptop's CPU.
Every method starts without mixing; --mix.num-pairs and --mix.num-with-query add it to those that
have negatives. (A `PretrainConfig` of your own starts with `MixConfig`'s points, for all of them.)
Sources are the papers and the authors' code, as docs/methods.md lists them.
"""

from collections.abc import Callable
from dataclasses import replace

from hardmix.settings.config import PretrainConfig
from hardmix.settings.method_options import (
    ByolOptions,
    MethodOptions,
    PclOptions,
    PirlOptions,
    SwavOptions,
    jigsaw_sizes,
)
from hardmix.settings.methods import MethodName

SMALL = 64
"""Pixels up to which images are small."""


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
    """Return the augmentation and learning rate of PyTorch's ImageNet example.

    The paper does not describe how it trained its supervised network.
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


def _plain(method: MethodName) -> Callable[[PretrainConfig], PretrainConfig]:
    """Return the preset of a method that changes nothing of MoCo-v2's settings."""
    return lambda config: _unmixed(config, method)


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
    """Batch 4096, lr 0.075 sqrt(4096) = 4.8, tau 0.1, crops from 0.08.

    Small images as the authors' CIFAR-10: batch 512, lr 1.0 per 256, tau 0.5.
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
    """Batch 4096, lr 0.2 per 256, momentum from 0.996.

    Small images as in the authors' config for short runs: lr 2.0 per 256, momentum from 0.97.
    """
    small = is_small(config)
    options = ByolOptions(hidden=512 if small else 4096)
    config = _unmixed(config, "byol", options)
    batch = 2 * config.train.batch_size if small else 4096
    config = _lars(config, 2.0 if small else 0.2, 1e-6 if small else 1.5e-6, batch)
    model = replace(config.model, dim=128 if small else 256, key_momentum=0.97 if small else 0.996)
    return replace(config, model=model, data=replace(config.data, min_scale=0.2 if small else 0.08))


def _swav(config: PretrainConfig) -> PretrainConfig:
    """Batch 256, LARS 0.6, tau 0.1, crops from 0.14.

    Small images: fewer prototypes and crops, sharper codes (epsilon 0.03, the authors' advice where
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
    """MoCo-v1's settings, crops from 0.08 (PyContrast); small images: tau 0.1 (lemniscate)."""
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
    """As InstDis; the jigsaw's sizes in proportion to the image's: 255 and 64 for 224."""
    config = _bank(config, "pirl")
    size, tile = jigsaw_sizes(config.data.image_size)
    return replace(config, options=PirlOptions(jigsaw_size=size, tile_size=tile))


def _cmc(config: PretrainConfig) -> PretrainConfig:
    """L and ab of crops from 0.2, flipped and no more, K = 16384; a trunk of two halves."""
    config = _bank(config, "cmc")
    data = replace(config.data, augmentation="plain", min_scale=0.2)
    model = replace(config.model, backbone=f"lab-{config.model.backbone}")
    train = replace(config.train, queue_size=min(16384, config.train.queue_size))
    return replace(config, data=data, model=model, train=train)


def _pcl(config: PretrainConfig) -> PretrainConfig:
    """PCL v2: MoCo-v2's settings with r = 16384; clusters after a tenth of the epochs."""
    options = PclOptions(warm_up_epochs=max(1, config.train.epochs // 10))
    config = _unmixed(config, "pcl", options)
    queue = min(16384, config.train.queue_size)
    return replace(config, train=replace(config.train, queue_size=queue))


PRESETS: dict[MethodName, Callable[[PretrainConfig], PretrainConfig]] = {
    "moco-v1": _moco_v1,
    "simclr": _simclr,
    "unmix": _plain("unmix"),
    "co2": _plain("co2"),
    "instdis": _instdis,
    "pirl": _pirl,
    "cmc": _cmc,
    "pcl": _pcl,
    "swav": _swav,
    "byol": _byol,
    "supervised": _supervised,
}
"""How a method changes the settings of every recipe."""
