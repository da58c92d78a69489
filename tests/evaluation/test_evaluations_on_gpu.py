"""Evaluations on a pretended GPU do not wait where they need not."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchvision.models import ResNet
from torchvision.models.resnet import Bottleneck

from gpu_events import FP32, gpu
from hardmix.data.image_set import ImageSet
from hardmix.data.loading import ViewLoader
from hardmix.evaluation import finetune, knn, neighbours, probe
from hardmix.evaluation.detection.c4 import C4Detector, Target
from hardmix.evaluation.detection.detect import find_in
from hardmix.evaluation.detection.detector_training import (
    DetectorTraining,
    build_detector,
    build_optimizer,
    train_until,
)
from hardmix.evaluation.features import extract
from hardmix.evaluation.linear import ClassifierTraining, train_epoch
from hardmix.models import batch_norm
from hardmix.runs.folder import Run
from hardmix.runtime.console import progress
from hardmix.runtime.device import send
from hardmix.settings.config import DataConfig
from hardmix.settings.evaluations import SCHEDULES, FinetuneConfig
from pretended_gpu import GPU

pytestmark = pytest.mark.slow

MOST_LAUNCHES = {
    "features, four batches": 30,  # counted: 28
    "an epoch of linear, four batches": 335,  # 326
    "k-NN, four parts": 360,  # 350, each query left out of its own neighbours
    "a probe, sgd": 785,  # 767
    "a probe, lbfgs": 2500,  # 2086: its line search decides
    "an epoch of fine-tuning, four batches": 355,  # 348
    "a detector's step, voc": 700,  # 687
    "a detector's step, coco": 750,  # 735
    "detecting, voc": 185,  # 178
    "detecting, coco": 2050,  # 2010, of 100 masks
}
"""Most launches with the small networks and sets of these tests."""


def assert_few_launches(log, what, times=1):
    assert len(log.launches) <= times * MOST_LAUNCHES[what], log.by_place(log.launches)


def images_of(number):
    pixels = torch.randint(0, 256, (number, 3, 40, 36), dtype=torch.uint8)
    return ImageSet("x", torch.randint(0, 5, (number,)), tuple("abcde"), tensor=pixels)


def test_features_are_read_a_batch_late():
    trunk = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten())
    data = DataConfig(image_size=24, workers=0)
    with gpu() as log:
        trunk.to("cuda")
        expected = 4
        log.clear()
        found = extract(trunk, images_of(60), data, compute=FP32, batch_size=15)
        assert len(log.synchronisations) == expected
        assert (log.blocking_copies, log.mixed_devices) == ([], [])
        assert_few_launches(log, "features, four batches")
    assert found.features.shape == (60, 4 * 22 * 22)


@pytest.mark.usefixtures("unchecked_types")
def test_a_linear_classifier_is_trained_without_waiting():
    encoder = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten())
    images, data = images_of(64), DataConfig(image_size=12, workers=0, augmentation="plain")
    with gpu() as log, progress("test", 9) as meter:
        evaluated = type("Evaluated", (), {"compute": FP32, "encoder": encoder.to("cuda")})
        classifier = torch.nn.Linear(400, 5).to("cuda")
        optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1, momentum=0.9)
        loader = ViewLoader(images, data, 16, 0, GPU, views=1)
        training = ClassifierTraining(classifier, optimizer, loader, Run("nowhere"))
        train_epoch(evaluated, training, 0, meter)
        log.clear()
        train_epoch(evaluated, training, 1, meter)
        assert len(log.synchronisations) == 1  # the mean loss of the epoch
        assert (log.blocking_copies, log.mixed_devices) == ([], [])
        assert_few_launches(log, "an epoch of linear, four batches")


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_nearest_neighbours_vote_without_waiting(leave_one_out, monkeypatch):
    monkeypatch.setattr(neighbours, "TILE", 16)
    monkeypatch.setattr(neighbours, "QUERIES", 16)  # in four parts
    monkeypatch.setattr(neighbours, "ROWS", 25)
    features, labels = torch.randn(60, 8), torch.arange(60) % 5
    expected = knn.knn_accuracy(
        features, labels, features, labels, k=9, leave_one_out=leave_one_out
    )
    with gpu() as log:
        there = features.to("cuda"), labels.to("cuda")
        log.clear()
        found = knn.knn_accuracy(*there, *there, k=9, leave_one_out=leave_one_out)
        assert len(log.synchronisations) == 2  # the labels' range, the accuracy
        assert (log.blocking_copies, log.mixed_devices) == ([], [])
        assert_few_launches(log, "k-NN, four parts")
    assert found == pytest.approx(expected)


def test_a_probe_on_features_waits_for_its_solver_alone():
    features, labels = torch.randn(60, 8), torch.arange(60) % 5
    with gpu() as log:
        there = features.to("cuda"), labels.to("cuda")
        log.clear()
        probe.probe_accuracy(*there, *there, solver="sgd", penalty=1e-4)
        assert len(log.synchronisations) == 2  # the labels' range, the accuracy
        assert [entry.what for entry in log.blocking_copies] == ["to", "to"]  # first weights
        assert log.mixed_devices == []
        assert_few_launches(log, "a probe, sgd")
        log.clear()
        # Its line search compares numbers.
        probe.probe_accuracy(*there, *there, solver="lbfgs", penalty=1e-4)
        assert (len(log.blocking_copies), log.mixed_devices) == (2, [])
        assert_few_launches(log, "a probe, lbfgs")


@pytest.mark.usefixtures("unchecked_types")
def test_fine_tuning_never_waits_for_a_step():
    data, images = DataConfig(image_size=12, workers=0, augmentation="plain"), images_of(64)
    for epochs in (1, 3):
        trunk = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten())
        with gpu() as log:
            parts = {"compute": FP32, "train": images, "data": data, "num_classes": 5}
            options = FinetuneConfig(epochs=epochs, batch_size=16)
            finetune.train(SimpleNamespace(**parts), trunk.to("cuda"), options)
            assert (log.synchronisations, log.mixed_devices) == ([], [])
            assert len(log.blocking_copies) == 4  # the network's, before its first step
            assert_few_launches(log, "an epoch of fine-tuning, four batches", epochs)


class Batches:
    """Two images and their objects, with masks, at each step."""

    def read(self, first, stop):
        for _ in range(first, stop):
            image = torch.randint(0, 256, (3, 96, 80), dtype=torch.uint8)
            boxes = torch.tensor([[4.0, 4, 40, 50], [30, 20, 70, 90]])
            masks = torch.rand(2, 96, 80) < 0.5
            target = Target(*(send(x, GPU) for x in (boxes, torch.tensor([0, 1]), masks)))
            yield [send(image, GPU)] * 2, [target] * 2


MOST_READS = 9
"""Reads of a detector's step for each image: the numbers of boxes that match, are drawn, and
survive NMS decide the sizes of later tensors, as in detectron2."""


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("task", ["voc", "coco"])
def test_a_detectors_step_reads_sizes_alone_and_copies_nothing_back(task, tmp_path, monkeypatch):
    torch.manual_seed(0)
    trunk = ResNet(Bottleneck, [1, 1, 1, 1], width_per_group=8)
    config = SCHEDULES[task, "short"]
    with gpu() as log, progress("test", 9) as meter:
        with monkeypatch.context() as several:
            several.setattr(batch_norm, "world_size", lambda: 2)
            detector = build_detector(trunk, 2, config, GPU)
        assert isinstance(detector, C4Detector)
        assert not any(type(layer) is nn.BatchNorm2d for layer in detector.modules())
        optimizer = build_optimizer(detector, config)
        training = DetectorTraining(config, 0, None, Run(tmp_path), detector, optimizer, FP32)
        train_until(training, 1, Batches(), meter)
        log.clear()
        train_until(training, 2, Batches(), meter)
        late = [entry for entry in log.synchronisations if entry.what == "Event.synchronize"]
        assert len(late) == 1
        assert len(log.synchronisations) - 1 <= 2 * MOST_READS, log.by_place(log.synchronisations)
        assert log.blocking_copies == [], log.by_place(log.blocking_copies)
        assert log.mixed_devices == []
        assert_few_launches(log, f"a detector's step, {task}")


MOST_READS_OF_A_DETECTION = 8
"""Reads of the numbers of boxes after size limits and NMS, in both stages, and of the results."""
MOST_READS_OF_MASKS = {"voc": 0, "coco": 2}
"""Reads of the result, and of the corners of all boxes that masks are pasted into."""


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("task", ["voc", "coco"])
def test_detecting_reads_sizes_and_its_results_alone(task):
    torch.manual_seed(0)
    trunk = ResNet(Bottleneck, [1, 1, 1, 1], width_per_group=8)
    picture = torch.randint(0, 256, (3, 96, 80), dtype=torch.uint8)
    sample = SimpleNamespace(height=48, width=40)
    with gpu() as log:
        detector = build_detector(trunk, 2, SCHEDULES[task, "short"], GPU).eval()
        log.clear()
        found = find_in(detector, SimpleNamespace(sample=sample, image=picture), FP32)
        waits = len(log.synchronisations) + len(log.blocking_copies)
        places = log.by_place(log.synchronisations), log.by_place(log.blocking_copies)
        assert waits <= MOST_READS_OF_A_DETECTION + MOST_READS_OF_MASKS[task], places
        assert log.mixed_devices == []
        assert_few_launches(log, f"detecting, {task}")
    assert found.boxes.shape[1] == 4
