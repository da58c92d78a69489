"""Files of a run that are not regular files, or too large: one sentence each, in bounded memory."""

import gzip
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from fake_runs import config_of, metrics_of, write_run
from hardmix.data.changed_data import DataRecord, describe_change, write_list
from hardmix.errors import InputError
from hardmix.runs import reading
from hardmix.runs.checkpoints import _checksum, load_newest
from hardmix.runs.folder import Run, read_config
from hardmix.runs.reading import read_run
from hardmix.runs.weight_files import read_weights
from hardmix.runtime import files
from hardmix.runtime.files import MOST_JSON, read_file, unpacked


def make_odd(file: Path, kind: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "large":
        with file.open("wb") as out:
            out.truncate(10**13)  # a sparse file: 10 TB that take no room
    else:
        file.symlink_to(kind)


KINDS = ["/dev/zero", "/dev/stdin", "/proc/kmsg", "fifo", "large"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_none_is_refused_at_once(kind, tmp_path):
    make_odd(tmp_path / "file", kind)
    if kind == "/proc/kmsg":  # where it may be read, nothing may be there to read
        with suppress(OSError):
            read_file(tmp_path / "file", 1000)
        return
    with pytest.raises(OSError, match=r"not a regular file|MB are read") as refusal:
        read_file(tmp_path / "file", 1000)
    assert refusal.value.filename == str(tmp_path / "file")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["results/x.json", "metrics.jsonl", "hardness.jsonl", "config.json", "status.json"]
)
def test_a_run_with_an_odd_file_is_read_and_says_so(name, kind, tmp_path):
    run = write_run(tmp_path / "run", config_of(), metrics_of(2))
    make_odd(run / name, kind)
    record = read_run(run)
    if name not in ("hardness.jsonl", "status.json") and kind != "/proc/kmsg":
        assert any(Path(name).name in sentence for sentence in record.missing), record.missing
    if name == "config.json":
        with pytest.raises(InputError, match=r"config\.json"):
            read_config(run / name)


@pytest.mark.parametrize("kind", ["/dev/zero", "fifo", "large"])
def test_weights_that_are_no_file_are_refused(kind, tmp_path):
    make_odd(tmp_path / "encoder.safetensors", kind)
    with pytest.raises(InputError, match=r"not a regular file|MB are read"):
        read_weights(tmp_path / "encoder.safetensors")


@pytest.mark.parametrize("file", ["/dev/zero", "../secret", "fifo"])
def test_a_manifest_does_not_lead_out_of_its_folder(file, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    os.mkfifo(folder / "fifo")
    (tmp_path / "secret").write_bytes(b"")
    manifest = {"format": 2, "step": 1, "file": file, "sha256": "x"}
    manifest["checksum"] = _checksum(manifest)
    (folder / "step-00000001.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="no intact checkpoint"):
        load_newest(folder)


def test_a_json_file_above_the_limit_is_refused(tmp_path):
    run = write_run(tmp_path / "run", config_of(), metrics_of(2))
    (run / "results" / "x.json").write_text('{"a": "' + "x" * MOST_JSON + '"}')
    missing = read_run(run).missing
    assert any(
        "results/x.json cannot be read: it has 16 MB, and at most 16 MB" in s for s in missing
    )


def test_a_file_that_is_not_utf_8_is_damaged(tmp_path):
    run = write_run(tmp_path / "run", config_of(), metrics_of(2))
    (run / "results" / "x.json").write_bytes(b'{"a": "\xff"}')
    assert any("results/x.json is damaged" in sentence for sentence in read_run(run).missing)


def test_a_long_log_is_thinned_out_and_keeps_its_rare_and_last_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_LINES", 100)
    run = write_run(tmp_path / "run", config_of(), [])
    lines = [{"step": step, "epoch": step // 100, "loss": 1.0} for step in range(1, 10_001)]
    for step in (777, 5_003):
        lines[step - 1] = {"step": step, "epoch": step // 100, "knn": 0.5}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = read_run(run)
    steps = [line["step"] for line in record.metrics]
    assert 40 <= len(steps) <= 102
    assert steps == sorted(steps)
    assert {1, 777, 5_003, 10_000} <= set(steps)
    assert any("metrics.jsonl has 10,000 lines" in sentence for sentence in record.missing)
    # Nor can lines that all claim to be rare fill the memory.
    (run / "metrics.jsonl").write_text('{"step": 1, "knn": 0.1}\n' * 10_000)
    assert len(read_run(run).metrics) <= 101


def test_an_overlong_line_is_one_broken_line(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_LINE", 100)
    run = write_run(tmp_path / "run", config_of(), [])
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"a": "' + "x" * 1000 + '"}\n{"step": 2}\n')
    record = read_run(run)
    assert [line["step"] for line in record.metrics] == [1, 2]
    assert any("1 broken line" in sentence for sentence in record.missing)


def bomb(file: Path, line: bytes = b"1\tname\n") -> Path:
    """More than is unpacked, in about a thousandth of it."""
    with gzip.open(file, "wb", compresslevel=9) as out:
        part = line * (10**7 // len(line))
        for _ in range(files.MOST_LISTED // len(part) + 2):
            out.write(part)
    return file


def test_a_gzip_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_LISTED", 10_000_000)
    file = bomb(tmp_path / "images.txt.gz")
    assert file.stat().st_size < 100_000
    with pytest.raises(OSError, match="unpacks to more than 10 MB"):
        for _ in unpacked(file):
            pass
    said = describe_change(file, DataRecord("mark", {b"name": 1}))
    assert said == "a different number of images, or different labels or pixels"
    for damaged in (b"", b"\x1f\x8b", file.read_bytes()[:1000], b"text"):
        (tmp_path / "damaged.gz").write_bytes(damaged)
        with pytest.raises(OSError, match=r"damaged|incomplete"):
            list(unpacked(tmp_path / "damaged.gz"))


def test_changes_are_named_in_order(tmp_path):
    file = tmp_path / "images.txt.gz"
    before = {b"/%d.png" % number: 5 for number in range(9)}
    write_list(file, DataRecord("", before))
    now = {b"/8.png": 6, b"/new.png": 1}
    said = describe_change(file, DataRecord("", now))
    assert said.startswith("1 added (/new.png); 8 removed (/0.png, /1.png, /2.png, /3.png, /4.png")
    assert said.endswith("1 changed in size (/8.png)")


MEASURE = """
import resource, sys
from pathlib import Path
from hardmix.report.page import write_report
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_report([Path(sys.argv[1])], Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)
"""


@pytest.mark.slow
def test_a_report_of_a_million_lines_takes_bounded_memory(tmp_path):
    run = write_run(tmp_path / "run", config_of(), [])
    line = json.dumps(metrics_of(1)[0])
    with (run / "metrics.jsonl").open("w") as log:
        for step in range(1, 1_000_001):
            log.write(line.replace('"step": 5', f'"step": {step}', 1) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, run, tmp_path / "report.html"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout.split()[-1]) / 1024 < 300, done.stdout  # MB; 4,700 before


def test_a_link_to_an_ordinary_file_is_read(tmp_path):
    (tmp_path / "there").write_text("{}")
    (tmp_path / "file").symlink_to(tmp_path / "there")
    assert read_file(tmp_path / "file", 10) == b"{}"
    assert Run(tmp_path).metrics() == []


def test_pickles_are_not_opened_by_a_torch_that_cannot_do_so_safely(tmp_path, monkeypatch):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "weights.pth")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(InputError, match=r"torch 2\.9\.1.* update to torch 2\.10 or newer"):
        read_weights(tmp_path / "weights.pth")
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    read_weights(tmp_path / "weights.pth")
