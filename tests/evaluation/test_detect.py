"""`hardmix detect`: schedules, batch norm over processes, training that learns and resumes."""

import json
import math
import os
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from hardmix.commands import main as cli
from hardmix.errors import InputError
from hardmix.evaluation.detection import detect, detector_training
from hardmix.evaluation.detection.c4 import Target
from hardmix.evaluation.detection.coco import annotation_file, open_coco, read_json
from hardmix.evaluation.detection.detect import compare, find_objects, score
from hardmix.evaluation.detection.detector_training import (
    Batches,
    DetectorTraining,
    build_detector,
    build_optimizer,
    learning_rate,
    make_precise,
    precise_statistics,
    restore,
    save,
    train_until,
)
from hardmix.evaluation.detection.samples import DetectionImage, FoundObjects
from hardmix.evaluation.detection.voc import open_voc
from hardmix.models import batch_norm
from hardmix.models.backbones import build_backbone
from hardmix.models.batch_norm import batch_norms, synchronise_batch_norm
from hardmix.runs.folder import Run
from hardmix.runtime.console import progress
from hardmix.runtime.device import choose_compute
from hardmix.runtime.distributed import rank
from hardmix.settings.evaluations import SCHEDULES, DetectionConfig, schedule_of, with_batch
from ranks import in_two_processes, tensors_file
from untrained_runs import run_of_backbone
from voc_folders import thing, voc_image, voc_lists

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

CPU = torch.device("cpu")
FP32 = choose_compute("cpu", "fp32")
TINY = {
    "iterations": 4,
    "milestones": (3,),
    "warm_up": 2,
    "batch_size": 2,
    "lr": 0.01,
    "sides": (48, 64),
    "test_side": 64,
    "regions": 8,
    "proposals": 10,
    "precise_bn": 2,
    "save_every": 2,
    "test_every": 0,
    "log_every": 1,
    "workers": 0,
    "device": "cpu",
}
FLAGS = [
    *("--schedule", "short", "--iterations", "4", "--milestones", "3", "--warm-up", "2"),
    *("--batch-size", "2", "--lr", "0.01", "--sides", "48", "64", "--test-side", "64"),
    *("--regions", "8", "--proposals", "10", "--precise-bn", "2", "--save-every", "2"),
    *("--test-every", "2", "--log-every", "1", "--data.workers", "0", "--device", "cpu"),
]


def tiny(task="voc", **more) -> DetectionConfig:
    return replace(SCHEDULES[task, "short"], **(TINY | more))


def very_narrow() -> nn.Module:
    """Return torchvision's smallest ResNet: one block per stage, 16 to 64 wide."""
    trunk = ResNet(BasicBlock, [1, 1, 1, 1])
    trunk.inplanes = 16
    trunk.conv1 = nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False)
    trunk.bn1 = nn.BatchNorm2d(16)
    for number, width in enumerate((16, 32, 64, 64), start=1):
        layer = trunk._make_layer(BasicBlock, width, 1, stride=1 if number == 1 else 2)
        setattr(trunk, f"layer{number}", layer)
    return trunk


@pytest.fixture
def cells(tmp_path):
    """Write six images in VOC's layout with coloured squares; two of them are for the test."""
    root = tmp_path / "cells"
    for number in range(6):
        name, left = f"cell{number}", 5 + 3 * number
        size = (60, 40) if number % 2 else (40, 60)
        box = (left, 6, left + 14, 24)
        voc_image(root, name, thing(("red", "blue")[number % 2], *box), size=size)
        picture = Image.new("RGB", size, "white")
        picture.paste(("red", "blue")[number % 2], box)
        picture.save(root / "JPEGImages" / f"{name}.jpg")
    names = [f"cell{number}" for number in range(6)]
    return voc_lists(root, train=names[:4], test=names[4:])


@pytest.fixture
def encoder(tmp_path):
    """A run whose encoder was made without training."""
    return run_of_backbone(tmp_path / "run", "resnet18-narrow")


