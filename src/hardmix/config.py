"""Settings of pre-training, of the methods and of the evaluations, as frozen dataclasses."""

from typing import TYPE_CHECKING

from hardmix.settings.lazy_names import lazy_names

if TYPE_CHECKING:
    from hardmix.settings.config import (
        DataConfig as DataConfig,
        LossConfig as LossConfig,
        MixConfig as MixConfig,
        ModelConfig as ModelConfig,
        OptimizerConfig as OptimizerConfig,
        PretrainConfig as PretrainConfig,
        TrainConfig as TrainConfig,
    )
    from hardmix.settings.evaluations import (
        DetectionConfig as DetectionConfig,
        FinetuneConfig as FinetuneConfig,
        KnnOptions as KnnOptions,
        LinearConfig as LinearConfig,
        LinearOptions as LinearOptions,
    )
    from hardmix.settings.methods import (
        ByolOptions as ByolOptions,
        CmcOptions as CmcOptions,
        Co2Options as Co2Options,
        InstDisOptions as InstDisOptions,
        PclOptions as PclOptions,
        PirlOptions as PirlOptions,
        SwavOptions as SwavOptions,
        UnmixOptions as UnmixOptions,
    )
    from hardmix.settings.schedules import decreasing as decreasing

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
