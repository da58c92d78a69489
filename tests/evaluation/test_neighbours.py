"""Nearest neighbours do not depend on how bank and queries are divided, by blocks or processes."""

import json
import math

import pytest
import torch
from hypothesis import given, strategies as st

from hardmix.evaluation import knn, neighbours
from hardmix.evaluation.knn import knn_accuracy
from hardmix.settings.config import DataConfig
from hardmix.settings.evaluations import KnnOptions
from ranks import in_two_processes
from untrained_runs import make_run

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SHAPES = DataConfig(name="shapes", num_images=241, image_size=32, workers=0)
SIZES = {"QUERIES": 16, "ROWS": 7, "CHUNK": 16, "TERMS": 8, "TILE": 16}


def found(bank, queries, k, **options):
    """Return similarities and places of all queries."""
    parts = list(neighbours.neighbours(bank, queries, k, device=CPU, **options))
    return tuple(torch.cat([part[column] for part in parts]) for column in (1, 2))


def naive(bank, queries, k, leave_one_out):
    """Return the whole matrix, sorted: the most similar first, then the first in the bank."""
    unit = [torch.nn.functional.normalize(each.double(), dim=1) for each in (queries, bank)]
    similarity = unit[0] @ unit[1].T
    if leave_one_out:
        similarity.fill_diagonal_(-math.inf)
    near = similarity.sort(dim=1, descending=True, stable=True)
    k = min(k, len(bank) - leave_one_out)
    return near.values[:, :k].float(), near.indices[:, :k]


def signed_units(generator, rows, dim):
    """Return rows whose similarities are exactly -1, 0 or 1, so that nearly all are tied."""
    signs = torch.randint(2, (rows, 1), generator=generator) * 4 - 2
    return torch.eye(dim)[torch.randint(dim, (rows,), generator=generator)] * signs


shapes = st.tuples(st.integers(2, 60), st.integers(1, 40), st.integers(1, 20), st.integers(1, 70))


@pytest.mark.usefixtures("unchecked_types")  # of shapes known here, hundreds of times
class TestDivided:
    @given(shapes, st.booleans(), st.integers(0, 2**31))
    def test_ties_go_to_the_first_row(self, shape, leave_one_out, seed):
        rows, asked, dim, k = shape
        generator = torch.Generator().manual_seed(seed)
        bank = signed_units(generator, rows, dim)
        queries = bank if leave_one_out else signed_units(generator, asked, dim)
        with pytest.MonkeyPatch.context() as patched:
            for name, size in SIZES.items():
                patched.setattr(neighbours, name, size)
            similarity, places = found(bank, queries, k, leave_one_out=leave_one_out)
        expected = naive(bank, queries, k, leave_one_out)
        assert torch.equal(similarity, expected[0])
        assert torch.equal(places, expected[1])

    @pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="other bits without MKL")
    @given(shapes, st.integers(1, 2), st.integers(1, 200), st.integers(0, 2**31))
    def test_blocks_change_no_bit(self, shape, tiles, block, seed):
        rows, asked, dim, k = 3 * shape[0], 4 * shape[1], *shape[2:]
        generator = torch.Generator().manual_seed(seed)
        bank = torch.randn(rows, 40 * dim, generator=generator)
        queries = torch.randn(asked, 40 * dim, generator=generator)
        whole = found(bank, queries, k)
        torch.testing.assert_close(whole[0], naive(bank, queries, k, False)[0])
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(neighbours, "QUERIES", 96 * tiles)
            patched.setattr(neighbours, "CHUNK", 96)
            patched.setattr(neighbours, "ROWS", block)
            divided = found(bank, queries, k)
        assert torch.equal(divided[0], whole[0])
        assert torch.equal(divided[1], whole[1])


def test_every_number_is_ordered_like_its_key():
    values = torch.tensor([[-math.inf, -1.0, -1e-40, -0.0, 0.0, 1e-40, 0.5, 1.0, math.nan]])
    places = torch.arange(2**32 - 9, 2**32)
    keys = neighbours._keys(values.clone(), places)
    assert keys[0].argsort().tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8]  # -0.0 is 0.0: the first wins
    similarity, back = neighbours._read_keys(keys)
    assert torch.equal(back[0], places)
    assert torch.equal(similarity[0, :8], values[0, :8])
    assert similarity[0, 8].isnan()
    assert int(keys.min()) > neighbours.NOBODY


def part_of(tensor, number, cut):
    return tensor[:cut] if number == 0 else tensor[cut:]


def check_two_processes_are_one(number):
    """A shard may hold fewer rows than k, or none, and a process may have no test image."""
    cases = [(50, 30, 25, 12, 9), (50, 30, 3, 30, 9), (40, 20, 0, 0, 70), (200, 70, 180, 5, 60)]
    for rows, asked, cut, cut_asked, k in cases:
        torch.manual_seed(rows + cut)
        bank, labels = torch.randn(rows, 700), torch.arange(rows) % 5
        bank[cut::7] = bank[0]  # ties on both processes
        queries, classes = torch.randn(asked, 700), torch.arange(asked) % 5
        mine = [part_of(each, number, cut) for each in (bank, labels)]
        asking = [part_of(each, number, cut_asked) for each in (queries, classes)]
        whole = found(bank, queries, k)
        shared = found(mine[0], asking[0], k, shared=True)
        for one, two in zip(whole, shared, strict=True):
            assert torch.equal(part_of(one, number, cut_asked), two)
        alone = knn_accuracy(bank, labels, queries, classes, k=k)
        assert knn_accuracy(*mine, *asking, k=k, shared=True) == alone
        alone = knn_accuracy(bank, labels, bank, labels, k=k, leave_one_out=True)
        assert knn_accuracy(*mine, *mine, k=k, leave_one_out=True, shared=True) == alone


class _Knn:
    """Checks the neighbours, then evaluates a run, each process with its part of the features."""

    def __init__(self, path):
        self.path = str(path)

    def __call__(self, number):
        check_two_processes_are_one(number)
        knn.measure(self.path, KnnOptions(k=5), SHAPES)


def test_two_processes_find_the_neighbours_of_one(tmp_path):
    run = make_run(tmp_path / "run")
    in_two_processes(_Knn(run.path))
    two = json.loads((run.results / "knn.json").read_text())
    one = knn.measure(run.path, KnnOptions(k=5), SHAPES)
    assert [two[name] for name in ("top1", "top5")] == [one[name] for name in ("top1", "top5")]


def test_the_bank_is_never_copied_whole(monkeypatch):
    largest = []
    unit = neighbours._unit

    def seen(rows, number, device):
        largest.append(len(rows))
        return unit(rows, number, device)

    monkeypatch.setattr(neighbours, "_unit", seen)
    monkeypatch.setattr(neighbours, "ROWS", 32)
    monkeypatch.setattr(neighbours, "QUERIES", 96)
    found(torch.randn(300, 4), torch.randn(100, 4), 3)
    assert max(largest) == 96
