"""Readers of VOC's and COCO's layouts, and the transformations of a detector's images."""

import json
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from hardmix import InputError
from hardmix.evaluation.detection.coco import annotation_file, coco_ap, open_coco, read_coco
from hardmix.evaluation.detection.samples import (
    DetectionImage,
    FoundObjects,
    Rle,
    decode_mask,
    encode_mask,
    found_objects,
    run_lengths,
)
from hardmix.evaluation.detection.transforms import (
    Geometry,
    draw_geometry,
    grouped_batches,
    move_boxes,
    move_mask,
    plain_input,
    resized,
    training_input,
)
from hardmix.evaluation.detection.voc import VOC_CLASSES, open_voc, voc_ap
from hardmix.settings.evaluations import COCO_SIDES, TEST_SIDE, VOC_SIDES
from voc_folders import thing, voc_image, voc_lists

# pycocotools 2.0.11 under numpy 2; of no consequence.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture
def _tools():
    pytest.importorskip("pycocotools", reason="pip install 'hardmix[detection]'")


# -- VOC


@pytest.fixture
def plain(tmp_path):
    root = tmp_path / "cells"
    voc_image(root, "a", thing("red", 1, 1, 40, 30), thing("blue", 3, 4, 9, 8, difficult=1))
    voc_image(root, "b", thing("white", 5, 6, 7, 8), suffix=".png")
    voc_image(root, "c")
    return voc_lists(root, trainval=["a", "c"], test=["b"], train=["a"], val=["c"])


def test_a_plain_voc_folder(plain):
    train, test = open_voc(plain)
    assert train.classes == test.classes == ("blue", "red", "white")
    (image,) = train.images  # c has no object to learn from
    assert (image.id, image.height, image.width) == ("a", 30, 40)
    assert image.boxes.tolist() == [[0, 0, 40, 30], [2, 3, 9, 8]]
    assert image.classes.tolist() == [1, 0]
    assert image.difficult.tolist() == [False, True]
    assert [Path(one.path).name for one in test.images] == ["b.png"]
    assert train.dropped == ()


def test_test_images_without_objects_are_kept(plain):
    voc_lists(plain, test=["b", "c"])
    assert [one.id for one in open_voc(plain).test.images] == ["b", "c"]


def test_invalid_boxes_are_dropped_and_named(plain):
    bad = [(5, 6, 5, 5), (9, 3, 4, 8), (41, 1, 50, 9), ("nan", 1, 2, 3), (-9, 1, 0, 4)]
    voc_image(plain, "a", thing("red", -3, 2, 99, 12), *(thing("red", *box) for box in bad))
    train = open_voc(plain).train
    assert train.images[0].boxes.tolist() == [[-4, 1, 99, 12]]  # partly outside: cut later
    assert len(train.dropped) == 5
    assert train.dropped[0] == "a: red [5, 6, 5, 5] has no size"
    assert "outside the image of 40 x 30" in train.dropped[2]


def test_a_box_of_one_pixel_is_a_box(plain):
    voc_image(plain, "a", thing("red", 5, 7, 5, 7))
    train = open_voc(plain).train
    assert (train.images[0].boxes.tolist(), train.dropped) == ([[4, 6, 5, 7]], ())


def test_test_objects_with_invalid_boxes_count_as_not_found(plain):
    bad = thing("red", 9, 3, 4, 8)
    voc_image(plain, "a", thing("red", 1, 1, 9, 9), bad)
    voc_image(plain, "b", thing("red", 1, 1, 9, 9), bad, thing("red", 9, 3, 4, 8, difficult=1))
    train, test = open_voc(plain)
    assert len(train.images[0].unfindable) == 0
    assert test.dropped == (
        "b: red [9, 3, 4, 8] has no size; it counts as not found",
        "b: red [9, 3, 4, 8] has no size",
    )
    (image,) = test.images
    answer = FoundObjects(image.boxes.astype(np.float32), np.ones(1, np.float32), image.classes)
    assert voc_ap(test.images, [answer], len(test.classes), "VOC12 area").ap == pytest.approx(0.5)


