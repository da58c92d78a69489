"""The report's gallery of similar images: exact neighbours of the trunk's features."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from hardmix.commands import main as cli
from hardmix.errors import InputError
from hardmix.evaluation.features import features_of
from hardmix.explore.neighbour_sheets import NEAR, QUERIES, write_feature_gallery
from hardmix.models.backbones import build_backbone
from hardmix.runs.folder import Run
from hardmix.settings.config import DataConfig, ModelConfig, PretrainConfig, TrainConfig

pytestmark = pytest.mark.slow

IMAGES = 40


def encoder(run: Run, config: PretrainConfig, seed: int) -> None:
    torch.manual_seed(seed)
    run.write_encoder(build_backbone("small", 3).trunk, config)


@pytest.fixture
def run(tmp_path) -> Run:
    """A finished run on 40 pictures of coloured patches, without its training."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for seed in range(IMAGES):
        pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((300, 240)).save(photos / f"{seed}.png")
    config = PretrainConfig(
        recipe="demo",
        data=DataConfig(root=str(photos), image_size=32, workers=0),
        model=ModelConfig(backbone="small"),
        train=TrainConfig(device="cpu"),
    )
    made = Run.create(tmp_path / "run", config)
    encoder(made, config, 0)
    return made


def rows_of(run: Run) -> list[dict]:
    return json.loads((run.figures / "neighbours.json").read_text())["numbers"]["queries"]


def test_the_neighbours_are_those_of_the_centred_features(run):
    write_feature_gallery(run)
    features, images = features_of(run.path, run.config().data)
    vectors = features.features.double().numpy()
    vectors -= vectors.mean(axis=0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ids = features.ids.tolist()
    rows = rows_of(run)
    assert len(rows) == QUERIES
    for row in rows:
        similarity = vectors @ vectors[ids.index(row["id"])]
        ranked = [ids[n] for n in np.argsort(-similarity) if ids[n] != row["id"]]
        assert [each["id"] for each in row["near"]] == ranked[:NEAR]
        values = [similarity[ids.index(each["id"])] for each in row["near"]]
        assert [each["similarity"] for each in row["near"]] == pytest.approx(values, abs=1e-4)
        for each in (row, *row["near"]):
            assert each["name"] == each["file"] == images.files[each["id"]]


def test_no_row_repeats_what_an_earlier_one_shows(run):
    write_feature_gallery(run)
    shown: set[int] = set()
    repeated = []
    for row in rows_of(run):
        repeated.append(row["id"] in shown)
        shown |= {row["id"], *(each["id"] for each in row["near"])}
    assert repeated == sorted(repeated)  # only if nothing else is left
    assert not any(repeated[:3])


def test_it_is_made_again_only_for_another_encoder(run):
    file = write_feature_gallery(run)
    before = file.stat().st_mtime_ns, file.read_bytes()
    write_feature_gallery(run)
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before
    encoder(run, run.config(), 1)
    assert write_feature_gallery(run).read_bytes() != before[1]
    file.write_text("{")
    assert len(json.loads(write_feature_gallery(run).read_text())["numbers"]["queries"]) == QUERIES


def test_without_an_encoder_or_images_the_reason_is_given(run):
    run.encoder_file.rename(run.path / "elsewhere")
    with pytest.raises(InputError, match=r"no encoder\.safetensors"):
        write_feature_gallery(run)
    (run.path / "elsewhere").rename(run.encoder_file)
    shutil.rmtree(run.config().data.root)
    with pytest.raises(InputError, match="photos"):
        write_feature_gallery(run)


def test_a_report_looks_at_the_images_unless_told_not_to(run, tmp_path, capfd):
    page = tmp_path / "report.html"

    def report(*words: str) -> str:
        with pytest.raises(SystemExit) as done:
            cli.main(["report", str(run.path), "--out", str(page), *words])
        assert not done.value.code, capfd.readouterr()
        return page.read_text()

    text = report("--no-look")
    assert not run.figures.exists()
    assert "No neighbours of run: hardmix report RUN creates it." in text
    text = report()
    assert text.index('id="neighbours"') < text.index('id="map"') < text.index('id="runs"')
    assert f"{tmp_path.as_uri()}/photos/" in text
    assert "No neighbours" not in text
    shutil.rmtree(run.figures)
    shutil.rmtree(run.config().data.root)
    text = report()  # the images are gone: the page is written all the same
    assert 'id="neighbours"' not in text
    assert f"No neighbours of {run.path}: " in text
    assert "creates it" not in text.partition("No gallery")[0]
