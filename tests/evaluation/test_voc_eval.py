"""VOC's AP against the rules written out slowly, and COCO's against cases with a known answer."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hardmix import InputError
from hardmix.evaluation.detection.coco import CocoAP, coco_ap
from hardmix.evaluation.detection.samples import (
    DetectionImage,
    DetectionSet,
    FoundObjects,
    encode_mask,
)
from hardmix.evaluation.detection.voc import (
    THRESHOLDS,
    VocAP,
    average_precision,
    voc_ap,
)

METRICS = ("VOC07 11-point", "VOC12 area")


def image(boxes, classes, difficult=None, name="a") -> DetectionImage:
    return DetectionImage(
        name,
        f"{name}.jpg",
        100,
        100,
        np.array(boxes, dtype=np.float64).reshape(-1, 4),
        np.array(classes, dtype=np.int64),
        np.array(difficult or [0] * len(classes), dtype=bool),
        np.zeros(len(classes), dtype=bool),
    )


def found(boxes=(), scores=(), classes=(), masks=None) -> FoundObjects:
    return FoundObjects(
        np.array(boxes, dtype=np.float32).reshape(-1, 4),
        np.array(scores, dtype=np.float32),
        np.array(classes, dtype=np.int64),
        masks,
    )


# -- the rules, one detection after the other


def slow_iou(first, second):
    wide = min(first[2], second[2]) - max(first[0], second[0]) + 1
    high = min(first[3], second[3]) - max(first[1], second[1]) + 1
    if wide <= 0 or high <= 0:
        return 0.0
    sizes = [(box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (first, second)]
    return wide * high / (sizes[0] + sizes[1] - wide * high)


def slow_lines(detections, number):
    """(score, position of the image, box) as the protocol prints them, the most certain first."""
    lines = []
    for position, one in enumerate(detections):
        for box, score, label in zip(one.boxes, one.scores, one.classes, strict=True):
            if label == number:
                x1, y1, x2, y2 = box[0] + np.float32(1), box[1] + np.float32(1), box[2], box[3]
                texts = f"{x1:.1f} {y1:.1f} {x2:.1f} {y2:.1f}".split()
                lines.append((float(f"{score:.3f}"), position, [float(text) for text in texts]))
    return sorted(lines, key=lambda line: -line[0])  # keeps the order of equal ones


def slow_objects(one, number):
    return [
        ([box[0] + 1, box[1] + 1, box[2], box[3]], bool(difficult))
        for box, label, difficult in zip(one.boxes, one.classes, one.difficult, strict=True)
        if label == number
    ]


def slow_class_ap(images, detections, number, threshold, metric):
    objects = [slow_objects(one, number) for one in images]
    positives = sum(not difficult for one in objects for _, difficult in one)
    if positives == 0:
        return math.nan
    taken, right, wrong, points = set(), 0, 0, []
    for _, position, box in slow_lines(detections, number):
        best, which = -1.0, None
        for index, (truth, _) in enumerate(objects[position]):
            if slow_iou(box, truth) > best:
                best, which = slow_iou(box, truth), index
        if best <= threshold or (position, which) in taken:
            wrong += 1
        elif not objects[position][which][1]:
            taken.add((position, which))
            right += 1
        points.append((right / positives, right / (right + wrong) if right + wrong else 0.0))
    return slow_ap(points, metric)


def slow_ap(points, metric):
    def best_from(recall):
        return max((precision for at, precision in points if at >= recall), default=0.0)

    if metric == "VOC07 11-point":
        return sum(best_from(k * 0.1) for k in range(11)) / 11
    area, last = 0.0, 0.0
    for recall in sorted({at for at, _ in points}):
        area += (recall - last) * best_from(recall)
        last = recall
    return area


def slow_voc_ap(images, detections, classes, metric):
    table = np.array(
        [
            [slow_class_ap(images, detections, number, t, metric) for t in THRESHOLDS]
            for number in range(classes)
        ]
    )
    means = np.nanmean(table, axis=0)
    return means.mean(), means[0], means[5], table.mean(axis=1)


def scene(seed: int, images: int, classes: int):
    """Objects and detections near them: some difficult, double, of equal score, or nowhere."""
    rng = np.random.default_rng(seed)
    truths, answers = [], []
    for number in range(images):
        objects = int(rng.integers(0, 5))
        corner = rng.integers(0, 60, (objects, 2))
        boxes = np.concatenate([corner, corner + rng.integers(3, 40, (objects, 2))], axis=1)
        labels = rng.integers(0, classes, objects)
        truths.append(image(boxes, labels, (rng.random(objects) < 0.3).tolist(), str(number)))
        copies = np.repeat(np.arange(objects), rng.integers(0, 4, objects))
        near = boxes[copies] + rng.normal(0, 3, (len(copies), 4)) * (rng.random() < 0.8)
        away = rng.uniform(0, 50, (int(rng.integers(0, 3)), 2))
        far = np.concatenate([away, away + 20], axis=1)
        guessed = np.where(
            rng.random(len(copies)) < 0.8, labels[copies], rng.integers(0, classes, len(copies))
        )
        scores = rng.random(len(near) + len(far)).round(int(rng.integers(1, 5)))
        all_boxes = np.concatenate([near, far]).clip(0, 100)
        wide_enough = (all_boxes[:, 2:] - all_boxes[:, :2] > 0.5).all(axis=1)
        all_labels = np.concatenate([guessed, rng.integers(0, classes, len(far))])
        answers.append(found(all_boxes[wide_enough], scores[wide_enough], all_labels[wide_enough]))
    return truths, answers


@given(
    seed=st.integers(0, 2**32),
    images=st.integers(1, 12),
    classes=st.integers(1, 4),
    metric=st.sampled_from(METRICS),
)
def test_ap_follows_the_rules(seed, images, classes, metric):
    truths, answers = scene(seed, images, classes)
    if all(one.difficult.all() for one in truths):
        with pytest.raises(InputError, match="object that counts"):
            voc_ap(truths, answers, classes, metric)
        return
    result = voc_ap(truths, answers, classes, metric)
    ap, ap50, ap75, by_class = slow_voc_ap(truths, answers, classes, metric)
    assert (result.ap, result.ap50, result.ap75) == pytest.approx((ap, ap50, ap75), abs=1e-12)
    np.testing.assert_allclose(result.by_class, by_class, atol=1e-12)
    assert result.metric == metric


# -- cases with a known answer

BOX = [10.0, 10.0, 30.0, 30.0]


def ap50(truth, answer, classes=1):
    return voc_ap([truth], [answer], classes).ap50


@pytest.mark.parametrize("metric", METRICS)
def test_the_truth_as_an_answer_is_perfect(metric):
    truth = image([BOX, [40, 40, 80, 90]], [0, 1])
    result = voc_ap([truth], [found(truth.boxes, [0.9, 0.8], [0, 1])], 2, metric)
    assert (result.ap, result.ap50, result.ap75) == (1, 1, 1)
    assert result.by_class == (1, 1)


def test_nothing_found_is_zero():
    assert voc_ap([image([BOX], [0])], [found()], 1).ap == 0


def test_a_second_detection_of_an_object_is_wrong():
    truth = image([BOX, [60, 60, 90, 90]], [0, 0])
    answer = found([BOX, BOX, [60, 60, 90, 90]], [0.9, 0.8, 0.7], [0, 0, 0])
    assert ap50(truth, answer) == pytest.approx((6 * 1 + 5 * 2 / 3) / 11)


def test_a_difficult_object_is_neither_right_nor_wrong_however_often_it_is_found():
    truth = image([BOX, [60, 60, 90, 90]], [0, 0], [1, 0])
    answer = found([BOX, BOX, [60, 60, 90, 90]], [0.9, 0.8, 0.7], [0, 0, 0])
    assert ap50(truth, answer) == 1


def test_only_the_object_that_overlaps_most_is_looked_at():
    truth = image([BOX, [10, 10, 30, 28]], [0, 0])
    answer = found([BOX, [10, 10, 30, 29.5]], [0.9, 0.8], [0, 0])
    assert ap50(truth, answer) == pytest.approx(6 / 11)  # the second is nearer the first object


def test_iou_must_exceed_the_threshold_and_counts_the_last_pixel():
    truth = image([[0, 0, 10, 10]], [0])  # pixels 1 to 10
    half, more = found([[0, 0, 10, 5]], [1], [0]), found([[0, 0, 10, 5.1]], [1], [0])
    assert ap50(truth, half) == 0
    assert ap50(truth, more) == 1


def test_scores_are_equal_from_the_fourth_decimal_on():
    truth = image([BOX], [0])
    wrong_first = found([[60, 60, 90, 90], BOX], [0.9001, 0.9004], [0, 0])
    assert ap50(truth, wrong_first) == pytest.approx(0.5)
    assert ap50(truth, found(wrong_first.boxes, [0.9001, 0.9006], [0, 0])) == 1


def test_boxes_are_rounded_to_a_tenth():
    truth = image([[0, 0, 10, 10]], [0])
    assert ap50(truth, found([[0, 0, 10, 5.04]], [1], [0])) == 0
    assert ap50(truth, found([[0, 0, 10, 5.06]], [1], [0])) == 1


def test_the_eleven_recalls_are_multiples_of_a_binary_tenth():
    recall, precision = np.array([0.3]), np.array([1.0])
    assert average_precision(recall, precision, "VOC07 11-point") == pytest.approx(3 / 11)


def test_classes_without_objects_are_left_out():
    truth = image([BOX, [60, 60, 90, 90]], [0, 2], [0, 1])
    result = voc_ap([truth], [found([BOX, BOX], [0.9, 0.9], [0, 1])], 3)
    assert result.ap == 1
    assert result.by_class[0] == 1
    assert all(math.isnan(value) for value in result.by_class[1:])


def test_useless_input_is_refused():
    truth = image([BOX], [0])
    with pytest.raises(InputError, match="0 lists of detections for 1 images"):
        voc_ap([truth], [], 1)
    with pytest.raises(InputError, match="image a contain NaN"):
        voc_ap([truth], [found([BOX], [math.nan], [0])], 1)


# -- COCO

COCO_BOXES = [[10, 10, 30, 30], [40, 20, 80, 60]]


@pytest.fixture
def coco_set():
    pytest.importorskip("pycocotools", reason="pip install 'hardmix[detection]'")
    polygons = tuple(
        (np.array([[x, y], [X, y], [X, Y], [x, Y]], float),) for x, y, X, Y in COCO_BOXES
    )
    none, boxes = np.zeros(2, dtype=bool), np.array(COCO_BOXES, dtype=float)
    image = DetectionImage(7, "a.jpg", 80, 90, boxes, np.arange(2), none, none, polygons)
    empty = DetectionImage(
        9, "b.jpg", 80, 90, boxes[:0], np.arange(0), none[:0], none[:0], masks=()
    )
    return DetectionSet((image, empty), ("cat", "dog"), ())


def square(x1, y1, x2, y2):
    pixels = np.zeros((80, 90), dtype=bool)
    pixels[y1:y2, x1:x2] = True
    return encode_mask(pixels)


@pytest.mark.parametrize("kind", ["box", "mask"])
def test_coco_ap_of_the_truth_is_one(coco_set, kind, capsys):
    masks = tuple(square(*box) for box in COCO_BOXES)
    result = coco_ap(coco_set, {7: found(COCO_BOXES, [0.9, 0.8], [0, 1], masks)}, kind)
    assert (result.ap, result.ap50, result.ap75) == pytest.approx((1, 1, 1))
    assert (result.small, result.medium) == pytest.approx((1, 1))
    assert math.isnan(result.large)
    assert result.kind == kind
    assert capsys.readouterr().out == ""


def test_boxes_and_masks_are_judged_apart(coco_set):
    masks = (square(10, 10, 30, 18), square(40, 20, 80, 60))  # the first covers less than half
    answer = {7: found(COCO_BOXES, [0.9, 0.8], [0, 1], masks)}
    assert coco_ap(coco_set, answer, "box").ap == pytest.approx(1)
    assert coco_ap(coco_set, answer, "mask").ap == pytest.approx(0.5)


@pytest.mark.parametrize("answer", [{}, {7: found()}, {9: found()}])
def test_coco_ap_of_nothing_is_zero(coco_set, answer):
    assert coco_ap(coco_set, answer, "box").ap == 0


def test_coco_refuses_foreign_images_and_missing_masks(coco_set):
    with pytest.raises(InputError, match=r"first: id 8.* are not among"):
        coco_ap(coco_set, {8: found()}, "box")
    with pytest.raises(InputError, match="have no masks"):
        coco_ap(coco_set, {7: found([BOX], [1], [0])}, "mask")


def test_the_two_metrics_are_two_types():
    assert not issubclass(VocAP, CocoAP)
    assert not issubclass(CocoAP, VocAP)