def test_lists_without_test_or_trainval(plain):
    for name in ("trainval", "test"):
        (plain / "ImageSets" / "Main" / f"{name}.txt").unlink()
    voc_lists(plain, train=["a 1", "", "b -1"], val=["c"])
    train, test = open_voc(plain)
    assert [one.id for one in train.images] == ["a", "b"]
    assert [one.id for one in test.images] == ["c"]
    (plain / "ImageSets" / "Main" / "val.txt").unlink()
    with pytest.raises(InputError, match=r"lacks lists .*write the names"):
        open_voc(plain)


def test_whatever_is_broken_is_said_at_once(plain):
    voc_image(plain, "d", thing("red", 1, 2, 3, "x"))
    voc_image(plain, "e")
    (plain / "Annotations" / "e.xml").write_text("<annotation>")
    voc_lists(plain, trainval=["a", "gone", "d", "e"])
    with pytest.raises(InputError, match="3 of 4 images of the split trainval") as error:
        open_voc(plain)
    for words in ("gone: no image JPEGImages/gone.jpg", "d: could not convert", "e: no element"):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<annotation/>", "a: no <size><height> in <annotation>"),
        ("<a><size><width>0</width><height>5</height></size></a>", "<size> is 0 x 5"),
        (None, "a: No such file"),
    ],
)
def test_annotations_that_say_too_little(plain, text, words):
    file = plain / "Annotations" / "a.xml"
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(InputError) as error:
        open_voc(plain)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("lines", "words"), [([], "lists no images"), (["a", "a"], "lists an image twice")]
)
def test_lists_that_cannot_be_used(plain, lines, words):
    voc_lists(plain, trainval=lines)
    with pytest.raises(InputError, match=words):
        open_voc(plain)


def test_a_folder_in_another_layout_is_refused_with_a_hint(plain, tmp_path):
    with pytest.raises(InputError, match=f"set data.root={plain}"):
        open_voc(tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        open_voc(tmp_path / "none")


def test_no_object_to_learn_from(plain):
    voc_lists(plain, trainval=["c"])
    with pytest.raises(InputError, match="none of the 1 training images"):
        open_voc(plain)


@pytest.mark.parametrize("folder", ["", "VOCdevkit"])
def test_the_protocol_of_07_and_12(tmp_path, folder):
    devkit = tmp_path / folder
    voc_image(devkit / "VOC2007", "000001", thing("dog", 1, 1, 9, 9))
    voc_image(devkit / "VOC2007", "000002", thing("person", 1, 1, 9, 9, difficult=1))
    with pytest.raises(InputError, match="has VOC2007 but not VOC2012"):
        open_voc(tmp_path)
    voc_image(devkit / "VOC2012", "2008_1", thing("cat", "1.5", "2.25", "9", "9"))
    voc_lists(devkit / "VOC2007", trainval=["000001"], test=["000002"])
    voc_lists(devkit / "VOC2012", trainval=["2008_1"])
    train, test = open_voc(tmp_path)
    assert [one.id for one in train.images] == ["000001", "2008_1"]
    assert train.images[1].boxes.tolist() == [[0.5, 1.25, 9, 9]]
    assert [one.id for one in test.images] == ["000002"]
    assert test.classes == VOC_CLASSES
    assert tuple(sorted(VOC_CLASSES)) == VOC_CLASSES
    assert len(VOC_CLASSES) == 20
    assert train.classes[train.images[0].classes[0]] == "dog"
    voc_image(devkit / "VOC2012", "2008_1", thing("unicorn", 1, 1, 9, 9))
    with pytest.raises(InputError, match="'unicorn' in its annotation is not one of VOC's 20"):
        open_voc(tmp_path)


def test_blood_cells(shared):
    train, test = open_voc(shared / "bccd" / "BCCD")
    assert train.classes == ("Platelets", "RBC", "WBC")
    assert (len(train.images), len(test.images)) == (292, 72)
    assert sum(len(one.classes) for one in (*train.images, *test.images)) == 4888
    assert (train.dropped, test.dropped) == ((), ())  # two are one pixel wide
    answers = [
        FoundObjects(
            one.boxes.astype(np.float32), np.ones(len(one.classes), np.float32), one.classes
        )
        for one in test.images
    ]
    result = voc_ap(test.images, answers, 3)
    assert (result.ap, result.ap50, result.ap75) == (1, 1, 1)


# -- COCO

SQUARE = [4, 4, 14, 4, 14, 14, 4, 14]


def entry(number, image=1, category=3, box=(4, 4, 10, 10), mask=(SQUARE,), crowd=0):
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": list(box),
        "segmentation": mask if isinstance(mask, dict) else list(mask),
        "area": box[2] * box[3],
        "iscrowd": crowd,
    }