def new_training(cells: Path, folder: Path, config: DetectionConfig) -> DetectorTraining:
    torch.manual_seed(0)
    detector = build_detector(very_narrow(), 2, config)
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = build_optimizer(detector, config)
    data = open_voc(cells).train
    return DetectorTraining(config, 0, data, Run(folder), detector, optimizer, FP32)


def steps(training: DetectorTraining, stop: int) -> None:
    batches = Batches(training.data, training.config, training.seed, CPU)
    with progress("test", stop) as meter:
        train_until(training, stop, batches, meter)
    batches.close()


# -- schedules


@pytest.mark.parametrize(
    ("task", "name", "iterations", "drops", "warm_up"),
    [
        ("voc", "24k", 24_000, (18_000, 22_000), 100),
        ("coco", "1x", 90_000, (60_000, 80_000), 1000),
        ("coco", "2x", 180_000, (120_000, 160_000), 1000),
    ],
)
def test_schedules_are_the_papers(task, name, iterations, drops, warm_up):
    config = schedule_of(task, name)
    assert (config.iterations, config.batch_size, config.trials) == (iterations, 16, 3)
    assert (config.regions, config.proposals, config.precise_bn) == (512, 1000, 200)
    assert learning_rate(config, 0) == pytest.approx(0.02 / 1000)
    assert learning_rate(config, warm_up // 2) == pytest.approx(0.02 * 0.5005)
    for step, factor in [(warm_up, 1), (drops[0] - 1, 1), (drops[0], 0.1), (drops[1], 0.01)]:
        assert learning_rate(config, step) == pytest.approx(0.02 * factor)


def test_a_schedule_of_another_task_is_refused_and_the_usual_one_is_found():
    assert schedule_of("voc", None).schedule == "24k"
    assert schedule_of("coco", None).schedule == "1x"
    with pytest.raises(
        InputError, match=r"schedule .2x. does not exist for task .voc.: choose 24k, short"
    ):
        schedule_of("voc", "2x")


def test_the_learning_rate_follows_the_batch():
    assert with_batch(schedule_of("voc", "24k"), 4).lr == pytest.approx(0.005)


@pytest.mark.parametrize(
    "wrong", [{"sides": ()}, {"sides": (8,)}, {"milestones": (3, 2)}, {"lr": 0.0}, {"trials": 0}]
)
def test_settings_that_cannot_be_are_refused_by_name(wrong):
    with pytest.raises(InputError, match=rf"detect\.{next(iter(wrong))}="):
        tiny(**wrong)


def test_weight_decay_is_on_everything_but_batch_norm():
    detector = build_detector(very_narrow(), 2, tiny())
    groups = build_optimizer(detector, tiny()).param_groups
    decay = {id(each): group["weight_decay"] for group in groups for each in group["params"]}
    names = dict(detector.named_parameters())
    assert decay.keys() == {id(each) for each in names.values()}
    for layer in detector.modules():
        for parameter in layer.parameters(recurse=False):
            expected = 0.0 if isinstance(layer, nn.BatchNorm2d) else 1e-4
            assert decay[id(parameter)] == expected


# -- batch norm


def maps_of_all() -> torch.Tensor:
    return torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(5)) * 2 + 1


def weights_of_all() -> torch.Tensor:
    return torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(6))


def normalised(norm: nn.Module, maps: torch.Tensor, weights: torch.Tensor):
    maps = maps.clone().requires_grad_()
    out = norm(maps)
    (out * weights).sum().backward()
    return out.detach(), maps.grad, norm


