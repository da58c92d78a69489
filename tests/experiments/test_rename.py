"""A record is taken in under its right name, and nothing else in it changes."""

import importlib.util
import json

import pytest

from places import ROOT

_spec = importlib.util.spec_from_file_location("rename", ROOT / "experiments" / "rename.py")
rename = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rename)

NAME = "cifar10-moco-v2-k2048-e200-5fcf1fb6-seed99"


def write(folder, data_name):
    record = {"format": "x", "name": NAME, "config": {"data": {"name": data_name}}, "seed": 99}
    file = folder / f"{NAME}.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    return file


def test_a_run_on_cifar_100_gets_its_images_name(tmp_path):
    file = write(tmp_path, "folder")
    before = file.read_text()
    renamed = rename.take_in(file, tmp_path)
    assert renamed.name == f"{NAME.replace('cifar10-', 'cifar100-')}.json"
    assert not file.exists()
    assert renamed.read_text() == before.replace("cifar10-", "cifar100-")
    assert rename.take_in(renamed, tmp_path) == renamed  # a second time changes nothing
    assert renamed.exists()


def test_a_run_on_cifar_10_keeps_its_name(tmp_path):
    file = write(tmp_path, "cifar10")
    before = file.read_text()
    assert rename.take_in(file, tmp_path) == file
    assert file.read_text() == before


def test_a_record_from_elsewhere_is_copied_into_the_folder(tmp_path):
    (tmp_path / "to").mkdir()
    file = write(tmp_path, "folder")
    renamed = rename.take_in(file, tmp_path / "to")
    assert renamed.parent == tmp_path / "to"
    assert file.exists()


@pytest.mark.parametrize("folder", ["records", "pending"])
def test_no_record_of_another_data_set_is_called_cifar10(folder):
    for file in (ROOT / "experiments" / folder).rglob("*.json"):
        record = json.loads(file.read_text())
        assert record["name"] == file.stem
        assert rename.right_name(record["name"], record["config"]) == record["name"]
