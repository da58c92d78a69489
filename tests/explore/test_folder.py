"""Exploring a folder without training: copies, flaws, leaks, and what the result says."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageOps

from hardmix import explore
from hardmix.commands import main as cli
from hardmix.errors import InputError
from hardmix.explore import copies, pictures, quality
from hardmix.explore.copies import compare
from hardmix.explore.weights_at_hand import encoder_of
from hardmix.models.backbones import build_backbone
from hardmix.runs.folder import Run
from hardmix.settings.config import DataConfig, ModelConfig, PretrainConfig

pytestmark = pytest.mark.slow


def scene(seed: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """Return a picture with coarse and fine structure, unlike that of any other seed."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(40, 190, (5, 6, 3), dtype=np.uint8))
    picture = coarse.resize(size, Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(picture)
    for _ in range(12):
        x, y = (int(generator.integers(0, side)) for side in size)
        w, h = (int(generator.integers(side // 20, side // 3)) for side in size)
        draw.ellipse((x, y, x + w, y + h), fill=tuple(generator.integers(20, 200, 3).tolist()))
    return picture


def with_logo(picture: Image.Image) -> Image.Image:
    copy = picture.copy()
    width, height = copy.size
    draw = ImageDraw.Draw(copy)
    draw.rectangle((width * 0.7, height * 0.8, width * 0.95, height * 0.95), fill="white")
    draw.text((width * 0.72, height * 0.82), "LOGO", fill="red")
    return copy


def cropped(picture: Image.Image) -> Image.Image:
    width, height = picture.size
    return picture.crop((width // 20, height // 20, width - width // 20, height - height // 20))


EDITS = {
    "brighter": lambda picture: picture.point(lambda value: min(255, int(1.4 * value))),
    "cropped": cropped,
    "bordered": lambda picture: ImageOps.expand(picture, 10, "white"),
    "logo": with_logo,
    "smaller": lambda picture: picture.resize((90, 68)),
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Write 40 pictures in train and test, with every edit of some in the other folder."""
    folder = tmp_path_factory.mktemp("all") / "photos"
    for name in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (folder / name).mkdir(parents=True)
    for seed in range(40):
        place = folder / ("train", "test")[seed % 2] / ("cat", "dog")[seed // 2 % 2]
        scene(seed).save(place / f"{seed}.jpg", quality=95)
    for number, (name, edit) in enumerate(EDITS.items()):
        edit(scene(4 * number)).save(folder / "test" / "cat" / f"{name}.jpg", quality=90)
    same = (folder / "train" / "cat" / "36.jpg").read_bytes()
    (folder / "train" / "dog" / "again.jpg").write_bytes(same)
    blurred = scene(100).filter(ImageFilter.GaussianBlur(8))
    blurred.save(folder / "train" / "dog" / "blurred.jpg")
    scene(101).point(lambda value: value // 4).save(folder / "train" / "dog" / "dark.jpg")
    scene(102).point(lambda value: 200 + value // 5).save(folder / "train" / "dog" / "bright.jpg")
    scene(103, (24, 21)).save(folder / "train" / "dog" / "tiny.png")
    scene(104, (480, 120)).save(folder / "train" / "dog" / "long.png")
    Image.new("RGB", (160, 120), "teal").save(folder / "train" / "dog" / "empty.png")
    (folder / "train" / "dog" / "broken.jpg").write_bytes(b"\xff\xd8\xff not an image")
    return folder


@pytest.fixture(scope="module")
def found(photos) -> explore.Exploration:
    return explore.folder(photos, data=DataConfig(workers=0))


def names(found, rows) -> list[str]:
    return [Path(found.name(int(row))).name for row in rows]


def test_every_edited_copy_is_found_and_the_original_is_kept(found):
    groups = {
        names(found, [group.keep])[0]: names(found, group.others)
        for group in found.duplicates.groups
    }
    wanted = {f"{4 * number}.jpg": [f"{name}.jpg"] for number, name in enumerate(EDITS)}
    again = groups.pop("36.jpg", None) or groups.pop("again.jpg")
    assert again in (["again.jpg"], ["36.jpg"])
    assert groups == wanted
    certain = [float(group.similarities.min()) for group in found.duplicates.groups]
    assert certain == sorted(certain, reverse=True)
    assert certain[0] == 1
    assert min(certain) >= 0.85


def test_copies_across_train_and_test_are_leaks_and_exact_ones_are_listed(found):
    leaks = {(row["name"], row["copy"]): row for row in found.table("leaks")}
    assert len(leaks) == len(EDITS)
    assert {(row["group"], row["copy_group"]) for row in leaks.values()} == {("test", "train")}
    exact = [Path(row["name"]).name for row in found.table("exact-copies")]
    assert sorted(exact) == ["36.jpg", "again.jpg"]
    assert found.images.classes == ("cat", "dog")


def test_flaws_are_named(found):
    rows = found.table("quality")
    named = {row["flaw"]: Path(row["name"]).name for row in rows}
    assert named == {
        "blurred": "blurred.jpg",
        "dark": "dark.jpg",
        "bright": "bright.jpg",
        "empty": "empty.png",
        "tiny": "tiny.png",
        "long": "long.png",
        "unreadable": "broken.jpg",
    }
    assert len(rows) == 7


def test_the_result_says_by_what_images_were_compared(found):
    assert "No weights were named" in found.about
    assert "flaws" in repr(found)
    assert "cropped.jpg" in found.duplicates._repr_html_()
    for part in (found.neighbours, found.outliers, found.clusters):
        assert ".jpg" in part._repr_html_() or ".png" in part._repr_html_()
    with pytest.raises(InputError, match="there is no table 'copies'"):
        found.table("copies")


def test_groups_are_a_level_of_folders_or_a_pattern():
    names = ["a/p1_x.png", "a/p2_x.png", "b/p1_y.png"]
    assert quality.groups_of(names, None) is None
    assert quality.groups_of(names, "1") == ["a", "a", "b"]
    assert quality.groups_of(names, r"(p\d)_") == ["p1", "p2", "p1"]
    assert quality.groups_of(["train/a.png", "val/b.png"], None) == ["train", "val"]
    with pytest.raises(InputError, match="finds 0 groups"):
        quality.groups_of(names, "2")


def test_the_check_finds_the_place_of_one_picture_in_another():
    whole = scene(7)
    part = whole.crop((16, 6, 150, 110))
    side = (pictures.GREY, pictures.GREY)
    greys = np.stack(
        [np.asarray(each.convert("L").resize(side)) for each in (whole, part, scene(8))]
    )
    pairs = np.array([[0, 1], [1, 0], [0, 2], [1, 2]])
    agreement = compare(greys, pairs).agreement
    assert agreement[:2].min() > 0.95
    assert agreement[2:].max() < 0.5
    first, second = (torch.from_numpy(greys[[row]]).float()[:, None] for row in (0, 1))
    start, _ = copies.coarse_places(torch.from_numpy(greys), torch.tensor([[0, 1]]))
    place = copies._refined(first, second, start)[0]
    scale_x, scale_y = 160 / 134, 120 / 104
    wanted = [scale_x, (80 - 83) / 67, scale_y, (60 - 58) / 52]
    assert place.tolist() == pytest.approx(wanted, abs=0.02)


def test_a_pair_compares_alone_as_it_does_among_others():
    originals = [scene(seed) for seed in range(4)]
    greys = np.stack([np.array(each.convert("L").resize((64, 64))) for each in originals * 2])
    pairs = np.array([(row, row + 4) for row in range(4)])
    together = compare(greys, pairs).agreement
    alone = [compare(greys, pairs[row : row + 1]).agreement[0] for row in range(4)]
    assert (together > 0.99).all()
    assert np.allclose(alone, together, atol=1e-5)


def test_a_border_of_one_colour_is_measured():
    grey = np.asarray(scene(3).convert("L").resize((64, 64)))
    assert pictures.border_of(grey) == 0
    framed = grey.copy()
    framed[:4] = framed[-4:] = 255
    framed[:, :4] = framed[:, -4:] = 255
    assert pictures.border_of(framed) == pytest.approx(1 - (56 / 64) ** 2)


def test_the_command_explores_a_folder_and_names_its_features(photos, tmp_path, capfd):
    page = tmp_path / "look.html"
    with pytest.raises(SystemExit) as done:
        cli.main(["explore", str(photos), "--out", str(page), "--data.workers", "0"])
    assert not done.value.code
    shown = capfd.readouterr()
    assert "No weights were named" in shown.out + shown.err
    assert (tmp_path / "look" / "leaks.csv").read_text().count("\n") == 1 + len(EDITS)


def test_weights_are_a_run_a_file_of_ours_or_of_another_program(tmp_path):
    torch.manual_seed(0)
    trunk = build_backbone("small", 3).trunk
    config = PretrainConfig(
        data=DataConfig(name="shapes", image_size=32), model=ModelConfig(backbone="small")
    )
    run = Run.create(tmp_path / "run", config)
    run.write_encoder(trunk, config)
    foreign = tmp_path / "resnet18.pth"
    torch.save(build_backbone("resnet18", 3).trunk.state_dict(), foreign)
    for weights, backbone, size in (
        (run.path, "small", 32),
        (run.encoder_file, "small", 32),
        (foreign, "resnet18", 224),
        (None, "plain", 96),
    ):
        encoder, about = encoder_of(weights)
        assert (encoder.backbone, encoder.image_size) == (backbone, size)
        assert str(weights or "No weights") in about
    with pytest.raises(InputError, match="does not exist: name a run"):
        encoder_of(tmp_path / "nothing.pth")