def check_synced(number):
    half = slice(2 * number, 2 * number + 2)
    synced = synchronise_batch_norm(nn.Sequential(nn.BatchNorm2d(3)), CPU)
    out, gradient, _ = normalised(synced, maps_of_all()[half], weights_of_all()[half])
    whole, expected, norm = normalised(nn.BatchNorm2d(3), maps_of_all(), weights_of_all())
    torch.testing.assert_close(out, whole[half], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, expected[half], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(synced[0].running_mean, norm.running_mean)
    torch.testing.assert_close(synced[0].running_var, norm.running_var)
    biased = maps_of_all().var(dim=(0, 2, 3), correction=0)
    precise = synchronise_batch_norm(nn.Sequential(nn.BatchNorm2d(3)), CPU)
    precise.forward = lambda images, _: precise[0](images)
    make_precise(precise, [(maps_of_all()[half][i : i + 1], None) for i in range(2)])
    torch.testing.assert_close(precise[0].running_mean, maps_of_all().mean(dim=(0, 2, 3)))
    torch.testing.assert_close(precise[0].running_var, biased)


def test_two_processes_normalise_as_one_with_the_whole_batch(tmp_path):
    in_two_processes(check_synced)


def test_on_one_process_synchronised_batch_norm_is_batch_norm_to_the_bit():
    plain = nn.BatchNorm2d(3)
    synced = synchronise_batch_norm(nn.Sequential(nn.BatchNorm2d(3)), CPU)
    assert torch.equal(plain(maps_of_all()), synced(maps_of_all()))
    assert torch.equal(plain.running_var, synced[0].running_var)


@pytest.mark.parametrize(("device", "kind"), [("cpu", nn.BatchNorm2d), ("cuda", nn.SyncBatchNorm)])
def test_batch_norm_is_synchronised_as_the_device_can(device, kind, monkeypatch):
    """torch's layer refuses tensors on CPUs; on GPUs ours would make two calls that wait."""
    module = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3)))
    state = module.state_dict()
    monkeypatch.setattr(batch_norm, "world_size", lambda: 2)
    synced = synchronise_batch_norm(module, torch.device(device))
    assert type(synced[1][0]) is kind
    assert ("forward" in vars(synced[1][0])) == (device == "cpu")  # ours, on the same layer
    assert synced.state_dict().keys() == state.keys()
    config = tiny()
    groups = build_optimizer(synced, config).param_groups
    assert [len(group["params"]) for group in groups] == [2, 2]
    assert [group["weight_decay"] for group in groups] == [config.weight_decay, 0.0]


def test_a_detector_is_trained_and_tested_in_bfloat16_where_asked_for(cells, tmp_path):
    """Only forward passes are in bfloat16; boxes, scores and losses are float32."""
    seen = []
    training = new_training(cells, tmp_path / "trial", tiny())
    training.compute = choose_compute("cpu", "bf16")
    training.detector.trunk.register_forward_hook(lambda *each: seen.append(each[2].dtype))
    training.detector.rpn.register_forward_hook(lambda *each: seen.append(each[2].deltas.dtype))
    steps(training, 1)
    assert seen == [torch.bfloat16, torch.float32]
    found = find_objects(training.detector, open_voc(cells).test.images, 64, 0, training.compute)
    assert seen[2:4] == [torch.bfloat16, torch.float32]
    assert all(each.scores.dtype == np.float32 for each in found)


