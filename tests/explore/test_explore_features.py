"""The functions of hardmix.explore against slow transcriptions in float64."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from hardmix import explore
from hardmix.errors import InputError
from hardmix.evaluation import kmeans, neighbours as engine
from hardmix.explore import clustering, near_duplicates
from hardmix.explore.clustering import cluster_names, words_of

few = settings(max_examples=30)
CLOSE = 1e-5
"""Cosines nearer than this to a threshold or to each other may fall on either side of it."""


@st.composite
def features(draw, least=2, most=16, dim=None):
    """Return rows of which some are copies, some nearly so, and some zeros."""
    number, dim = draw(st.integers(least, most)), dim or draw(st.integers(1, 6))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = generator.normal(size=(number, dim))
    for row in range(1, number):
        kind = generator.integers(4)
        if kind == 0:
            rows[row] = rows[generator.integers(row)]
        elif kind == 1:
            rows[row] = rows[generator.integers(row)] + 0.05 * generator.normal(size=dim)
    if draw(st.booleans()):
        rows[generator.integers(number)] = 0
    return rows.astype(np.float32)


def cosines(rows, others=None):
    def unit(values):
        values = np.asarray(values, np.float64)
        return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)

    return unit(rows) @ unit(rows if others is None else others).T


@pytest.fixture(params=[7, 1 << 24])
def _blocks(request, monkeypatch):
    monkeypatch.setattr(near_duplicates, "BLOCK", request.param)
    monkeypatch.setattr(engine, "ROWS", min(request.param, engine.ROWS))


@pytest.mark.usefixtures("_blocks")
@few
@given(rows=features(), k=st.integers(1, 30))
def test_neighbours_are_the_most_similar_others(rows, k):
    found = explore.neighbours(rows, k)
    wanted = cosines(rows)
    np.fill_diagonal(wanted, -np.inf)
    most = min(k, len(rows) - 1)
    assert found.indices.shape == found.similarities.shape == (len(rows), most)
    for row in range(len(rows)):
        assert len(set(found.indices[row])) == most
        assert row not in found.indices[row]
        best = np.sort(wanted[row])[::-1][:most]
        np.testing.assert_allclose(found.similarities[row], best, atol=CLOSE)
        np.testing.assert_allclose(wanted[row, found.indices[row]], best, atol=CLOSE)


@few
@given(rows=features(), data=st.data())
def test_queries_find_rows_and_torch_equals_numpy(rows, data):
    asked = data.draw(features(1, 5, dim=rows.shape[1]))
    ours = explore.neighbours(torch.from_numpy(rows), 3, queries=torch.from_numpy(asked))
    theirs = explore.neighbours(rows.astype(np.float64), 3, queries=asked.tolist())
    assert np.array_equal(ours.indices, theirs.indices)
    best = np.sort(cosines(asked, rows), axis=1)[:, ::-1][:, :3]
    np.testing.assert_allclose(ours.similarities, best, atol=CLOSE)


def slow_groups(similarity, threshold, order):
    """Visit rows in order; each that is free takes all free rows that are similar enough."""
    free, groups = set(order), {}
    for row in order:
        if row not in free:
            continue
        near = [each for each in order if each in free and each != row]
        near = [each for each in near if similarity[row, each] >= threshold]
        if near:
            groups[row] = set(near)
            free -= {row, *near}
    return groups


@pytest.mark.usefixtures("_blocks")
@few
@given(rows=features(), threshold=st.sampled_from([0.5, 0.9, 0.99]), data=st.data())
def test_groups_of_duplicates_are_those_of_the_slow_way(rows, threshold, data):
    wanted = cosines(rows)
    assume((np.abs(wanted - threshold) > CLOSE).all())
    values = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    found = explore.duplicates(rows, threshold, preference=values)
    order = sorted(range(len(rows)), key=lambda row: (-values[row], row))
    assert {g.keep: set(g.others.tolist()) for g in found.groups} == slow_groups(
        wanted, threshold, order
    )
    for group in found.groups:
        assert (np.diff(group.similarities) <= 0).all()
        np.testing.assert_allclose(group.similarities, wanted[group.keep, group.others], atol=CLOSE)
        assert all(values[group.keep] >= values[other] for other in group.others)
    sizes = [len(group.others) for group in found.groups]
    assert sizes == sorted(sizes, reverse=True)
    assert found.num_others == sum(sizes)


@few
@given(rows=features())
def test_a_second_judge_can_only_refuse(rows):
    """The rows themselves as second judge change nothing; unrelated rows refuse all pairs."""
    alone = explore.duplicates(rows, 0.9)
    both = explore.duplicates(rows, 0.9, confirm=rows, confirm_threshold=0.9)
    assert [g.keep for g in alone.groups] == [g.keep for g in both.groups]
    assert not explore.duplicates(rows, 0.9, confirm=np.eye(len(rows))).groups


def test_many_copies_of_one_row_are_one_group():
    rows = np.random.default_rng(0).normal(size=(3000, 8))
    rows[500:2500] = rows[500]
    (group,) = explore.duplicates(rows, 0.9999).groups
    assert (group.keep, len(group.others)) == (500, 1999)


@few
@given(rows=features(3), k=st.integers(1, 5))
def test_outliers_are_far_from_their_neighbours(rows, k):
    found = explore.outliers(rows, k)
    wanted = cosines(rows)
    np.fill_diagonal(wanted, -np.inf)
    near = np.sort(wanted, axis=1)[:, ::-1][:, : min(k, len(rows) - 1)]
    scores = 1 - near.mean(axis=1)
    np.testing.assert_allclose(found.scores, scores, atol=CLOSE)
    middle = np.median(scores)
    limit = middle + 3.5 * 1.4826 * np.median(np.abs(scores - middle))
    assume((np.abs(scores - limit) > 10 * CLOSE).all())
    assert set(found.indices.tolist()) == set(np.flatnonzero(scores > limit).tolist())
    assert (np.diff(found.scores[found.order]) <= 0).all()


def test_the_one_that_is_different_stands_out():
    generator = np.random.default_rng(0)
    rows = np.concatenate([generator.normal(size=(60, 16)) + 5, -np.ones((1, 16))])
    assert explore.outliers(rows).indices.tolist() == [60]


@settings(few, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(rows=features(4), k=st.integers(1, 6), data=st.data())
def test_mislabelled_counts_votes_of_the_nearest_labelled(rows, k, data):
    labels = np.array(
        data.draw(st.lists(st.integers(-1, 2), min_size=len(rows), max_size=len(rows)))
    )
    known = np.flatnonzero(labels >= 0)
    assume(len(known) >= 2)
    wanted = cosines(rows[known])
    np.fill_diagonal(wanted, -np.inf)
    ranked = np.sort(wanted, axis=1)[:, ::-1]
    k = min(k, len(known) - 1)
    apart = ranked[:, : k + 1]
    assume((np.diff(apart, axis=1) < -CLOSE).all())  # else the k nearest are not determined
    found = explore.mislabelled(rows, labels, k)
    suspects = {}
    for row, number in enumerate(known):
        votes = labels[known[np.argsort(-wanted[row])[:k]]].tolist()
        top = max(set(votes), key=lambda each: (votes.count(each), -votes.index(each)))
        own, most = votes.count(labels[number]), votes.count(top)
        if top != labels[number] and own <= 0.2 * k and most >= 0.5 * k:
            suspects[number] = (top, own / k, most / k)
    assert set(found.indices.tolist()) == set(suspects)
    columns = (found.indices, found.suggested, found.own_share, found.suggested_share)
    for number, suggested, own, most in zip(*columns, strict=True):
        assert suspects[number] == pytest.approx((suggested, own, most))
    assert found.labels.tolist() == labels[found.indices].tolist()
    assert (np.diff(found.suggested_share - found.own_share) <= 1e-6).all()


def test_a_planted_wrong_label_is_found_with_the_right_one():
    generator = np.random.default_rng(1)
    centres = np.eye(3)[np.arange(90) % 3] * 8
    labels = np.arange(90) % 3
    wrong = labels.copy()
    wrong[[4, 50]] = (labels[[4, 50]] + 1) % 3
    found = explore.mislabelled(generator.normal(size=(90, 3)) + centres, wrong)
    assert sorted(found.indices.tolist()) == [4, 50]
    assert found.suggested.tolist() == labels[found.indices].tolist()
    assert found.agreement == pytest.approx(88 / 90)


@pytest.mark.parametrize("whole", [1, 10_000])
def test_clusters_find_separate_groups_and_repeat(whole, monkeypatch):
    monkeypatch.setattr(kmeans, "WHOLE", whole)  # 1: in batches
    generator = np.random.default_rng(2)
    truth = np.repeat([0, 1, 2], [60, 30, 10])
    rows = generator.normal(size=(100, 5)) * 0.2 + np.eye(3, 5)[truth] * 4
    shuffled = generator.permutation(100)
    found, again = (explore.clusters(rows[shuffled], 3, seed=5) for _ in range(2))
    assert found.labels.tolist() == truth[shuffled].tolist()  # numbered from the largest on
    assert np.array_equal(found.labels, again.labels)
    assert np.array_equal(found.centres, again.centres)
    wanted = cosines(rows[shuffled], found.centres)[np.arange(100), found.labels]
    np.testing.assert_allclose(found.similarities, wanted, atol=CLOSE)
    members = found.members(1)
    assert len(members) == 30
    assert (np.diff(found.similarities[members]) <= 0).all()


def test_the_number_of_clusters_grows_with_the_root_of_the_images():
    numbers = [clustering.number_of_clusters(n) for n in (2, 8, 200, 4000, 50_000, 10**6)]
    assert numbers == [2, 2, 10, 45, 64, 64]
    rows = np.random.default_rng(0).normal(size=(200, 4))
    assert len(explore.clusters(rows).centres) == 10


def test_copies_of_two_rows_make_two_clusters():
    rows = np.eye(2)[[0, 0, 0, 1, 1]]
    found = explore.clusters(rows, 4)
    assert found.labels.tolist() == [0, 0, 0, 1, 1]
    assert explore.clusters(rows[:1]).labels.tolist() == [0]


@few
@given(rows=features())
def test_centred_features_have_no_mean_left(rows):
    found = explore.centred(rows).numpy()
    wanted = rows - rows.astype(np.float64).mean(axis=0)
    lengths = np.linalg.norm(wanted, axis=1, keepdims=True)
    assume(((lengths > 1e-3) | (lengths == 0)).all())
    np.testing.assert_allclose(found, wanted / np.maximum(lengths, 1e-12), atol=1e-3)


def test_names_are_words_that_tell_a_cluster_apart():
    names = [f"holiday/beach/IMG_{n}.jpg" for n in range(10)]
    names += [f"holiday/mountains/DSC{n}.JPG" for n in range(10)]
    names += [f"holiday/{n}.png" for n in range(10)]
    assert cluster_names(np.repeat([0, 1, 2], 10), names) == ["beach", "mountains", ""]
    assert words_of("Été 2020/IMG_1234_golden-gate.jpeg") == {"été", "golden", "gate"}


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: explore.neighbours(np.zeros(3)), r"shape \(3,\): it must be"),
        (lambda: explore.neighbours(np.zeros((0, 3))), r"shape \(0, 3\)"),
        (lambda: explore.neighbours([["a"]]), "not an array of numbers"),
        (lambda: explore.neighbours([[1.0], [float("nan")]]), "NaN or infinity in 1 rows.*row 1"),
        (lambda: explore.neighbours(np.eye(2), 0), "k=0 must be at least 1"),
        (lambda: explore.neighbours(np.eye(2), queries=np.eye(3)), "3 columns and features have 2"),
        (lambda: explore.duplicates(np.eye(2), 0), "threshold=0 must be above 0"),
        (lambda: explore.duplicates(np.eye(2), 1.1), "threshold=1.1"),
        (lambda: explore.duplicates(np.eye(2), preference=[1]), "1 values for 2 rows"),
        (lambda: explore.duplicates(np.eye(2), confirm=np.eye(3)), "confirm has 3 rows"),
        (lambda: explore.clusters(np.eye(2), 3), "num_clusters=3 for 2 rows"),
        (lambda: explore.clusters(np.eye(2), 0), "num_clusters=0"),
        (lambda: explore.outliers(np.eye(1)), "1 row"),
        (lambda: explore.outliers(np.eye(3), cutoff=0), "cutoff=0"),
        (lambda: explore.mislabelled(np.eye(2), [0.5, 1.0]), "labels are float64"),
        (lambda: explore.mislabelled(np.eye(2), [0]), "1 labels for 2 rows"),
        (lambda: explore.mislabelled(np.eye(2), [0, -1]), "1 rows have a label"),
    ],
)
def test_wrong_input_is_said_in_the_words_of_the_arguments(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_clusters_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(InputError, match=r"hardmix\[analysis\]"):
        explore.clusters(np.eye(4))


def test_the_names_of_the_room_are_there_and_no_module_hides_them():
    assert dir(explore) == explore.__all__ == sorted(explore.__all__)
    for name in explore.__all__:
        assert callable(getattr(explore, name)), name
        assert getattr(explore, name).__doc__
    with pytest.raises(AttributeError, match="nonsense"):
        explore.nonsense  # noqa: B018
