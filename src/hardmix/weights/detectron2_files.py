"""Files for detectron2: weights under its names, MoCo's two configs, and a plug-in for its head.

detectron2 is never imported here: the files are used where it is installed.
"""

import pickle
import re
from collections.abc import Mapping
from io import BytesIO
from string import Template
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hardmix.settings.evaluations import SCHEDULES, DetectionConfig

PLUG_IN_FILE = "hardmix_detectron2.py"
"""A file name that Python can import."""


class ResNetShape(NamedTuple):
    """The MODEL.RESNETS settings with which detectron2 builds a torchvision ResNet."""

    depth: int
    groups: int = 1
    group_width: int = 64
    first_stage: int = 256
    """Channels of the first stage: 64 if the blocks have two convolutions instead of three."""


SHAPES: dict[str, ResNetShape] = {
    "resnet18": ResNetShape(18, first_stage=64),
    "resnet34": ResNetShape(34, first_stage=64),
    "resnet50": ResNetShape(50),
    "resnet101": ResNetShape(101),
    "resnet152": ResNetShape(152),
    "wide_resnet50_2": ResNetShape(50, group_width=128),
    "wide_resnet101_2": ResNetShape(101, group_width=128),
    "resnext50_32x4d": ResNetShape(50, groups=32, group_width=4),
    "resnext101_32x8d": ResNetShape(101, groups=32, group_width=8),
    "resnext101_64x4d": ResNetShape(101, groups=64, group_width=4),
}
"""Backbones that detectron2 can build; the paper's is resnet50."""


def detectron2_name(name: str) -> str:
    """Return detectron2's name for a tensor of torchvision's ResNets."""
    name = re.sub(r"^layer(\d)", lambda found: f"res{int(found[1]) + 1}", name)
    name = re.sub(r"^(conv|bn)", r"stem.\1", name)
    name = re.sub(r"\bbn(\d)", r"conv\1.norm", name)
    return name.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")


def weights_file(weights: Mapping[str, Tensor], suffix: str) -> bytes:
    """Return the content of MODEL.WEIGHTS: `.pth` with tensors, or `.pkl` with numpy arrays."""
    renamed = {detectron2_name(name): tensor for name, tensor in weights.items()}
    facts = {"__author__": "hardmix", "matching_heuristics": True}
    buffer = BytesIO()
    if suffix == ".pkl":
        arrays = {name: tensor.numpy() for name, tensor in renamed.items()}
        _Pickler(buffer, protocol=4).dump({"model": arrays, **facts})
    else:
        torch.save({"model": renamed, **facts}, buffer)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Writes arrays using only public names.

    numpy's own pickling names a private module that numpy 2 has moved, which numpy 1 cannot read.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            # A bytearray, because an array over bytes could not be written to.
            return np.ndarray, (obj.shape, obj.dtype.str, bytearray(obj.tobytes()))
        return NotImplemented


def side_files(backbone: str, weights_name: str) -> dict[str, bytes]:
    """Return configs and plug-in by file name, for a weights file in the same folder."""
    stem = weights_name.rpartition(".")[0]
    names = {"voc": f"{stem}_voc_24k.yaml", "coco": f"{stem}_coco_1x.yaml"}
    shape = SHAPES[backbone]
    special = {
        "voc": _VOC | _numbers(SCHEDULES["voc", "24k"]),
        "coco": _COCO | _numbers(SCHEDULES["coco", "1x"]),
    }
    texts = {
        names[data]: _CONFIG.substitute(
            values, plug_in=PLUG_IN_FILE, name=names[data], weights=weights_name, **shape._asdict()
        )
        for data, values in special.items()
    }
    texts[PLUG_IN_FILE] = _PLUG_IN
    return {name: text.encode() for name, text in texts.items()}


def _numbers(schedule: DetectionConfig) -> dict[str, object]:
    """Return the settings of `hardmix detect` under detectron2's names."""
    return {
        "batch_size": schedule.batch_size,
        "lr": schedule.lr,
        "sizes": list(schedule.sides),
        "test_size": schedule.test_side,
        "proposals": schedule.proposals,
        "steps": list(schedule.milestones),
        "iterations": schedule.iterations,
        "warm_up": schedule.warm_up,
        "precise_bn": schedule.precise_bn,
    }


_VOC: dict[str, object] = {
    "title": "Faster R-CNN, C4, Pascal VOC: trainval 2007 and 2012, test 2007; 24k iterations.",
    "mask": "false",
    "classes": 20,
    "train": '["voc_2007_trainval", "voc_2012_trainval"]',
    "test": '["voc_2007_test"]',
}

_COCO: dict[str, object] = {
    "title": "Mask R-CNN, C4, COCO 2017; the 1x schedule of 90k iterations.",
    "mask": "true",
    "classes": 80,
    "train": '["coco_2017_train"]',
    "test": '["coco_2017_val"]',
}

