"""Encoders: unit length, the momentum formula, and batch statistics that give nothing away."""

import copy
from typing import get_args

import pytest
import torch
from torch import nn

from hardmix.errors import InputError
from hardmix.models.batch_norm import split_batch_norm
from hardmix.models.encoders import (
    HEADS,
    UNSPLIT_WARNING,
    Encoder,
    QueryKeyPair,
    build_encoder,
    encode_keys,
    shuffle_across,
    shuffled_rows,
)
from hardmix.settings.config import ModelConfig
from hardmix.settings.named_choices import Head


def tiny_trunk(channels: int = 3, width: int = 6) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(width),
    )


def tiny_pair(momentum: float = 0.999, splits: int = 2) -> QueryKeyPair:
    return QueryKeyPair(Encoder(tiny_trunk(), 6, dim=5), momentum, splits)


# Encoder


def test_the_menu_of_heads_is_the_table_of_heads():
    assert set(HEADS) == set(get_args(Head))


def test_heads_are_official_mocos():
    linear = build_encoder(ModelConfig(backbone="small", head="linear", dim=32))
    assert isinstance(linear.head, nn.Linear)
    assert linear.head.weight.shape == (32, linear.width)
    mlp = build_encoder(ModelConfig(backbone="small", head="mlp", dim=32))
    first, relu, last = mlp.head
    assert first.weight.shape == (mlp.width, mlp.width)
    assert isinstance(relu, nn.ReLU)
    assert last.weight.shape == (32, mlp.width)


@pytest.mark.parametrize("head", get_args(Head))
def test_embeddings_have_unit_length_and_features_are_the_trunks(head):
    encoder = build_encoder(ModelConfig(backbone="small", head=head), channels=1)
    images = torch.randn(4, 1, 32, 32)
    embeddings = encoder(images)
    assert embeddings.shape == (4, 128)
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(4))
    features = encoder.eval().features(images)
    assert features.equal(encoder.trunk(images))
    assert features.shape == (4, encoder.width)


def test_autocast_leaves_unit_length_in_float32():
    encoder = build_encoder(ModelConfig(backbone="small"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings = encoder(torch.randn(4, 3, 32, 32))
        assert encoder.features(torch.randn(2, 3, 32, 32)).dtype == torch.bfloat16
    assert embeddings.dtype == torch.float32
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(4), rtol=0, atol=1e-6)


def test_an_own_trunks_width_is_found_and_the_trunk_left_alone():
    trunk = tiny_trunk(channels=2, width=7)
    before = copy.deepcopy(trunk.state_dict())
    encoder = build_encoder(ModelConfig(dim=16), channels=2, trunk=trunk, image_size=9)
    assert encoder.trunk is trunk
    assert encoder.width == 7
    assert trunk.training
    assert all(value.equal(before[name]) for name, value in trunk.state_dict().items())
    assert encoder(torch.randn(4, 2, 9, 9)).shape == (4, 16)


@pytest.mark.parametrize(
    ("trunk", "words"),
    [
        (nn.Conv2d(3, 8, 3), r"Conv2d turns 2 images into \(2, 8, 14, 14\).*nn.Flatten"),
        (nn.Conv2d(5, 8, 3), r"Conv2d fails on images of shape \(2, 3, 16, 16\)"),
        (nn.Flatten(0), r"Flatten turns 2 images into \(1536,\)"),
    ],
)
def test_an_own_trunk_that_gives_no_features_is_refused(trunk, words):
    with pytest.raises(InputError, match=words):
        build_encoder(ModelConfig(), trunk=trunk, image_size=16)


# The key encoder follows


def test_the_key_encoder_starts_bit_equal_and_stays_so_while_the_query_rests():
    pair = tiny_pair()
    for _ in range(2):
        pairs = zip(pair.query.parameters(), pair.key.parameters(), strict=True)
        assert all(query.equal(key) and query is not key for query, key in pairs)
        pair.update_key()


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.999, 1.0])
def test_the_key_moves_by_the_momentum_formula(momentum):
    pair = tiny_pair(momentum)
    with torch.no_grad():
        for parameter in pair.query.parameters():
            parameter.add_(torch.randn_like(parameter))
    expected = [
        momentum * key.double() + (1 - momentum) * query.double()
        for query, key in zip(pair.query.parameters(), pair.key.parameters(), strict=True)
    ]
    pair.update_key()
    for value, wanted in zip(pair.key.parameters(), expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-6, atol=1e-7)


