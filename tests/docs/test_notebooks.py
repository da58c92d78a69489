"""The views of values in notebooks, and the notebooks of examples/notebooks."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

import hardmix
from fake_runs import config_of, metrics_of, result_of, verdict_of, write_run
from hardmix import explore
from untrained_runs import make_run


def html_of(value) -> str:
    """Return the HTML of a value, which is small, acts on nothing and fetches nothing."""
    html = value._repr_html_()
    assert len(html) < 200_000
    assert not re.search(r"<script|javascript:|src='(?!data:)|\son\w+=", html)
    return html


def test_a_run_shows_what_it_is_its_results_and_its_curves(tmp_path):
    config, hostile = config_of(), "<script>alert(1)</script>"
    results = {"knn": result_of(config, 0.6), "verdict": verdict_of(text=f"Better. {hostile}")}
    run = hardmix.Run(write_run(tmp_path / "run", config, metrics_of(4), results))
    assert repr(run) == f"Run('{tmp_path}/run'): MoCHi (128, 128, 16), state unknown"
    html = html_of(run)
    assert "60.0 % Top-1" in html
    assert html.count("<polyline") == 3
    said = hardmix.read_verdict(run)
    assert repr(said).startswith("Verdict: Better.")
    assert "raw pixels" in html_of(said)
    assert not said.better
    assert "no run yet" in html_of(hardmix.Run(tmp_path / "none"))
    with pytest.raises(hardmix.InputError, match="is not a run"):
        hardmix.read_verdict(tmp_path / "none")


def test_losses_and_encoders_are_one_line_and_a_table(tmp_path):
    loss = hardmix.MochiLoss(64, 32, 8, weights="hcl")
    assert repr(loss) == "MochiLoss(MoCHi (64, 32, 8), temperature=0.2, weights=hcl)"
    assert "MoCHi (64, 32, 8)" in html_of(loss)
    encoder = hardmix.load_encoder(make_run(tmp_path / "run").path)
    assert repr(encoder) == "TrainedEncoder(small, 3 x 32 x 32, 0.43 M parameters)"
    assert "small" in html_of(encoder)


def test_findings_on_features_are_short_tables():
    rows = torch.randn(60, 8)
    rows[1] = rows[0]
    near = explore.neighbours(rows)
    assert repr(near).startswith("Neighbours(60 rows, 12 each")
    assert "1 (1.00)" in html_of(near)
    assert repr(explore.duplicates(rows)) == "Duplicates(1 groups; 1 rows could be removed)"
    labels = np.arange(60) % 2
    for found in (
        explore.duplicates(rows),
        explore.outliers(rows),
        explore.mislabelled(rows, labels),
        explore.clusters(rows, 4),
    ):
        assert html_of(found).count("<tr>") >= 1


def test_an_exploration_shows_neighbours_and_copies_as_contact_sheets(tmp_path):
    for number in range(24):
        pixels = torch.randint(0, 256, (6, 6, 3), dtype=torch.uint8).numpy()
        name = tmp_path / "photos" / f"{number}.png"
        name.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).resize((40, 40), Image.Resampling.BICUBIC).save(name)
    (tmp_path / "photos" / "copy.png").write_bytes((tmp_path / "photos" / "3.png").read_bytes())
    run = make_run(tmp_path / "run")
    data = hardmix.config.DataConfig(
        name="folder", root=str(tmp_path / "photos"), image_size=32, workers=0
    )
    found = explore.explore_run(run.path, data)
    assert repr(found).startswith("Exploration(25 images, 1 near-duplicates")
    assert html_of(found).count("<img") == 2