def test_precise_statistics_are_those_of_all_batches_by_their_size():
    norm = nn.BatchNorm2d(3)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, maps, _):
            return self.norm(maps)

    maps = maps_of_all()
    make_precise(Model(), [(maps[:1], None), (maps[1:], None)])
    torch.testing.assert_close(norm.running_mean, maps.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(norm.running_var, maps.var(dim=(0, 2, 3), correction=0))
    assert len(norm._forward_pre_hooks) == 0


# -- training


def test_a_stopped_training_goes_on_to_the_same_bits(cells, tmp_path):
    whole = new_training(cells, tmp_path / "whole", tiny())
    steps(whole, 4)
    stopped = new_training(cells, tmp_path / "stopped", tiny())
    steps(stopped, 2)
    save(stopped)
    steps(stopped, 3)  # lost with the process
    resumed = new_training(cells, tmp_path / "stopped", tiny())
    nn.init.zeros_(resumed.detector.rpn.conv.weight)
    restore(resumed)
    assert resumed.step == 2
    steps(resumed, 4)
    expected = whole.detector.state_dict()
    for name, tensor in resumed.detector.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert resumed.folder.metrics() == whole.folder.metrics()


def test_tests_and_the_last_checkpoint_have_precise_batch_norm(cells, tmp_path, monkeypatch):
    config = tiny(test_every=2, save_every=4)
    training = new_training(cells, tmp_path / "trial", config)
    tested = []
    monkeypatch.setattr(
        detect, "test", lambda training, _: (tested.append(statistics_of(training)), [])
    )
    monkeypatch.setattr(detect, "_headline", str)
    batches = Batches(training.data, config, 0, CPU)
    detect.train(training, batches, open_voc(cells))
    last = load_file(tensors_file(tmp_path / "trial" / "checkpoints", 4))
    again = new_training(cells, tmp_path / "again", config)
    again.step = 4
    again.detector.load_state_dict(
        {k.removeprefix("detector."): v for k, v in last.items() if k.startswith("detector.")}
    )
    saved = statistics_of(again)
    for norm in batch_norms(again.detector):
        norm.reset_running_stats()
    precise_statistics(again, batches)
    assert torch.equal(statistics_of(again), saved)  # they do not depend on what was there
    batches.close()
    assert len(tested) == 1  # at step 2; the last test follows
    plain = new_training(cells, tmp_path / "plain", config)
    steps(plain, 2)
    assert not torch.allclose(tested[0], statistics_of(plain))


def statistics_of(training: DetectorTraining) -> torch.Tensor:
    return torch.cat([norm.running_mean for norm in batch_norms(training.detector)])


def test_an_unreadable_training_image_is_named_once_and_replaced(cells, tmp_path, capfd):
    (cells / "JPEGImages" / "cell1.jpg").write_bytes(b"")
    training = new_training(cells, tmp_path / "trial", tiny())
    batches = Batches(training.data, training.config, 0, CPU)
    sizes = [len(images) for images, _ in batches.read(0, 6)]
    assert sizes == [2] * 6
    assert capfd.readouterr().err.count("cell1.jpg") == 1
    assert len(batches.unreadable) == 1


def test_a_loss_that_is_no_number_is_not_stepped_on(cells, tmp_path):
    training = new_training(cells, tmp_path / "trial", tiny())
    nn.init.constant_(training.detector.roi_heads.classes.bias, math.inf)
    before = training.detector.rpn.conv.weight.clone()
    with pytest.raises(InputError, match=r"the loss is nan at step 0: detect\.lr=0\.01"):
        steps(training, 1)
    assert torch.equal(training.detector.rpn.conv.weight, before)


def test_images_of_one_pixel_are_trained_on_and_tested(tmp_path):
    root = tmp_path / "dots"
    for name in ("a", "b"):
        voc_image(root, name, thing("dot", 0, 0, 1, 1), size=(1, 1))
    voc_lists(root, train=["a"], test=["b"])
    training = new_training(root, tmp_path / "trial", tiny())
    steps(training, 2)
    found = find_objects(training.detector, open_voc(root).test.images, 64, 0, FP32)
    assert np.isfinite(found[0].boxes).all()


def test_it_learns_a_few_images_of_coco_by_heart(shared, tmp_path):
    root = tmp_path / "coco"
    test = open_coco(shared / "coco-mini").test
    few = [image for image in test.images if 1 <= len(image.boxes) <= 3 and not image.crowd.any()]
    data = test._replace(images=tuple(few[:3]))
    part_of_coco(shared / "coco-mini", root, {image.id for image in data.images})
    config = tiny("coco", iterations=120, milestones=(90,), warm_up=10, batch_size=3, lr=0.04)
    config = replace(config, sides=(128,), test_side=128, regions=32, proposals=30, precise_bn=8)
    torch.manual_seed(0)
    detector = build_detector(very_narrow(), len(data.classes), config)
    (tmp_path / "trial").mkdir()
    optimizer = build_optimizer(detector, config)
    training = DetectorTraining(config, 0, data, Run(tmp_path / "trial"), detector, optimizer, FP32)
    batches = Batches(data, config, 0, CPU)
    with progress("test", 120) as meter:
        train_until(training, 120, batches, meter)
    precise_statistics(training, batches)
    found = find_objects(detector, data.images, 128, 0, FP32)
    scores = score("coco", data, found)
    assert scores["COCO box"]["ap50"] > 0.6
    assert scores["COCO mask"]["ap50"] > 0.4


def part_of_coco(source: Path, root: Path, ids: set[int | str] | None = None) -> Path:
    """Keep these images of a folder in COCO's layout, or the first four of each split."""
    (root / "annotations").mkdir(parents=True)
    for split in ("train", "val"):
        content = read_json(annotation_file(source, split))
        kept = ids or {each["image_id"] for each in content["annotations"][:4]}
        for name, key in (("images", "id"), ("annotations", "image_id")):
            content[name] = [each for each in content[name] if each[key] in kept]
        annotation_file(root, split).write_text(json.dumps(content))
        (root / f"{split}2017").symlink_to(source / f"{split}2017")
    return root


# -- the command


def run_command(capfd, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in arguments])
    said = capfd.readouterr()
    return int(stopped.value.code or 0), said.out, said.err


