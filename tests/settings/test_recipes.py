"""Recipes and settings: the paper's numbers, each setting checked, saved and read again."""

import dataclasses
import json

import pytest

from hardmix.errors import InputError
from hardmix.runs.folder import Run, check_resumable, read_config
from hardmix.settings.config import (
    DataConfig,
    MixConfig,
    ModelConfig,
    OptimizerConfig,
    PretrainConfig,
    TrainConfig,
)
from hardmix.settings.evaluations import FinetuneConfig
from hardmix.settings.recipes import RECIPES
from hardmix.settings.saved import to_json

METHODS = ["moco-v1", "moco-v2", "mochi", "supervised"]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("method", METHODS)
def test_every_recipe_builds_for_every_method_and_says_what_it_is(name, method):
    entry = RECIPES[name]
    config = entry.build(method, True)
    assert (config.recipe, config.method, config.oracle) == (name, method, True)
    assert entry.build.__doc__
    assert entry.place
    assert entry.expected
    assert entry.cost


def test_imagenet100_has_the_papers_settings():
    config = RECIPES["imagenet100"].build("mochi", False)
    assert config.mix == MixConfig(
        num_hardest=1024, num_pairs=1024, num_with_query=128, warm_up_epochs=10
    )
    assert (config.train.epochs, config.train.batch_size) == (200, 128)
    assert (config.train.queue_size, config.train.temperature) == (16384, 0.2)
    assert (config.optimizer.lr, config.optimizer.schedule) == (0.03, "cosine")
    assert (config.optimizer.momentum, config.optimizer.weight_decay) == (0.9, 1e-4)
    assert (config.model.backbone, config.model.head, config.model.dim) == ("resnet50", "mlp", 128)
    assert config.model.key_momentum == 0.999
    assert (config.data.image_size, config.data.augmentation) == (224, "moco-v2")
    assert (config.data.min_scale, config.data.blur) == (0.2, True)


def test_imagenet100_takes_the_papers_classes_of_any_imagenet():
    for method in ("moco-v1", "mochi", "supervised"):
        assert RECIPES["imagenet100"].build(method, False).data.name == "imagenet100"


def test_what_recipes_expect_of_the_demo_is_of_its_own_length():
    epochs = RECIPES["demo"].build("mochi", False).train.epochs
    assert f"after {epochs} epochs" in RECIPES["demo"].expected


def test_imagenet1k_has_the_papers_settings():
    config = RECIPES["imagenet1k"].build("mochi", False)
    assert (config.train.batch_size, config.train.queue_size) == (256, 65536)
    assert (config.mix.warm_up_epochs, config.optimizer.lr) == (15, 0.03)
    assert (config.mix.num_hardest, config.mix.num_pairs, config.mix.num_with_query) == (
        512,
        1024,
        512,
    )


