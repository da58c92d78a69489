"""`hardmix explore`, `neighbours` and `features`, end to end on small real images."""

import csv
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hardmix import explore
from hardmix.commands import main as cli
from hardmix.data.image_set import ImageSet
from hardmix.evaluation import features
from hardmix.evaluation.features import extract, features_of, kept_file
from hardmix.evaluation.trained_encoder import load_encoder
from hardmix.explore import pictures
from hardmix.models.backbones import build_backbone
from hardmix.runs.folder import Run
from hardmix.runtime.device import choose_compute
from hardmix.settings.config import DataConfig, ModelConfig, PretrainConfig, TrainConfig
from hardmix.training.pretrain import pretrain
from ranks import tiny

pytestmark = pytest.mark.slow

CONFIG = PretrainConfig(
    recipe="demo",
    data=DataConfig(name="shapes", num_images=40, image_size=32, blur=False, workers=0),
    model=ModelConfig(backbone="small"),
    train=TrainConfig(device="cpu"),
)


def make_run(path: Path) -> Path:
    """Write a finished run without its training."""
    torch.manual_seed(0)
    run = Run.create(path, CONFIG)
    run.write_encoder(build_backbone("small", 3).trunk, CONFIG)
    return run.path


def scene(seed: int) -> Image.Image:
    """Return a picture of coloured patches, unlike that of any other seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((96, 72), Image.Resampling.BICUBIC)


@pytest.fixture
def photos(tmp_path) -> Path:
    """Twenty pictures in two classes; of the first a smaller copy and one of lower quality."""
    folder = tmp_path / "photos"
    for seed in range(20):
        file = folder / ("beach", "wood")[seed % 2] / f"IMG_{seed}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        scene(seed).save(file)
    scene(0).resize((64, 48)).save(folder / "wood" / "small.png")
    scene(0).save(folder / "wood" / "worse.jpg", quality=80)
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    return make_run(tmp_path / "run")


def command(capfd, *arguments) -> tuple[int, str]:
    with pytest.raises(SystemExit) as done:
        cli.main([str(word) for word in arguments])
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err, shown.err
    return done.value.code or 0, shown.out + shown.err


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.open(encoding="utf-8", newline="")))


def test_a_page_and_tables_of_everything(run, photos, tmp_path, capfd):
    out, query = tmp_path / "new" / "look.html", tmp_path / "query.png"
    scene(5).save(query)
    words = ["--data.root", photos, "--out", out, "--clusters", "3", "--query", query]
    code, shown = command(capfd, "explore", run, *words)
    assert code == 0, shown
    assert "1 group of near-duplicates: 2 images could be removed. 3 clusters." in shown
    page = out.read_text()
    assert "22 images of tmp" not in page
    assert "hardmix explore" in page
    tables = tmp_path / "new" / "look"
    copies = rows_of(tables / "duplicates.csv")
    # The most pixels first; of two with as many, the larger file.
    sizes = [(photos / place).stat().st_size for place in ("beach/IMG_0.png", "wood/worse.jpg")]
    first = ("beach/IMG_0.png", "wood/worse.jpg")[sizes.index(max(sizes))]
    assert [row["keep"] for row in copies] == ["yes", "no", "no"]
    assert copies[0]["name"] == str(photos / first)
    assert {row["name"] for row in copies} == {
        str(photos / each) for each in ("beach/IMG_0.png", "wood/small.png", "wood/worse.jpg")
    }
    assert [copies[0][side] for side in ("width", "height")] == ["96", "72"]
    grouped = rows_of(tables / "clusters.csv")
    assert len(grouped) == 22
    assert {row["cluster"] for row in grouped} == {"0", "1", "2"}
    near = rows_of(tables / "neighbours.csv")
    assert len(near) == 22 * 10
    assert all(row["name"] != row["neighbour"] for row in near)
    asked = rows_of(tables / "queries.csv")
    assert asked[0]["neighbour"] == str(photos / "wood" / "IMG_5.png")
    assert float(asked[0]["similarity"]) == pytest.approx(1, abs=1e-3)
    assert rows_of(tables / "suspect-labels.csv") is not None
    assert set(rows_of(tables / "outliers.csv")[0]) == {
        "rank",
        "name",
        "stands_out",
        "score",
    }


def test_a_second_page_replaces_the_first_and_its_tables(run, photos, tmp_path, capfd):
    out = tmp_path / "explore.html"
    words = ["explore", run, "--data.root", photos, "--out", out]
    assert command(capfd, *words, "--query", photos / "wood" / "IMG_1.png")[0] == 0
    assert (tmp_path / "explore" / "queries.csv").exists()
    assert command(capfd, *words)[0] == 0
    assert not (tmp_path / "explore" / "queries.csv").exists()


def test_images_in_memory_and_without_labels_can_be_explored(run, photos, tmp_path, capfd):
    assert command(capfd, "explore", run, "--out", tmp_path / "shapes.html")[0] == 0
    flat = tmp_path / "flat"
    shutil.copytree(photos / "beach", flat)
    words = ["--data.root", flat, "--out", tmp_path / "flat.html"]
    assert command(capfd, "explore", run, *words)[0] == 0
    assert not (tmp_path / "flat" / "suspect-labels.csv").exists()


def test_without_scikit_learn_the_page_has_no_clusters(run, photos, tmp_path, capfd, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    words = ["explore", run, "--data.root", photos, "--out", tmp_path / "explore.html"]
    code, shown = command(capfd, *words)
    assert code == 0
    assert "hardmix[analysis]" in shown
    assert not (tmp_path / "explore" / "clusters.csv").exists()
    assert command(capfd, *words, "--clusters", "3")[0] == 2


def test_bad_input_is_one_message_and_status_2(run, photos, tmp_path, capfd):
    (tmp_path / "mine.html").write_text("my own page")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "clusters.csv").write_text("my,own\n1,2\n")
    (tmp_path / "text.png").write_text("not an image")
    root = ["--data.root", photos]
    cases = [
        (["explore", run, *root, "--out", tmp_path / "mine.html"], "not a hardmix page"),
        (["explore", run, *root, "--out", tmp_path / "other.html"], "not a hardmix table"),
        (["explore", run, *root, "--out", tmp_path / "page"], "must end in .html"),
        (["explore", run, *root, "--clusters", "0"], "num_clusters=0"),
        (["explore", run, *root, "--clusters", "99"], "num_clusters=99"),
        (["explore", run, *root, "--agreement", "2"], "agreement=2"),
        (["explore", run, *root, "--groups", "7"], "groups=7"),
        (["explore", run, *root, "--groups", "("], "groups=("),
        (["explore", run, *root, "--weights", "timm"], "remove --weights"),
        (["explore", photos, "--weights", tmp_path / "none.pth"], "none.pth"),
        (["explore", photos, "--data.root", photos], "not a run"),
        (["explore", photos, "--out", photos.with_suffix(".html")], "the folder of the images"),
        (["explore", tmp_path / "other"], "no images"),
        (["explore", run, *root, "--query", tmp_path / "text.png"], "text.png"),
        (["explore", run, *root, "--query", tmp_path / "none.png"], "none.png"),
        (["explore", run, *root, "--data.channels", "1"], "data.channels=1"),
        (["explore", run, "--data.root", tmp_path / "nowhere"], "nowhere"),
        (["explore", tmp_path / "nothing"], "does not exist"),
        (["explore"], "FOLDER"),
    ]
    os.chdir(tmp_path)
    for words, said in cases:
        code, shown = command(capfd, *words)
        assert code == 2, (words, shown)
        assert said in shown, (words, shown)


def test_features_are_computed_once_until_encoder_or_images_change(run, photos, monkeypatch):
    computed = []

    def counted(*arguments, **options):
        computed.append(1)
        return extract(*arguments, **options)

    monkeypatch.setattr(features, "extract", counted)
    data = DataConfig(root=str(photos), image_size=32, workers=0)

    def times() -> int:
        computed.clear()
        features, images = features_of(run, data)
        alone = extract(load_encoder(run), images, data, compute=choose_compute(precision="fp32"))
        torch.testing.assert_close(features.features, alone.features)
        assert torch.equal(features.labels, alone.labels)
        return len(computed)

    assert [times(), times()] == [1, 0]
    file = photos / "wood" / "IMG_1.png"
    scene(99).save(file)
    assert [times(), times()] == [1, 0]
    os.utime(file, ns=(1, 1))  # the same name and size, written at another time
    assert [times(), times()] == [1, 0]
    torch.manual_seed(1)
    Run(run).write_encoder(build_backbone("small", 3).trunk, CONFIG)
    assert [times(), times()] == [1, 0]
    kept = kept_file(run, data)
    kept.write_bytes(kept.read_bytes()[:100])
    assert [times(), times()] == [1, 0]
    assert [each.name for each in (run / "features").iterdir()] == [kept.name]


def test_two_folders_of_one_name_are_kept_apart(run, photos, tmp_path):
    data = DataConfig(root=str(photos), image_size=32, workers=0)
    other = DataConfig(root=str(tmp_path / "b" / "photos"), image_size=32, workers=0)
    assert kept_file(run, data) != kept_file(run, other)
    assert kept_file(run, data).name.startswith("photos-train-")


def test_features_that_cannot_be_kept_are_still_there(run, photos, capfd):
    (run / "features").write_text("in the way")
    data = DataConfig(root=str(photos), image_size=32, workers=0)
    assert len(features_of(run, data)[0].ids) == 22
    assert "are not cached" in capfd.readouterr().err


def test_features_csv_carries_names_of_classes(run, photos, tmp_path, capfd):
    out = tmp_path / "features.csv"
    assert command(capfd, "features", run, "--data.root", photos, "--out", out)[0] == 0
    rows = rows_of(out)
    assert list(rows[0])[:4] == ["name", "label", "class", "feature0"]
    assert {(row["label"], row["class"]) for row in rows} == {("0", "beach"), ("1", "wood")}
    assert all(Path(row["name"]).parent.name == row["class"] for row in rows)


@pytest.mark.parametrize("method", ["mochi", "supervised"])
def test_a_stopped_run_is_judged_by_its_last_checkpoint(method, tmp_path, capfd):
    ended = pretrain(tiny(method), tmp_path / "run")
    words = ["--k", "5"]
    code, _ = command(capfd, "knn", ended.path, *words)
    assert code == 0
    whole = load_encoder(ended.path).state_dict()
    ended.encoder_file.unlink()
    code, shown = command(capfd, "knn", ended.path, *words)
    assert code == 0
    assert "is unfinished: using its encoder after step" in shown
    stopped = load_encoder(ended.path, or_checkpoint=True).state_dict()
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


def test_a_broken_checkpoint_is_passed_over_and_left_as_it_is(tmp_path, capfd):
    run = pretrain(tiny(train={"save_every": 1}), tmp_path / "run")
    run.encoder_file.unlink()
    newest = max(run.checkpoints.glob("step-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    before = sorted(file.name for file in run.checkpoints.iterdir())
    code, shown = command(capfd, "knn", run.path, "--k", "5")
    assert code == 0
    assert f"after step {newest.stem.removeprefix('step-').lstrip('0')}." not in shown
    assert sorted(file.name for file in run.checkpoints.iterdir()) == before


def test_pictures_are_the_middle_square_of_every_kind_of_image(tmp_path):
    tall = Image.new("RGB", (60, 200), "red")
    tall.paste("blue", (0, 70, 60, 130))
    files = [tmp_path / name for name in ("a.jpg", "b.png", "c.png")]
    tall.save(files[0], quality=95)
    tall.save(files[1])
    Image.new("L", (3, 5), 7).save(files[2])
    images = ImageSet("x", None, None, files=tuple(map(str, files)))
    made = pictures.make_pictures(images, [0, 1, 2], workers=0, tile=32)
    assert made.tiles.shape == (3, 32, 32, 3)
    assert np.abs(made.tiles[:2, 4:-4].astype(int) - [0, 0, 255]).max() < 12
    assert made.pixels.tolist() == [60 * 200, 60 * 200, 15]
    assert made.bytes.tolist() == [file.stat().st_size for file in files]
    files[1].unlink()
    gone = pictures.make_pictures(images, [0, 1, 2], workers=0, tile=32)
    assert (gone.tiles[1] == 128).all()
    sizes = [pictures.tile_for(number) for number in (10, 3000, 12_000, 50_000, 10**6)]
    assert sizes == [256, 128, 64, 32, 32]


def test_pictures_and_sizes_come_from_the_files_even_if_the_encoder_sees_less(run, photos):
    """With data.reduce, the encoder sees these at 64 pixels, and never at the original 96 x 72."""
    small = DataConfig(root=str(photos), image_size=16, workers=0, reduce=True)
    made = explore.explore_run(run, small).pictures
    assert (made.width.max(), made.height.max()) == (96, 72)
    whole = explore.explore_run(run, DataConfig(root=str(photos), image_size=16, workers=0))
    assert np.array_equal(made.tiles, whole.pictures.tiles)