def test_trials_are_trained_tested_drawn_and_averaged(cells, encoder, capfd):
    command = ["detect", encoder, "--task", "voc", "--data.root", cells, "--trials", "2", *FLAGS]
    status, out, _ = run_command(capfd, *command)
    assert status == 0
    result = json.loads((encoder / "results" / "detection-voc-short.json").read_text())
    assert result["metrics"].keys() == {"VOC07 11-point", "VOC12 area"}
    for metric, numbers in result["metrics"].items():
        assert metric in out
        for name, number in numbers.items():
            values = [trial["scores"][metric][name] for trial in result["trials"]]
            assert number["mean"] == pytest.approx(statistics.fmean(values))
            assert number["std"] == pytest.approx(statistics.stdev(values))
    folder = encoder / "detection" / "voc-short"
    assert [trial["seed"] for trial in result["trials"]] == [0, 1]
    assert [line["step"] for line in result["trials"][0]["curve"]] == [2]
    for number in range(2):
        assert len(list((folder / f"trial-{number}" / "pictures").glob("*.png"))) == 2
    first = load_file(tensors_file(folder / "trial-0" / "checkpoints", 4))
    second = load_file(tensors_file(folder / "trial-1" / "checkpoints", 4))
    assert not torch.equal(first["detector.rpn.conv.weight"], second["detector.rpn.conv.weight"])

    half = folder / "trial-2" / "checkpoints" / ".step-00000002.safetensors.99.tmp"
    half.parent.mkdir(parents=True)
    half.write_text("of a process that was killed")
    log = folder / "trial-2" / "metrics.jsonl"
    log.write_text('{"step": 1, "loss": 9.0}\n')  # before its first checkpoint
    status, out, _ = run_command(capfd, *command[:-2], "--device", "cpu", "--trials", "3")
    assert status == 0
    assert not half.exists()
    assert [line["step"] for line in Run(log.parent).metrics()] == [1, 2, 2, 3, 4]
    assert "trial-0 is finished" in out
    assert "trial-1 is finished" in out
    assert (folder / "trial-2" / "result.json").exists()
    status, _, err = run_command(capfd, *command, "--lr", "0.5")
    assert status == 2
    assert "was started with other settings (lr)" in err


def test_the_baselines_start_elsewhere(cells, encoder, tmp_path, capfd):
    command = ["detect", encoder, "--task", "voc", "--data.root", cells, "--trials", "1", *FLAGS]
    weights = tmp_path / "supervised.pth"
    supervised = build_backbone("resnet18-narrow").trunk
    tensors = supervised.state_dict() | {"fc.weight": torch.zeros(5, 128)}
    torch.save(tensors, weights)
    given = ["--from", "supervised", "--weights", weights]
    assert run_command(capfd, *command, "--from", "random")[0] == 0
    assert run_command(capfd, *command, *given)[0] == 0
    names = {file.stem for file in (encoder / "results").iterdir()}
    assert names == {"detection-voc-short-random", "detection-voc-short-supervised"}
    config = tiny(start="supervised")
    trunk = detect.starting_trunk(encoder, config, weights, seed=0)
    assert torch.equal(trunk.layer1[0].conv1.weight, supervised.layer1[0].conv1.weight)
    one, two = (
        detect.starting_trunk(encoder, tiny(start="random"), None, seed=seed) for seed in (0, 1)
    )
    assert not torch.equal(one.conv1.weight, two.conv1.weight)
    status, _, err = run_command(capfd, *command, "--from", "supervised")
    assert (status, "--from, --weights" in err) == (2, True)
    torch.save({"conv1.weight": torch.zeros(2)}, weights)
    status, _, err = run_command(capfd, *command, *given, "--out", tmp_path / "other")
    assert (status, "does not fit resnet18-narrow" in err) == (2, True)