def test_moco_v1_differs_from_v2_in_head_views_schedule_and_temperature():
    v1 = RECIPES["imagenet100"].build("moco-v1", False)
    assert (v1.model.head, v1.data.augmentation, v1.train.temperature) == (
        "linear",
        "moco-v1",
        0.07,
    )
    assert (v1.optimizer.schedule, v1.optimizer.milestones) == ("step", (120, 160))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: DataConfig(image_size=7), ["data.image_size=7 must be at least 8."]),
        (lambda: DataConfig(workers=10**6), ["data.workers=1000000", "between 0 and 1024"]),
        (lambda: MixConfig(warm_up_epochs=-0.5), ["mix.warm_up_epochs=-0.5 must be at least 0."]),
        (lambda: OptimizerConfig(weight_decay=float("inf")), ["inf must be finite and at least 0"]),
        (lambda: OptimizerConfig(lr=10**400), ["optimizer.lr=1e400", "finite number above 0"]),
        (
            lambda: TrainConfig(batch_size=10**400),
            ["train.batch_size=1e400 must be at least 1 and below 2^63."],
        ),
        (lambda: TrainConfig(batch_size=-(10**400)), ["train.batch_size=-1e400"]),
        (
            lambda: OptimizerConfig(lr=1e308),
            ["lr=1e+308", "finite number above 0 and at most 1e30"],
        ),
        (lambda: OptimizerConfig(lr=float("-inf")), ["lr=-inf must be a finite number above 0."]),
        (
            lambda: FinetuneConfig(weight_decay=-1.0),
            ["finetune.weight_decay=-1.0 must be at least"],
        ),
        (lambda: DataConfig(channels=17), ["data.channels=17", "between 1 and 16"]),
        (lambda: DataConfig(min_scale=2.0), ["data.min_scale=2.0"]),
        (lambda: ModelConfig(key_momentum=1.5), ["model.key_momentum=1.5"]),
        (lambda: MixConfig(num_hardest=1, num_pairs=3), ["mix.num_pairs=3", "mix.num_hardest=1"]),
        (lambda: MixConfig(percentage=101.0), ["mix.percentage=101.0"]),
        (lambda: OptimizerConfig(lr=float("nan")), ["optimizer.lr=nan"]),
        (lambda: TrainConfig(temperature=0.0), ["train.temperature=0.0"]),
        (lambda: TrainConfig(batch_size=10, accumulate=3), ["train.accumulate=3", "10"]),
        (
            lambda: PretrainConfig(mix=MixConfig(num_hardest=99999)),
            ["mix.num_hardest=99999", "train.queue_size=16384"],
        ),
        (
            lambda: PretrainConfig(model=ModelConfig(key_bn_splits=5)),
            ["model.key_bn_splits=5", "train.batch_size=128"],
        ),
        (
            lambda: PretrainConfig(train=TrainConfig(batch_size=8, accumulate=4)),
            ["model.key_bn_splits=4", "the 2 images", "train.accumulate=4"],
        ),
    ],
)
def test_a_bad_setting_is_refused_by_name_value_and_limit(build, words):
    with pytest.raises(InputError) as refusal:
        build()
    assert all(word in str(refusal.value) for word in words)


def test_a_saved_config_is_read_back_equal(tmp_path):
    for name, entry in RECIPES.items():
        config = entry.build("moco-v1", True)
        file = tmp_path / f"{name}.json"
        file.write_bytes(to_json(config))
        assert read_config(file) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values.update(colour=1), ["unknown setting 'colour'"]),
        (lambda values: values["mix"].update(num_hardest="many"), ["num_hardest", "'many'"]),
        (lambda values: values["mix"].update(num_pairs=True), ["num_pairs"]),
        (lambda values: values.update(method="simsiam"), ["method", "simsiam"]),
        (lambda values: values.update(train=3), ["train", "3"]),
    ],
)
def test_a_broken_config_file_is_refused_by_name(tmp_path, change, words):
    values = json.loads(to_json(PretrainConfig()))
    change(values)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    with pytest.raises(InputError) as refusal:
        read_config(file)
    assert all(word in str(refusal.value) for word in words)


def test_a_config_that_is_no_json_or_no_file_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    for file in ("config.json", "missing.json"):
        with pytest.raises(InputError, match=file):
            read_config(tmp_path / file)


def test_resume_takes_what_may_change_and_refuses_the_rest_by_name(tmp_path):
    config = PretrainConfig()
    Run.create(tmp_path / "run", config)
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=800))
    check_resumable(tmp_path / "run", longer)
    Run.open(tmp_path / "run").write_config(longer)
    assert Run.open(tmp_path / "run").config().train.epochs == 800
    other = dataclasses.replace(longer, model=ModelConfig(backbone="resnet18"))
    with pytest.raises(
        InputError, match=r"model\.backbone cannot change from resnet50 to resnet18"
    ):
        check_resumable(tmp_path / "run", other)


def test_methods_have_their_published_numbers_of_negatives_whatever_the_recipes():
    """PCL's r and CMC's K are 16384; InstDis and PIRL have MoCo's K."""
    sizes = {"cmc": 16384, "pcl": 16384, "instdis": 65536, "pirl": 65536}
    for method, size in sizes.items():
        assert RECIPES["imagenet1k"].build(method, False).train.queue_size == size
        assert RECIPES["imagenet100"].build(method, False).train.queue_size == 16384
        assert RECIPES["cifar10"].build(method, False).train.queue_size == 4096