def coco_folder(root: Path, annotations, images=3, categories=(90, 3)) -> Path:
    """Images 1, 2, ... of 40 x 30 for both splits."""
    content = {
        "images": [
            {"id": k, "file_name": f"{k}.jpg", "height": 30, "width": 40}
            for k in range(images, 0, -1)
        ],
        "categories": [{"id": k, "name": f"class {k}"} for k in categories],
        "annotations": annotations,
    }
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        annotation_file(root, split).write_text(json.dumps(content))
        (root / f"{split}2017").mkdir(exist_ok=True)
        for k in range(1, images + 1):
            Image.new("RGB", (40, 30)).save(root / f"{split}2017" / f"{k}.jpg")
    return root


def rle_counts(pixels):
    """Uncompressed run lengths, column by column, as in COCO's files."""
    counts, last = [0], False
    for value in pixels.T.reshape(-1).tolist():
        if value != last:
            counts.append(0)
            last = value
        counts[-1] += 1
    return {"size": list(pixels.shape), "counts": counts}


@pytest.mark.usefixtures("_tools")
def test_coco_files(tmp_path):
    pixels = np.zeros((30, 40), dtype=bool)
    pixels[2:9, 5:30] = True
    crowd = entry(2, mask=rle_counts(pixels), category=90, crowd=1)
    root = coco_folder(tmp_path, [entry(1), crowd, {**crowd, "id": 3, "image_id": 2}])
    train, test = open_coco(root)
    assert train.classes == test.classes == ("class 3", "class 90")
    assert [one.id for one in train.images] == [1]  # 2 has a crowd alone, 3 has nothing
    assert [one.id for one in test.images] == [1, 2, 3]
    image = train.images[0]
    assert image.boxes.tolist() == [[4, 4, 14, 14]] * 2
    assert image.classes.tolist() == [0, 1]
    assert image.crowd.tolist() == [False, True]
    polygons, runs = image.masks
    assert decode_mask(polygons, 30, 40).sum() == 100
    assert isinstance(runs, Rle)
    np.testing.assert_array_equal(decode_mask(runs, 30, 40), pixels)
    assert encode_mask(pixels) == runs


@pytest.mark.usefixtures("_tools")
def test_compressed_run_lengths(tmp_path):
    pixels = np.random.default_rng(0).random((30, 40)) < 0.5
    coded = {"size": [30, 40], "counts": encode_mask(pixels).counts.decode()}
    image = open_coco(coco_folder(tmp_path, [entry(1, mask=coded)])).train.images[0]
    np.testing.assert_array_equal(decode_mask(image.masks[0], 30, 40), pixels)


@pytest.mark.usefixtures("_tools")
def test_invalid_objects_are_dropped_and_named(tmp_path):
    bad = [
        entry(2, box=(4, 4, 0, 9)),
        entry(3, box=(40, 4, 5, 9)),
        entry(4, mask=([1, 2, 3, 4],)),
        entry(5, image=77),
        entry(6, mask={"size": [3, 4], "counts": "abc"}),
        entry(7, mask={"size": [30, 40], "counts": "zzz"}),  # breaks off
        entry(8, mask={"size": [30, 40], "counts": [10, 20]}),  # not the whole image
        entry(9, mask={"size": [30, 40], "counts": [-10, 1210]}),
        entry(10, mask=([1, 2, 3, 4, 5, 1e9],)),  # rasterising it would fill the memory
        entry(11, mask=(["a"] * 6,)),
        entry(12, mask=([1, 2, 3, 4, 5, float("nan")],)),
        {**entry(13), "segmentation": 5},
        {**entry(14), "area": "large"},
        {key: value for key, value in entry(15).items() if key != "segmentation"},
    ]
    for data in open_coco(coco_folder(tmp_path, [entry(1), *bad])):
        assert len(data.images[0].classes) == 1
        assert [line.split(": ")[1] for line in data.dropped] == [
            f"annotation {number}" for number in range(2, 16)
        ]


@pytest.mark.usefixtures("_tools")
def test_area_and_iscrowd_may_be_missing(tmp_path):
    bare = {key: value for key, value in entry(1).items() if key not in ("area", "iscrowd")}
    image = open_coco(coco_folder(tmp_path, [bare])).test.images[0]
    assert (image.areas.tolist(), image.crowd.tolist()) == ([100], [False])


