"""The views of values in notebooks, our notebooks, progress bars and Ctrl-C in them."""

import json
import re
import sys
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest
import torch
from PIL import Image

import hardmix
from fake_runs import config_of, metrics_of, result_of, verdict_of, write_run
from hardmix import explore
from places import ROOT
from untrained_runs import make_run

sys.path.append(str(ROOT / "tools"))

import notebook_pages


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


SHORTER = {"minutes=2)": "minutes=0.1)", "epochs=6": "epochs=2", "1200": "300"}
"""How the test shortens the training of the notebooks."""


@pytest.mark.slow
@pytest.mark.parametrize("file", notebook_pages.notebooks(), ids=lambda file: file.stem)
def test_a_notebook_runs_and_its_cells_show_what_they_showed(file, tmp_path):
    text = file.read_text()
    assert str(ROOT) not in text
    assert "/tmp/" not in text
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    copy = tmp_path / file.name
    copy.write_text(text)
    kinds = [
        [
            sorted(output.data) if "data" in output else output.name
            for cell in notebook.cells
            if cell.cell_type == "code"
            for output in cell.outputs
            if output.get("name") != "stderr"  # warnings of a short run
        ]
        for notebook in (nbformat.read(file, as_version=4), notebook_pages.executed(copy, tmp_path))
    ]
    assert kinds[0] == kinds[1]


INTERRUPTED = """
import os, signal, time
from dataclasses import replace

import hardmix

config = hardmix.recipes.demo()
config = replace(
    config,
    data=replace(config.data, num_images=64, workers=0),
    mix=replace(config.mix, num_hardest=4, num_pairs=2, num_with_query=1),
    train=replace(config.train, epochs=3, batch_size=16, queue_size=12, log_every=1),
)


def on_log(line):
    time.sleep(0.1)  # the bar changes at most every fifth of a second
    if line["step"] == 6 and not resume:
        os.kill(os.getpid(), signal.SIGINT)  # what a notebook's stop button does


resume = False
run = hardmix.pretrain(config, "run", on_log=on_log)
"""


class Watched(nbclient.NotebookClient):
    """A notebook's client that keeps what changed on the page while a cell ran."""

    def process_message(self, msg, cell, cell_index):
        """Keep the change of an output."""
        if msg["msg_type"] == "update_display_data":
            self.changes.append(msg["content"]["data"]["text/html"])
        return super().process_message(msg, cell, cell_index)


@pytest.mark.slow
def test_stopping_a_cell_saves_the_run_and_says_how_to_resume(tmp_path):
    again = INTERRUPTED.replace("resume = False", "resume = True")
    again = again.replace("on_log=on_log)", "on_log=on_log, resume=True)")
    cells = [nbformat.v4.new_code_cell(source) for source in (INTERRUPTED, again)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = Watched(notebook, timeout=200, allow_errors=True, resources=resources)
    client.changes = []
    client.execute()
    error = next(each for each in cells[0].outputs if each.output_type == "error")
    assert error.evalue.startswith("stopped by SIGINT after step")
    assert "the same call with resume=True" in error.evalue
    assert error.traceback == [error.evalue]  # no page of frames
    assert any("<progress value=" in change and "epoch" in change for change in client.changes)
    assert client.changes[-1] == ""  # an ended bar disappears
    assert not any(each.output_type == "error" for each in cells[1].outputs), cells[1].outputs
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "done"
    assert Path(tmp_path / "run" / "encoder.safetensors").exists()
