"""Finished runs whose encoder was not trained."""

from dataclasses import replace
from pathlib import Path

import torch

from hardmix.models.backbones import build_backbone
from hardmix.runs.folder import Run
from hardmix.settings.config import DataConfig, ModelConfig, PretrainConfig, TrainConfig
from hardmix.settings.recipes import RECIPES

CONFIG = PretrainConfig(
    recipe="demo",
    data=DataConfig(name="shapes", num_images=240, image_size=32, blur=False, workers=0),
    model=ModelConfig(backbone="small"),
    train=TrainConfig(device="cpu"),
)


def make_run(path: Path, config: PretrainConfig = CONFIG) -> Run:
    """Make a finished run without its training."""
    torch.manual_seed(0)
    run = Run.create(path, config)
    run.write_encoder(build_backbone(config.model.backbone, config.data.channels).trunk, config)
    return run


def run_of_backbone(path: Path, backbone: str, channels: int = 3) -> Path:
    config = RECIPES["demo"].build("mochi", False)
    config = replace(
        config,
        model=replace(config.model, backbone=backbone),
        data=replace(config.data, channels=channels),
    )
    torch.manual_seed(3)
    run = Run.create(path, config)
    run.write_encoder(build_backbone(backbone, channels).trunk, config)
    return path