@pytest.mark.usefixtures("_tools")
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 12),
    st.integers(1, 12),
    st.floats(0, 1),
)
def test_run_lengths_are_those_of_the_pixels(seed, height, width, share):
    pixels = np.random.default_rng(seed).random((height, width)) < share
    assert run_lengths(encode_mask(pixels).counts) == rle_counts(pixels)["counts"]


@pytest.mark.usefixtures("_tools")
@pytest.mark.parametrize("kind", ["box", "mask"])
def test_skipped_test_objects_are_not_scored(tmp_path, kind):
    """They include objects at which pycocotools would fail after the training."""
    bad = [{**entry(2), "segmentation": []}, {**entry(3, image=2), "segmentation": None}]
    test = open_coco(coco_folder(tmp_path, [entry(1), *bad])).test
    pixels = decode_mask(test.images[0].masks[0], 30, 40)
    answer = found_objects(
        torch.tensor([[4.0, 4, 14, 14]]),
        torch.ones(1),
        torch.zeros(1).long(),
        torch.from_numpy(pixels[None]),
    )
    result = coco_ap(test, {1: answer}, kind)
    assert (result.ap, result.ap50, result.ap75) == pytest.approx((1, 1, 1))


@pytest.mark.usefixtures("_tools")
@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ([entry(1), entry(1)], "ids of annotations are missing or not unique"),
        ([entry(1, category=5)], "category_id=5, which is not in"),
        ([{"id": 1, "image_id": 1, "category_id": 3}], "not in COCO's format .KeyError: 'bbox'"),
        ([], "none of the 3 training images"),
    ],
)
def test_coco_files_that_cannot_be_used(tmp_path, annotations, words):
    with pytest.raises(InputError, match=words):
        open_coco(coco_folder(tmp_path, annotations))


@pytest.mark.usefixtures("_tools")
def test_missing_parts_of_coco(tmp_path):
    with pytest.raises(InputError, match=r"cannot be read \(No such file.*COCO's layout is"):
        open_coco(tmp_path)
    root = coco_folder(tmp_path, [entry(1)])
    (root / "train2017" / "2.jpg").unlink()
    with pytest.raises(InputError, match=r"1 of 3 images .* \(2.jpg\)"):
        open_coco(root)
    for text, words in (("{", "cannot be read"), ("[]", "must be an object with the lists")):
        annotation_file(root, "train").write_text(text)
        with pytest.raises(InputError, match=words):
            open_coco(root)


@pytest.mark.usefixtures("_tools")
def test_splits_with_other_categories_are_refused(tmp_path):
    root = coco_folder(tmp_path, [entry(1)])
    text = annotation_file(root, "val").read_text()
    annotation_file(root, "val").write_text(text.replace("class 90", "class 91"))
    with pytest.raises(InputError, match="train and val annotations have different categories"):
        open_coco(root)


def test_without_pycocotools(monkeypatch, tmp_path):
    for module in ("mask", "cocoeval"):
        monkeypatch.setitem(sys.modules, f"pycocotools.{module}", None)
    with pytest.raises(InputError, match=r"pip install 'hardmix\[detection\]'"):
        decode_mask((np.zeros((3, 2)),), 4, 4)
    with pytest.raises(InputError, match=r"pip install 'hardmix\[detection\]'"):
        open_coco(tmp_path)


@pytest.mark.usefixtures("_tools")
@pytest.mark.parametrize("kind", ["box", "mask"])
def test_the_truth_of_real_images_is_perfect(shared, kind):
    root = shared / "coco-mini"
    file = annotation_file(root, "val")
    data = read_coco(file, root / "val2017")
    assert (len(data.images), len(data.classes), data.dropped) == (27, 80, ())
    assert sum(int(one.crowd.sum()) for one in data.images) == 2
    answers = {}
    for one in data.images:
        kept = np.flatnonzero(~one.crowd)
        bitmaps = [decode_mask(one.masks[k], one.height, one.width) for k in kept]
        answers[one.id] = found_objects(
            torch.from_numpy(one.boxes[kept]).float(),
            torch.ones(len(kept)),
            torch.from_numpy(one.classes[kept]),
            torch.from_numpy(np.stack(bitmaps)),
        )
    result = coco_ap(data, answers, kind)
    assert (result.ap, result.ap50, result.ap75) == pytest.approx((1, 1, 1))