def test_a_copy_of_a_pair_moves_its_own_key():
    """The pair keeps lists of its parameters, and a copy must have lists of its own."""
    pair = tiny_pair(0.5)
    pair.update_key()
    other = copy.deepcopy(pair)
    with torch.no_grad():
        for parameter in other.query.parameters():
            parameter.add_(1)
    untouched = [each.clone() for each in pair.key.parameters()]
    other.update_key()
    assert all(map(torch.equal, untouched, pair.key.parameters()))
    moved = zip(other.key.parameters(), untouched, strict=True)
    assert all(bool((a - b).norm() > 0) for a, b in moved)


def test_the_key_never_gets_gradients_and_the_query_all():
    pair = tiny_pair()
    images = torch.randn(4, 3, 8, 8)
    keys = encode_keys(pair.key, images, torch.randperm(4))
    assert not keys.requires_grad
    (pair.query(images) * keys).sum().backward()
    assert all(p.grad is None and not p.requires_grad for p in pair.key.parameters())
    assert all(p.grad is not None for p in pair.query.parameters())
    pair.update_key()
    assert not any(p.requires_grad for p in pair.key.parameters())


def test_the_keys_running_statistics_are_its_own():
    pair = tiny_pair()
    query_before, key_before = (copy.deepcopy(e.state_dict()) for e in (pair.query, pair.key))
    encode_keys(pair.key, torch.randn(4, 3, 8, 8) + 1)
    pair.update_key()
    statistics = "trunk.1.running_mean"
    assert pair.query.state_dict()[statistics].equal(query_before[statistics])
    assert not pair.key.state_dict()[statistics].equal(key_before[statistics])


# Batch norm in groups


def group_statistics(batch: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and unbiased variance of each group's channels, computed slowly."""
    dims = [dim for dim in range(batch.ndim) if dim != 1]
    groups = batch.double().chunk(splits)
    mean = torch.stack([group.mean(dims) for group in groups])
    return mean, torch.stack([group.var(dims) for group in groups])


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm2d(5), (8, 5, 4, 3)),
        (nn.BatchNorm1d(5), (8, 5)),
        (nn.BatchNorm1d(5, affine=False, momentum=0.4), (8, 5, 7)),
        (nn.BatchNorm2d(5, momentum=1.0), (8, 5, 4, 3)),
        (nn.BatchNorm2d(5, track_running_stats=False), (8, 5, 4, 3)),
    ],
)
def test_split_batch_norm_is_batch_norm_of_each_group(norm, shape, splits):
    batch = torch.randn(shape) * 3 + torch.arange(8.0).view(-1, *[1] * (len(shape) - 1))
    plain, split = copy.deepcopy(norm), split_batch_norm(copy.deepcopy(norm), splits)
    expected = torch.cat([copy.deepcopy(norm)(group) for group in batch.chunk(splits)])
    torch.testing.assert_close(split(batch), expected)
    assert not torch.allclose(plain(batch), expected, atol=1e-2)
    if norm.running_mean is None:
        return
    mean, var = (statistic.mean(dim=0).float() for statistic in group_statistics(batch, splits))
    momentum = norm.momentum
    torch.testing.assert_close(split.running_mean, momentum * mean)
    torch.testing.assert_close(split.running_var, 1 - momentum + momentum * var)
    assert split.momentum == momentum
    assert split.num_batches_tracked == splits


def test_a_cumulative_average_counts_every_group():
    split = split_batch_norm(nn.BatchNorm1d(5, momentum=None), 4)
    batches = torch.randn(2, 8, 5) + 1
    for batch in batches:
        split(batch)
    torch.testing.assert_close(split.running_mean, batches.mean(dim=(0, 1)))


