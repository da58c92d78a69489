"""Public functions take paths as text, too."""

import pytest

import hardmix
from untrained_runs import make_run

pytestmark = pytest.mark.slow


def test_paths_may_be_strings(tmp_path):
    run = make_run(tmp_path / "run")
    name, page, again = (str(tmp_path / each) for each in ("run", "page.html", "again"))
    assert hardmix.write_report(name, page).exists()  # one path, and not its letters
    hardmix.write_report([name], page)
    hardmix.analyze(name, str(tmp_path / "figures"))
    assert hardmix.import_weights(str(run.encoder_file), again).exists
    assert len(hardmix.open_evaluated_run(name).train) == 240
    assert hardmix.load_encoder(name).image_size == 32
    assert hardmix.Run(name).exists
