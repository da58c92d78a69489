"""k-NN and the linear probe on features whose answer is known."""

import numpy as np
import pytest
import torch

from hardmix.errors import InputError
from hardmix.evaluation import neighbours, probe
from hardmix.evaluation.accuracy import accuracy_of, mean_and_deviation
from hardmix.evaluation.knn import knn_accuracies, knn_accuracy, usual_k
from hardmix.evaluation.probe import cross_validated_penalty, new_classifier, probe_accuracy


def clusters(number: int, noise: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(number) % 4
    return 3 * torch.eye(4, 8)[labels] + noise * torch.randn(number, 8), labels


def slow_vote(train, train_labels, query, k, temperature) -> int:
    """Wu et al.'s vote for one image, in plain Python."""
    similarity = torch.nn.functional.cosine_similarity(train, query.unsqueeze(0)).tolist()
    nearest = sorted(range(len(train)), key=lambda i: -similarity[i])[:k]
    votes = [0.0] * 6
    for i in nearest:
        votes[int(train_labels[i])] += torch.exp(torch.tensor(similarity[i] / temperature)).item()
    return votes.index(max(votes))


@pytest.mark.parametrize("k", [1, 7, 500])
def test_knn_is_the_slow_vote(k, monkeypatch):
    monkeypatch.setattr(neighbours, "TILE", 16)
    monkeypatch.setattr(neighbours, "QUERIES", 16)
    monkeypatch.setattr(neighbours, "ROWS", 25)
    train, test = torch.randn(60, 8), torch.randn(40, 8)
    train_labels, test_labels = torch.randint(6, (60,)), torch.randint(6, (40,))
    votes = [slow_vote(train, train_labels, image, k, 0.5) for image in test]
    expected = sum(vote == int(label) for vote, label in zip(votes, test_labels, strict=True)) / 40
    ours = knn_accuracy(train, train_labels, test, test_labels, k=k, temperature=0.5)
    assert ours.top1 == pytest.approx(expected)
    assert ours.top5 >= ours.top1


def test_leave_one_out_does_not_count_the_image_itself():
    features, labels = torch.eye(10), torch.arange(10)
    alone = knn_accuracy(features, labels, features, labels, k=1, leave_one_out=True)
    itself = knn_accuracy(features, labels, features, labels, k=1)
    assert (alone.top1, itself.top1) == (0.0, 1.0)


def test_both_find_clusters_and_neither_finds_noise():
    data = *clusters(200), *clusters(100)
    noise = torch.randn(200, 8), data[1], torch.randn(100, 8), data[3]
    for accuracy in (lambda *x: knn_accuracy(*x, k=20), probe_accuracy):
        assert accuracy(*data).top1 > 0.98
        assert accuracy(*noise).top1 < 0.45


@pytest.mark.parametrize("accuracy", [knn_accuracy, probe_accuracy])
def test_unknown_labels_are_refused(accuracy):
    features, labels = clusters(20)
    with pytest.raises(InputError, match="unknown"):
        accuracy(features, labels - 1, features, labels)


def noisy(number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % 6
    return torch.eye(6, 12)[labels] + 0.7 * torch.randn(number, 12, generator=generator), labels


def test_knn_is_scikit_learns():
    neighbors = pytest.importorskip("sklearn.neighbors")
    (train, train_labels), (test, test_labels) = noisy(400, 0), noisy(200, 1)
    judge = neighbors.KNeighborsClassifier(
        n_neighbors=15, metric="cosine", weights=lambda far: np.exp((1 - far) / 0.07)
    ).fit(train.numpy(), train_labels.numpy())
    ours = knn_accuracy(train, train_labels, test, test_labels, k=15, temperature=0.07)
    assert ours.top1 == pytest.approx(judge.score(test.numpy(), test_labels.numpy()))


def test_the_linear_probe_is_scikit_learns():
    models = pytest.importorskip("sklearn.linear_model")
    (train, train_labels), (test, test_labels) = noisy(400, 0), noisy(200, 1)
    mean, std = train.mean(dim=0), train.std(dim=0)
    # Its loss is C * (sum of cross-entropies) + |w|^2 / 2; ours is their mean + penalty * |w|^2.
    judge = models.LogisticRegression(C=1 / (2 * 0.01 * 400), max_iter=2000, tol=1e-8).fit(
        ((train - mean) / std).numpy(), train_labels.numpy()
    )
    theirs = judge.score(((test - mean) / std).numpy(), test_labels.numpy())
    for solver, apart in [("lbfgs", 0.006), ("sgd", 0.03)]:
        ours = probe_accuracy(
            train, train_labels, test, test_labels, penalty=0.01, solver=solver, seed=3
        )
        assert ours.top1 == pytest.approx(theirs, abs=apart)


def few_noisy_labels(number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Most features are noise: a probe with a weak penalty learns it by heart."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % 4
    noise = torch.randn(number, 120, generator=generator)
    noise[:, :4] += 1.5 * torch.eye(4)[labels]
    return noise, labels


def test_the_penalty_is_cross_validated_and_better_than_a_weak_one():
    (train, train_labels), (test, test_labels) = few_noisy_labels(200, 0), few_noisy_labels(2000, 1)
    chosen = cross_validated_penalty(train, train_labels)
    assert chosen.penalty == max(chosen.accuracies, key=lambda each: chosen.accuracies[each])
    by_penalty = {
        penalty: probe_accuracy(train, train_labels, test, test_labels, penalty=penalty).top1
        for penalty in (chosen.penalty, 1e-6)
    }
    assert by_penalty[chosen.penalty] > by_penalty[1e-6] + 0.02
    default = probe_accuracy(train, train_labels, test, test_labels)
    assert default.top1 == by_penalty[chosen.penalty]


def test_cross_validation_predicts_each_training_image_once_and_no_other(monkeypatch):
    features, labels = torch.arange(50.0)[:, None].repeat(1, 3), torch.arange(50) % 2
    predicted = []

    def note(train, train_labels, test, test_labels, *, solver, penalty):
        assert set(train[:, 0].tolist()).isdisjoint(test[:, 0].tolist())
        assert len(train) + len(test) == 50
        predicted.append((penalty, test[:, 0].tolist()))
        return probe.Accuracy(1 - penalty, 1.0)

    monkeypatch.setattr(probe, "probe_accuracy", note)
    chosen = cross_validated_penalty(features, labels)
    assert chosen.penalty == 1e-6
    for penalty in probe.PENALTIES:
        held_out = [image for each, images in predicted if each == penalty for image in images]
        assert sorted(held_out) == list(range(50))
    predicted.clear()
    monkeypatch.setattr(probe, "ENOUGH_HELD_OUT", 20)
    cross_validated_penalty(features, labels)
    assert len(predicted) == 2 * len(probe.PENALTIES)


def test_several_k_are_the_votes_of_each_alone():
    data = *noisy(300, 0), *noisy(100, 1)
    together = knn_accuracies(*data, ks=(5, 20, 200))
    assert together == {k: knn_accuracy(*data, k=k) for k in (5, 20, 200)}


def test_k_follows_the_number_of_labels_of_a_class():
    assert usual_k(labelled=10_000, classes=100) == 20
    assert usual_k(labelled=50_000, classes=100) == 200


def test_accuracies_count_ranks():
    scores = torch.eye(8)[[0, 1, 2, 3]] + torch.arange(8) / 100
    assert accuracy_of(scores, torch.tensor([0, 1, 2, 7])) == pytest.approx((0.75, 1.0))
    assert accuracy_of(scores, torch.tensor([0, 1, 0, 0])) == pytest.approx((0.5, 0.5))
    assert accuracy_of(torch.eye(2), torch.tensor([1, 0])).top5 == 1


def test_a_classifier_starts_as_in_official_moco():
    classifier = new_classifier(2000, 50, seed=0)
    assert float(classifier.weight.detach().std()) == pytest.approx(0.01, rel=0.02)
    assert torch.equal(classifier.bias, torch.zeros(50))
    assert torch.equal(new_classifier(20, 5, 1).weight, new_classifier(20, 5, 1).weight)
    assert not torch.equal(new_classifier(20, 5, 1).weight, new_classifier(20, 5, 2).weight)


def test_the_deviation_is_that_of_a_sample():
    assert mean_and_deviation([1.0, 2.0, 3.0]) == pytest.approx((2.0, 1.0))
    assert mean_and_deviation([5.0]) == (5.0, 0.0)
