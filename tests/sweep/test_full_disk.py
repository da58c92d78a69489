"""A full disk ends a sweep: the runs after it would meet the same."""

import pytest

from hardmix.commands import main as cli
from hardmix.errors import OutputError
from hardmix.sweep import sweeping


def test_results_that_cannot_be_written_end_the_sweep_with_74(tmp_path, monkeypatch, capfd):
    begun = []

    def full(config, out, resume):
        begun.append(out)
        raise OutputError("its last checkpoint could not be written (No space left on device).")

    monkeypatch.setattr(sweeping, "pretrain", full)
    out = tmp_path / "sweep"
    with pytest.raises(SystemExit) as done:
        cli.main(["sweep", "table1", "--scale", "shapes", "--seeds", "1", "--out", str(out)])
    assert done.value.code == 74
    assert "No space left on device" in capfd.readouterr().err
    assert len(begun) == 1
    assert not (out / "failures").exists()