# -- geometry


def sample(path="a.jpg", height=30, width=40, boxes=(), masks=None, name="a", crowd=None):
    return DetectionImage(
        name,
        str(path),
        height,
        width,
        np.array(boxes, dtype=np.float64).reshape(-1, 4),
        np.arange(len(boxes), dtype=np.int64),
        np.zeros(len(boxes), dtype=bool),
        np.array(crowd or [0] * len(boxes), dtype=bool),
        masks,
    )


@pytest.mark.parametrize(
    ("height", "width", "side", "expected"),
    [
        (480, 640, 800, (800, 1067)),  # 1066.67: floor would give 1066
        (640, 480, 800, (1067, 800)),
        (500, 500, 480, (480, 480)),
        (333, 500, 480, (480, 721)),
        (400, 1000, 800, (533, 1333)),  # the longest side is the limit
        (1000, 100, 480, (1333, 133)),
    ],
)
def test_new_sizes(height, width, side, expected):
    assert resized(height, width, side) == expected


def test_the_sides_are_the_protocols():
    assert VOC_SIDES == (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    assert COCO_SIDES == (640, 672, 704, 736, 768, 800)


def test_choices_depend_on_seed_epoch_and_image_alone():
    images = [sample(name=str(k)) for k in range(400)]
    drawn = [draw_geometry(one, VOC_SIDES, 0, 0) for one in images]
    assert drawn == [draw_geometry(one, VOC_SIDES, 0, 0) for one in images]
    for seed, epoch in ((1, 0), (0, 1)):
        assert drawn != [draw_geometry(one, VOC_SIDES, seed, epoch) for one in images]
    sides = Counter(geometry.height for geometry in drawn)
    assert set(sides) == set(VOC_SIDES)
    assert min(sides.values()) > 15
    assert 160 < sum(geometry.flip for geometry in drawn) < 240
    flips_of_small = [geometry.flip for geometry in drawn if geometry.height < 640]
    assert 0.35 < np.mean(flips_of_small) < 0.65


def test_boxes_follow():
    one = sample(boxes=[[4, 6, 10, 30], [-4, 0, 99, 3]])
    plain_boxes = move_boxes(one, Geometry(60, 80, flip=False))
    assert plain_boxes.tolist() == [[8, 12, 20, 60], [0, 0, 80, 6]]
    mirrored = move_boxes(one, Geometry(60, 80, flip=True))
    assert mirrored.tolist() == [[60, 12, 72, 60], [0, 0, 80, 6]]
    assert one.boxes[0].tolist() == [4, 6, 10, 30]


@pytest.mark.usefixtures("_tools")
@given(
    corner=st.tuples(st.integers(0, 19), st.integers(0, 14)),
    size=st.tuples(st.integers(2, 20), st.integers(2, 15)),
    scale=st.sampled_from([1, 2, 3]),
    flip=st.booleans(),
    runs=st.booleans(),
)
def test_masks_follow_as_boxes_do(corner, size, scale, flip, runs):
    (x1, y1), (x2, y2) = corner, (corner[0] + size[0], corner[1] + size[1])
    pixels = np.zeros((30, 40), dtype=bool)
    pixels[y1:y2, x1:x2] = True
    polygon = np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]], dtype=np.float64)
    mask = encode_mask(pixels) if runs else (polygon,)
    one = sample(boxes=[[x1, y1, x2, y2]], masks=(mask,))
    geometry = Geometry(30 * scale, 40 * scale, flip)
    moved = move_mask(mask, one, geometry)
    rows, columns = np.flatnonzero(moved.any(axis=1)), np.flatnonzero(moved.any(axis=0))
    around = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    assert around == move_boxes(one, geometry)[0].tolist()
    assert moved.shape == (30 * scale, 40 * scale)


def seed_with(one, flip):
    return next(s for s in range(99) if draw_geometry(one, (60,), s, 0).flip == flip)