def test_evaluation_and_state_are_those_of_the_plain_module():
    plain = Encoder(tiny_trunk(), 6, dim=5)
    split = split_batch_norm(copy.deepcopy(plain), 4)
    images = torch.randn(6, 3, 8, 8)  # 4 does not divide 6
    assert split.eval()(images).equal(plain.eval()(images))
    assert list(split.state_dict()) == list(plain.state_dict())
    split.train()(images[:4].repeat(2, 1, 1, 1))
    plain.load_state_dict(split.state_dict())
    assert split.eval()(images).equal(plain(images))
    split.load_state_dict(plain.state_dict())


def test_a_copy_of_a_split_module_splits_by_itself_and_1_undoes_it():
    split = split_batch_norm(tiny_trunk(), 2)
    copied = copy.deepcopy(split)
    before = copy.deepcopy(split.state_dict())
    images = torch.randn(8, 3, 8, 8)
    copied(images)
    assert split.state_dict()["1.running_mean"].equal(before["1.running_mean"])
    assert copied(images).equal(split(images))
    plain = tiny_trunk()
    plain.load_state_dict(before)
    assert split_batch_norm(copied, 1)(images).equal(plain(images))


def test_channels_last_stays_channels_last():
    images = torch.randn(8, 5, 4, 4).to(memory_format=torch.channels_last)
    split = split_batch_norm(nn.BatchNorm2d(5), 4)
    assert split(images).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("splits", "batch", "words"),
    [
        (3, 8, "key_bn_splits=3 cannot split 8 keys"),
        (8, 8, "key_bn_splits=8 cannot split 8 keys"),
        (0, 8, "splits=0 must be at least 1"),
    ],
)
def test_bad_splits_are_refused(splits, batch, words):
    with pytest.raises(InputError, match=words):
        encode_keys(tiny_pair(splits=splits).key, torch.randn(batch, 3, 8, 8))


# Shuffled keys


def test_a_permutation_returns_every_key_to_its_image():
    pair = tiny_pair(splits=1)
    images, permutation = torch.randn(8, 3, 8, 8), torch.randperm(8)
    shuffled = encode_keys(pair.key, images, permutation)
    torch.testing.assert_close(shuffled, encode_keys(pair.key, images), rtol=0, atol=1e-5)
    rows = torch.arange(8)
    there = shuffle_across(rows, permutation)
    assert there.equal(permutation)
    assert shuffle_across(there, permutation.argsort()).equal(rows)


def test_rows_are_shuffled_within_their_nodes_or_among_all():
    def seeded():
        return torch.Generator().manual_seed(4)

    whole = shuffled_rows(3, [[0, 1, 2, 3]], seeded())
    assert torch.equal(whole, torch.randperm(12, generator=seeded()))
    apart = shuffled_rows(3, [[0, 2], [1, 3]], seeded())
    assert sorted(apart.tolist()) == list(range(12))
    for ranks in ([0, 2], [1, 3]):
        rows = [row for rank in ranks for row in range(3 * rank, 3 * rank + 3)]
        assert sorted(apart[rows].tolist()) == rows
        assert apart[rows].tolist() != rows


def test_shuffling_changes_nothing_without_groups_and_much_with_them():
    """Reliability row 38: with one group a permutation is a no-op, so groups are the default."""
    images, permutation = torch.randn(8, 3, 8, 8), torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    for splits, changed in [(1, False), (2, True)]:
        pair = tiny_pair(splits=splits)
        apart = encode_keys(pair.key, images) - encode_keys(pair.key, images, permutation)
        assert (float(apart.abs().max()) > 1e-3) == changed


def test_only_batch_norm_without_groups_is_worth_a_warning():
    assert tiny_pair(splits=1).shares_statistics
    assert not tiny_pair(splits=2).shares_statistics
    without = nn.Sequential(nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert not QueryKeyPair(Encoder(without, 6), key_bn_splits=1).shares_statistics
    assert "key_bn_splits" in UNSPLIT_WARNING


def test_a_permutation_of_another_batch_is_refused():
    with pytest.raises(InputError, match="permutation has 4 entries for 1 x 8 rows"):
        encode_keys(tiny_pair().key, torch.randn(8, 3, 8, 8), torch.randperm(4))
