"""Run folders: whole files or none, broken checkpoints passed over."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from hardmix.errors import InputError
from hardmix.runs.checkpoints import optimizer_tensors, restore_optimizer
from hardmix.runs.folder import Run
from hardmix.runs.weight_files import pack_safetensors, read_safetensors
from hardmix.runtime.files import write_atomically
from hardmix.settings.config import PretrainConfig
from hardmix.settings.recipes import RECIPES
from ranks import tensors_file


@pytest.fixture
def run(tmp_path) -> Run:
    return Run.create(tmp_path / "run", PretrainConfig())


def save(run: Run, step: int) -> None:
    run.save_checkpoint(step, {"weights": torch.full((3,), float(step))}, {"note": step})


def test_a_folder_with_a_run_is_refused_and_left_alone(run):
    before = run.config_file.read_bytes()
    with pytest.raises(InputError, match="already contains a run: resume it"):
        Run.create(run.path, PretrainConfig(oracle=True))
    assert run.config_file.read_bytes() == before


def test_a_folder_without_one_is_no_run(tmp_path):
    with pytest.raises(InputError, match="is not a run"):
        Run.open(tmp_path)


def test_a_path_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        Run.create(tmp_path / "file" / "run", PretrainConfig())


def test_the_newest_checkpoint_is_loaded_and_two_are_kept(run):
    for step in (1, 20, 300):
        save(run, step)
    tensors, manifest, broken = run.load_checkpoint()
    assert torch.equal(tensors["weights"], torch.full((3,), 300.0))
    assert (manifest["step"], manifest["note"], broken) == (300, 300, [])
    assert len(list(run.checkpoints.iterdir())) == 4


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "manifest"])
def test_a_broken_newest_checkpoint_is_named_and_the_one_before_is_used(run, damage):
    save(run, 1)
    save(run, 2)
    file = tensors_file(run.checkpoints)
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-3])
    elif damage == "gone":
        file.unlink()
    else:
        (run.checkpoints / "step-00000002.json").write_text("{")
    _, manifest, broken = run.load_checkpoint()
    assert manifest["step"] == 1
    assert broken == ["step-00000002.json"]


def test_no_whole_checkpoint_is_an_error_and_none_at_all_is_not(run):
    assert run.load_checkpoint() is None
    save(run, 1)
    tensors_file(run.checkpoints).write_bytes(b"")
    with pytest.raises(InputError, match=r"no intact checkpoint: step-00000001\.json"):
        run.load_checkpoint()


def test_equal_encoders_are_equal_files(tmp_path):
    config, trunk = RECIPES["demo"].build("mochi", False), torch.nn.Linear(3, 2)
    files = []
    for number in range(8):
        run = Run.create(tmp_path / str(number), config)
        run.write_encoder(trunk, config)
        files.append(run.encoder_file.read_bytes())
    assert len(set(files)) == 1
    read = read_safetensors(run.encoder_file)
    facts = {"backbone", "channels", "image_size", "method", "reduce", "format"}
    assert set(read.facts) == facts
    assert torch.equal(read.tensors["weight"], trunk.weight)


@given(
    st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=4),
    st.lists(st.integers(0, 3), max_size=4),
)
def test_a_packed_file_holds_what_was_given(facts, sizes):
    tensors = {f"a{number}é": torch.rand(size) for number, size in enumerate(sizes)}
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(pack_safetensors(tensors, facts))
        read = read_safetensors(Path(file.name))
    assert read.facts == facts
    assert read.tensors.keys() == tensors.keys()
    assert all(torch.equal(read.tensors[name], each) for name, each in tensors.items())


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    file = tmp_path / "file"
    write_atomically(file, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_flipped_digit_in_the_manifest_is_noticed_too(run):
    save(run, 1)
    save(run, 2)
    file = run.checkpoints / "step-00000002.json"
    file.write_text(file.read_text().replace('"note": 2', '"note": 3'))
    checkpoint = run.load_checkpoint()
    assert checkpoint.manifest["step"] == 1
    assert checkpoint.broken == ["step-00000002.json"]


def test_a_checkpoint_of_a_newer_format_is_refused_with_its_version(run, monkeypatch):
    monkeypatch.setattr("hardmix.runs.checkpoints.FORMAT", 99)
    save(run, 1)
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"format 99, .* resume with hardmix \d"):
        run.load_checkpoint()


def test_logs_go_back_to_the_length_they_had(run):
    run.log({"step": 1})
    lengths = run.log_lengths()
    run.log({"step": 1, "knn": 0.5})
    run.forget_after(1, lengths)
    assert run.metrics() == [{"step": 1}]


def test_metrics_survive_a_half_written_line_and_forget_steps_to_be_taken_again(run):
    for step in (1, 2, 3):
        run.log({"step": step})
    with run.metrics_file.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    run.forget_after(2)
    assert [line["step"] for line in run.metrics()] == [1, 2]


def test_results_hold_versions(run):
    result = json.loads(run.write_result("knn", {"top1": 0.5}).read_text())
    assert result["top1"] == 0.5
    assert result["versions"]["torch"] == torch.__version__.split("+")[0]


def test_an_optimizer_goes_on_as_if_never_stopped():
    images = torch.randn(2, 3, 4, 4)

    def steps(model, optimizer, number):
        for _ in range(number):
            optimizer.zero_grad()
            model(images).square().sum().backward()
            optimizer.step()

    def fresh():
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    model, optimizer = fresh()
    steps(model, optimizer, 4)
    first, stopped = fresh()
    steps(first, stopped, 2)
    again, resumed = fresh()
    again.load_state_dict(first.state_dict())
    saved = {name: value.contiguous() for name, value in optimizer_tensors(stopped).items()}
    restore_optimizer(resumed, saved)
    steps(again, resumed, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