def test_masks_are_trained_and_tested_on_coco(shared, encoder, tmp_path, capfd):
    root = part_of_coco(shared / "coco-mini", tmp_path / "coco")
    command = ["detect", encoder, "--task", "coco", "--data.root", root, "--trials", "1", *FLAGS]
    status, out, err = run_command(capfd, *command, "--iterations", "2", "--test-every", "0")
    assert status == 0, err
    assert "COCO box" in out
    assert "COCO mask" in out
    assert "VOC" not in out
    result = json.loads((encoder / "results" / "detection-coco-short.json").read_text())
    assert result["metrics"].keys() == {"COCO box", "COCO mask"}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda cells: shutil.rmtree(cells / "Annotations"), "has no folder Annotations"),
        (lambda cells: (cells / "JPEGImages" / "cell2.jpg").unlink(), "no image JPEGImages/cell2"),
        (
            lambda cells: (cells / "JPEGImages" / "cell5.jpg").write_bytes(b"GIF?"),
            "1 of 2 test images cannot be used",
        ),
        (
            lambda cells: Image.new("RGB", (9, 9)).save(cells / "JPEGImages" / "cell5.jpg"),
            "has 9 x 9 pixels",
        ),
    ],
)
def test_data_that_cannot_be_used_is_refused_before_training(spoil, words, cells, encoder, capfd):
    spoil(cells)
    status, _, err = run_command(
        capfd, "detect", encoder, "--task", "voc", "--data.root", cells, *FLAGS
    )
    assert (status, words in err) == (2, True), err
    assert "Traceback" not in err
    assert not (encoder / "detection").exists()


@pytest.mark.parametrize(
    ("backbone", "channels", "words"),
    [
        ("small", 3, "has no maxpool, layer4"),
        ("resnet18-cifar", 3, "has no max-pool"),
        ("resnet18-narrow", 1, "a detector needs 3"),
    ],
)
def test_encoders_that_cannot_be_detectors_are_refused(
    backbone, channels, words, cells, tmp_path, capfd
):
    run = run_of_backbone(tmp_path / "other", backbone, channels)
    status, _, err = run_command(
        capfd, "detect", run, "--task", "voc", "--data.root", cells, *FLAGS
    )
    assert (status, words in err) == (2, True), err


# -- two processes


def check_trial(number, cells=None, out=None):
    config = tiny(precise_bn=0)
    splits = open_voc(Path(cells))
    torch.manual_seed(number)  # what a process draws by itself must not matter
    trunk = very_narrow()
    trunk.load_state_dict(torch.load(f"{cells}/trunk.pt"))
    result = detect.run_trial(Path(out) / "trial-0", 0, trunk, config, splits)
    assert rank() == number
    torch.save(result["scores"], f"{out}/{number}.pt")


class _Check:
    """A check with its folders, that another process can be given."""

    def __init__(self, cells, out):
        self.cells, self.out = str(cells), str(out)

    def __call__(self, number):
        check_trial(number, self.cells, self.out)


def test_two_processes_train_one_detector(cells, tmp_path):
    torch.save(very_narrow().state_dict(), cells / "trunk.pt")
    out = tmp_path / "two"
    out.mkdir()
    in_two_processes(_Check(cells, out))
    one, two = torch.load(out / "0.pt"), torch.load(out / "1.pt")
    assert one == two
    # The checkpoint, tested by one process, gives what two processes found together.
    training = new_training(cells, out / "trial-0", tiny(precise_bn=0))
    restore(training)
    assert training.step == 4
    alone, _ = detect.test(training, open_voc(cells))
    assert alone == one
    assert len(list((out / "trial-0" / "checkpoints").glob("*.json"))) == 2
    assert (out / "trial-0" / "pictures" / "0.png").exists()


