import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn.functional import normalize, pdist

from hardmix import InputError, alignment, uniformity
from hardmix.mixing import embedding_space

CHUNKS = st.sampled_from([1, 7, embedding_space.CHUNK])
SEEDS = st.integers(0, 2**16)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(embedding_space, "CHUNK", 7)


def random_features(number, dim, seed, lowest=0.01) -> torch.Tensor:
    """Return random directions, with lengths from `lowest` to 100."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(number, dim, generator=generator, dtype=torch.float64)
    length = torch.rand(number, 1, generator=generator, dtype=torch.float64) * 100 + lowest
    return normalize(direction, dim=1) * length


def alignment_by_definition(features, labels) -> float:
    x = normalize(features.double(), dim=1)
    distances = [
        float((x[i] - x[j]).square().sum())
        for i in range(len(x))
        for j in range(len(x))
        if i != j and labels[i] == labels[j] >= 0
    ]
    return sum(distances) / len(distances)


def uniformity_by_definition(features, t=2.0) -> float:
    distances = pdist(normalize(features.double(), dim=1))
    return math.log(distances.square().mul(-t).exp().mean())


def has_a_pair(labels) -> bool:
    return any(labels.count(label) > 1 for label in labels if label >= 0)


@given(data=st.data(), number=st.integers(2, 25), dim=st.integers(1, 6), chunk=CHUNKS, seed=SEEDS)
def test_alignment_is_the_mean_over_all_pairs_of_one_class(data, number, dim, chunk, seed):
    layout = st.lists(st.sampled_from([-1, 0, 1, 40]), min_size=number, max_size=number)
    labels = data.draw(layout.filter(has_a_pair))
    features = random_features(number, dim, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_space, "CHUNK", chunk)
        got = alignment(features, torch.tensor(labels))
    assert got == pytest.approx(alignment_by_definition(features, labels), rel=1e-9, abs=1e-12)


@given(
    number=st.integers(2, 40),
    dim=st.integers(1, 6),
    t=st.floats(0.1, 5.0),
    chunk=CHUNKS,
    seed=SEEDS,
)
def test_uniformity_is_the_mean_over_all_pairs(number, dim, t, chunk, seed):
    features = random_features(number, dim, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_space, "CHUNK", chunk)
        got = uniformity(features, t)
    assert got == pytest.approx(uniformity_by_definition(features, t), rel=1e-9, abs=1e-12)


def test_two_opposite_points_have_alignment_four_and_uniformity_minus_eight():
    features = torch.tensor([[3.0, 0.0], [-0.5, 0.0]])
    assert alignment(features, torch.tensor([1, 1])) == pytest.approx(4.0)
    assert uniformity(features) == pytest.approx(-8.0)
    assert uniformity(features, t=0.5) == pytest.approx(-2.0)


def test_identical_points_have_alignment_and_uniformity_nought(small_chunks):
    features = torch.randn(1, 5).expand(20, 5) * torch.arange(1.0, 21.0).unsqueeze(1)
    assert alignment(features, torch.zeros(20, dtype=torch.long)) == pytest.approx(0.0, abs=1e-6)
    assert uniformity(features) == pytest.approx(0.0, abs=1e-6)


def test_classes_with_one_member_and_images_without_a_class_change_nothing(small_chunks):
    features = random_features(20, 4, seed=0)
    labels = torch.tensor([0, 0, 0, 1, 1] + [2 + i for i in range(5)] + [-1] * 8 + [-5, -5])
    assert alignment(features, labels) == pytest.approx(alignment(features[:5], labels[:5]))


def test_pairs_not_classes_are_averaged():
    features = torch.tensor([[1.0, 0.0]] * 4 + [[-1.0, 0.0]])
    labels = torch.tensor([0, 0, 0, 1, 1])
    assert alignment(features, labels) == pytest.approx((3 * 0 + 1 * 4) / 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_features_of_low_precision_are_measured_in_float32(small_chunks, dtype):
    features = random_features(30, 16, seed=3).to(dtype)
    labels = torch.arange(30) % 4
    assert alignment(features, labels) == pytest.approx(
        alignment_by_definition(features, labels), abs=1e-6
    )
    assert uniformity(features) == pytest.approx(uniformity_by_definition(features), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_labels_of_any_whole_number_type_are_the_same(dtype):
    features, labels = random_features(12, 4, seed=1), torch.arange(12) % 3
    assert alignment(features, labels.to(dtype)) == alignment(features, labels)


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [-1, -1, -1, -1], [-2, -2, 0, 1]])
def test_labels_without_a_class_of_two_are_refused(labels):
    with pytest.raises(InputError, match="labels has no class with two or more images"):
        alignment(torch.randn(4, 3), torch.tensor(labels))


def test_gradients_are_neither_needed_nor_kept():
    features = torch.randn(6, 3, requires_grad=True)
    assert isinstance(uniformity(features), float)
    assert isinstance(alignment(features, torch.zeros(6, dtype=torch.long)), float)
    assert features.grad is None


# VmHWM, not ru_maxrss: a child process inherits the latter from its parent.
MEASURE = """
import torch
from hardmix import alignment, uniformity

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1e3

features, labels = torch.randn(20_000, 512), torch.randint(0, 100, (20_000,))
alignment(features[:500], labels[:500])  # libraries are loaded
uniformity(features[:500])
before = peak()
alignment(features, labels)
uniformity(features)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_memory_stays_below_300_mb_for_20_000_features():
    # All their distances would be 1.6 GB.
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=120
    )
    assert 0 < float(done.stdout) < 300


@pytest.mark.parametrize("length", [1e-30, 1e-13, 1e25])
def test_lengths_make_no_difference_however_extreme(length):
    features, labels = torch.randn(20, 5), torch.arange(20) % 4
    assert alignment(length * features, labels) == pytest.approx(alignment(features, labels))
    assert uniformity(length * features) == pytest.approx(uniformity(features))