@pytest.mark.usefixtures("_tools")
def test_training_input(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    polygon = (np.array(SQUARE, dtype=np.float64).reshape(-1, 2),)
    nothing = encode_mask(np.zeros((30, 40), dtype=bool))
    boxes = [[4, 4, 14, 14], [0, 0, 9, 9], [5, 5, 9, 9], [50, 5, 60, 9]]
    masks = (polygon, polygon, nothing, polygon)
    one = sample(tmp_path / "a.png", boxes=boxes, masks=masks, crowd=[0, 1, 0, 0])
    wanted = Image.fromarray(pixels).resize((80, 60), Image.Resampling.BILINEAR)
    for flip in (False, True):
        made = training_input(one, (60,), seed_with(one, flip), 0, with_masks=True)
        expected = np.asarray(wanted)[:, ::-1] if flip else np.asarray(wanted)
        np.testing.assert_array_equal(made.image.permute(1, 2, 0).numpy(), expected)
        assert made.classes.tolist() == [0]  # a crowd, no mask, outside: all left out
        assert made.boxes.tolist() == ([[52, 8, 72, 28]] if flip else [[8, 8, 28, 28]])
        assert made.masks.sum() == 400
        assert made.masks[0, 10, 60 if flip else 10]
    line = (np.array([[5.0, 5], [9, 5], [7, 5]]),)  # has no pixel
    thin = sample(tmp_path / "a.png", boxes=boxes[:2], masks=(polygon, line))
    made = training_input(thin, (60,), 0, 0, with_masks=True)
    assert (made.classes.tolist(), made.masks[1].any().item()) == ([0, 1], False)
    without = training_input(one, (60,), 0, 0)
    assert without.masks is None
    assert without.classes.tolist() == [0, 2]


def test_test_input(tmp_path):
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    made = plain_input(sample(tmp_path / "a.png", boxes=[[1, 2, 3, 4]]), TEST_SIDE)
    assert made.image.shape == (3, 800, 1067)
    assert made.boxes.shape == (0, 4)
    assert made.sample.boxes.shape == (1, 4)


def test_sizes_that_differ_from_the_annotation_and_masks_that_are_not_there(tmp_path):
    Image.new("RGB", (41, 30)).save(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"has 41 x 30 pixels, but its annotation says 40 x 30"):
        plain_input(sample(tmp_path / "a.png"), TEST_SIDE)
    one = sample(tmp_path / "a.png", width=41, boxes=[[1, 2, 3, 4]])
    with pytest.raises(InputError, match="has boxes but no masks"):
        training_input(one, (60,), 0, 0, with_masks=True)


@pytest.mark.usefixtures("_tools")
def test_boxes_and_masks_of_real_images_stay_together(shared):
    train = open_coco(shared / "coco-mini").train
    assert (len(train.images), train.dropped) == (32, ())
    for one in train.images[:6]:
        made = training_input(one, (240,), 0, 0, with_masks=True)
        assert len(made.boxes) == int((~one.crowd).sum())
        for box, mask in zip(made.boxes, made.masks, strict=True):
            rows, columns = (torch.nonzero(mask.any(dim=axis))[:, 0] for axis in (1, 0))
            ends = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            assert np.abs(np.array(ends) - box.numpy()).max() < 2


# -- batches


def shapes(count):
    return [sample(name=str(k), width=40 if k % 3 else 20) for k in range(count)]


def test_batches_hold_one_kind_and_every_image_once_an_epoch():
    images = shapes(20)
    batches = list(islice(grouped_batches(images, 4, seed=0), 50))
    assert all(len(batch) == 4 for batch in batches)
    for batch in batches:
        assert len({images[position].width for _, position in batch}) == 1
    visits = Counter(visit for batch in batches for visit in batch)
    assert max(visits.values()) == 1
    first = {position for epoch, position in visits if epoch == 0}
    assert first == set(range(20))
    assert batches == list(islice(grouped_batches(images, 4, seed=0), 50))
    assert batches != list(islice(grouped_batches(images, 4, seed=1), 50))


def test_processes_share_one_stream():
    images = shapes(20)
    visits = [
        {visit for batch in islice(grouped_batches(images, 2, 0, rank, 2), 30) for visit in batch}
        for rank in range(2)
    ]
    assert not visits[0] & visits[1]
    early = {(0, position) for position in range(20)}
    assert early <= visits[0] | visits[1]


def test_batches_of_nothing_are_refused():
    for images, batch in (([], 4), (shapes(3), 0)):
        with pytest.raises(InputError, match="must be at least 1"):
            next(grouped_batches(images, batch, 0))