def precise(training: DetectorTraining, number: int) -> None:
    training.config = replace(training.config, precise_bn=number)
    precise_statistics(training, Batches(training.data, training.config, training.seed, CPU))


class _LosesADisk:
    """Rank 1 cannot read its second batch; rank 0 must not begin that step."""

    def __init__(self, cells, out, reading):
        self.cells, self.out, self.reading = Path(cells), Path(out), reading

    def __call__(self, number):
        training = new_training(self.cells, self.out / "trial", tiny())
        seen = []
        training.detector.register_forward_pre_hook(lambda *_: seen.append(1))
        read = Batches.read

        def broken(self, first, stop):
            for count, batch in enumerate(read(self, first, stop)):
                if count == 1 and number == 1:
                    raise InputError("no such file")
                yield batch

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Batches, "read", broken)
            with pytest.raises((InputError, RuntimeError)):
                self.reading(training, 3)
        assert len(seen) == 1
        os._exit(0)  # rank 1 first, which the other notices; nobody waits at the end


@pytest.mark.parametrize("reading", [steps, precise])
def test_a_process_without_its_images_is_noticed_before_the_others_wait_on_gpus(
    reading, cells, tmp_path
):
    in_two_processes(_LosesADisk(cells, tmp_path, reading))


class _LacksADetector:
    """Rank 1 cannot build its detector; rank 0 must not wait for it in DDP's constructor."""

    def __init__(self, cells, out):
        self.cells, self.out = Path(cells), Path(out)

    def __call__(self, number):
        def broken(*_):
            raise InputError("out of memory")

        wrapped = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(detector_training, "wrap", lambda *_: wrapped.append(1))
            if number == 1:
                patched.setattr(detect, "build_detector", broken)
            with pytest.raises((InputError, RuntimeError)):
                detect.run_trial(self.out / "trial", 0, very_narrow(), tiny(), open_voc(self.cells))
        assert wrapped == []
        os._exit(0)


def test_a_process_without_a_detector_is_noticed_before_the_others_wait_on_gpus(cells, tmp_path):
    in_two_processes(_LacksADetector(cells, tmp_path))


def test_a_batch_that_processes_cannot_share_is_refused(monkeypatch, cells):
    monkeypatch.setattr(detector_training, "world_size", lambda: 2)
    with pytest.raises(InputError, match=r"detect\.batch_size=3 must be a multiple of the 2"):
        Batches(open_voc(cells).train, tiny(batch_size=3), 0, CPU)


# -- pictures


def test_a_picture_shows_true_and_found_boxes_in_their_places(tmp_path):
    Image.new("RGB", (100, 80), "white").save(tmp_path / "a.png")
    nothing = np.zeros(1, dtype=np.bool_)
    boxes = np.array([[10.0, 20.0, 50.0, 60.0]])
    sample = DetectionImage(
        "a", str(tmp_path / "a.png"), 80, 100, boxes, np.array([0]), nothing, nothing
    )
    found = FoundObjects(
        np.array([[30, 30, 90, 70], [1, 1, 5, 5]], dtype=np.float32),
        np.array([0.9, 0.4], dtype=np.float32),
        np.array([1, 0]),
    )
    picture = np.asarray(compare(sample, found, ("cell", "plate")))
    true, right = picture[20:100, 8:108], picture[20:100, 176:276]
    orange, blue = (230, 159, 0), (86, 180, 233)
    assert tuple(true[55, 10]) == orange
    assert tuple(true[59, 40]) == orange
    assert (true != 255).any(axis=2).sum() > 100
    assert tuple(right[60, 30]) == blue
    assert tuple(right[3, 3]) == (255, 255, 255)  # below the score


def test_targets_without_masks_are_for_boxes_alone(cells):
    training_set = open_voc(cells).train
    batches = Batches(training_set, tiny(), 0, CPU)
    (images, targets), *_ = batches.read(0, 1)
    assert len(images) == 2
    assert all(isinstance(target, Target) and target.masks is None for target in targets)
