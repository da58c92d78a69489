"""k-NN and the linear probe on features whose answer is known."""

import pytest
import torch

from hardmix.errors import InputError
from hardmix.evaluations import knn
from hardmix.evaluations.knn import knn_accuracy
from hardmix.evaluations.linear import probe_accuracy


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
    monkeypatch.setattr(knn, "CHUNK", 7)
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
    for accuracy in (lambda *x: knn_accuracy(*x, k=20).top1, probe_accuracy):
        assert accuracy(*data) > 0.98
        assert accuracy(*noise) < 0.45


@pytest.mark.parametrize("accuracy", [knn_accuracy, probe_accuracy])
def test_unknown_labels_are_refused(accuracy):
    features, labels = clusters(20)
    with pytest.raises(InputError, match="unknown"):
        accuracy(features, labels - 1, features, labels)