_CONFIG = Template("""\
# $title
# For $batch_size images per iteration on all GPUs together. In this folder:
#   python $plug_in --config-file $name --num-gpus 8
VERSION: 2
MODEL:
  META_ARCHITECTURE: GeneralizedRCNN
  WEIGHTS: "$weights"
  MASK_ON: $mask
  # ImageNet's statistics in RGB, as in pre-training.
  PIXEL_MEAN: [123.675, 116.28, 103.53]
  PIXEL_STD: [58.395, 57.12, 57.375]
  BACKBONE:
    FREEZE_AT: 0
  RESNETS:
    DEPTH: $depth
    NUM_GROUPS: $groups
    WIDTH_PER_GROUP: $group_width
    RES2_OUT_CHANNELS: $first_stage
    NORM: naiveSyncBN
    # torchvision's blocks have their stride in the 3x3 convolution.
    STRIDE_IN_1X1: false
  RPN:
    PRE_NMS_TOPK_TEST: 6000
    POST_NMS_TOPK_TEST: $proposals
  ROI_HEADS:
    NAME: Res5ROIHeadsExtraNorm
    NUM_CLASSES: $classes
INPUT:
  FORMAT: RGB
  MIN_SIZE_TRAIN: $sizes
  MIN_SIZE_TEST: $test_size
DATASETS:
  TRAIN: $train
  TEST: $test
SOLVER:
  IMS_PER_BATCH: $batch_size
  BASE_LR: $lr
  STEPS: $steps
  MAX_ITER: $iterations
  WARMUP_ITERS: $warm_up
TEST:
  PRECISE_BN:
    ENABLED: true
    NUM_ITER: $precise_bn
""")

_PLUG_IN = '''\
"""Fine-tunes a detectron2 detector from weights that `hardmix export` wrote.

    python hardmix_detectron2.py --config-file CONFIG.yaml --num-gpus 8

Add further settings as NAME VALUE: OUTPUT_DIR runs/voc SEED 1. The environment variable
DETECTRON2_DATASETS tells where the data sets are. To use the head in your own script, import this
file before the model is built.

The AP of voc_2007_test is the mean of the 11-point AP of VOC 2007 over IoU .50 to .95. It is the
paper's number, and differs from COCO's AP.
"""

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import get_cfg
from detectron2.data import MetadataCatalog
from detectron2.engine import DefaultTrainer, default_argument_parser, default_setup, launch
from detectron2.evaluation import COCOEvaluator, PascalVOCDetectionEvaluator
from detectron2.layers import get_norm
from detectron2.modeling.backbone.resnet import BasicBlock, ResNet
from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads
from torch import nn


@ROI_HEADS_REGISTRY.register()
class Res5ROIHeadsExtraNorm(Res5ROIHeads):
    """Res5 heads with an extra norm after res5, without a ReLU after it."""

    @classmethod
    def from_config(cls, cfg, input_shape):
        """Return detectron2's arguments with another res5."""
        arguments = super().from_config(cfg, input_shape)
        norm, depth = cfg.MODEL.RESNETS.NORM, cfg.MODEL.RESNETS.DEPTH
        channels = cfg.MODEL.RESNETS.RES2_OUT_CHANNELS * 8
        res5 = arguments["res5"]
        if depth in (18, 34):  # detectron2 builds res5 of three-convolution blocks at any depth
            res5 = nn.Sequential(*_basic_res5(2 if depth == 18 else 3, channels, norm))
        res5.add_module("norm", get_norm(norm, channels))
        return {**arguments, "res5": res5}


def _basic_res5(blocks, channels, norm):
    return ResNet.make_stage(
        BasicBlock,
        blocks,
        stride_per_block=[2] + [1] * (blocks - 1),
        in_channels=channels // 2,
        out_channels=channels,
        norm=norm,
    )


class Trainer(DefaultTrainer):
    """detectron2's trainer with the evaluator of each data set."""

    @classmethod
    def build_evaluator(cls, cfg, dataset_name, output_folder=None):
        """Return VOC's or COCO's evaluator."""
        if MetadataCatalog.get(dataset_name).evaluator_type == "pascal_voc":
            return PascalVOCDetectionEvaluator(dataset_name)
        return COCOEvaluator(dataset_name, output_dir=output_folder or cfg.OUTPUT_DIR)


def main(arguments):
    """Train and evaluate according to the config."""
    cfg = get_cfg()
    cfg.merge_from_file(arguments.config_file)
    cfg.merge_from_list(arguments.opts)
    cfg.freeze()
    default_setup(cfg, arguments)
    if arguments.eval_only:  # without a trainer, which would need the training data
        model = Trainer.build_model(cfg)
        checkpointer = DetectionCheckpointer(model, save_dir=cfg.OUTPUT_DIR)
        checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=arguments.resume)
        return Trainer.test(cfg, model)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=arguments.resume)
    return trainer.train()


if __name__ == "__main__":
    words = default_argument_parser().parse_args()
    launch(
        main,
        words.num_gpus,
        num_machines=words.num_machines,
        machine_rank=words.machine_rank,
        dist_url=words.dist_url,
        args=(words,),
    )
'''
