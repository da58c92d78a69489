"""The decisive experiment is judged by the plan's rule, and not before its sixteenth pair."""

import importlib
import sys

import pytest

from hardmix.sweep.pairs import Interval
from places import ROOT


@pytest.fixture(scope="module")
def decisive():
    """Return the program, which imports its neighbours."""
    sys.path.insert(0, str(ROOT / "experiments"))
    try:
        return importlib.import_module("decisive")
    finally:
        sys.path.remove(str(ROOT / "experiments"))


@pytest.mark.parametrize(
    ("mean", "half", "knn", "word"),
    [
        (0.9, 0.3, 20.8, "Void"),  # comes first: training was too short to say anything
        (0.7, 0.6, 26.0, "For"),
        (0.69, 0.6, 26.0, "Partly"),
        (0.3, 0.1, 26.0, "Against"),  # a gain, but not of the size in question
        (-0.6, 0.3, 26.0, "Against"),
        (0.2, 0.4, 26.0, "Not known"),
    ],
)
def test_the_first_rule_that_fits_holds(decisive, mean, half, knn, word):
    assert decisive.verdict(Interval(mean, 16, half), knn).startswith(word)


def test_a_pair_has_records_of_both_methods(decisive):
    names = ["cifar100-moco-v2-k2048-e200-5f-seed21.json", "cifar100-mochi-x-seed21.json"]
    names += ["cifar100-moco-v2-k2048-e200-5f-seed22.json", "README.md"]
    assert decisive.complete_seeds(names) == {21}


def test_no_measure_is_read_before_the_last_pair(decisive, monkeypatch, tmp_path):
    (tmp_path / "cifar100-mochi-x-seed21.json").write_text("this must not be read")
    monkeypatch.setattr(decisive, "PENDING", tmp_path)
    monkeypatch.setattr(decisive, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(SystemExit, match=r"0 of 16 pairs; missing: \[21, 22"):
        decisive.main()
