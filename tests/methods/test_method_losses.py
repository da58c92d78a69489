"""Each method's loss and gradient against a slow float64 one, and lightly's number on the same."""

import math

import lightly.loss
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from lightly.loss.regularizer import CO2Regularizer
from lightly.loss.swav_loss import sinkhorn as lightlys_sinkhorn
from torch.nn.functional import cross_entropy, normalize

from hardmix.errors import InputError
from hardmix.evaluation import kmeans
from hardmix.evaluation.features import Features
from hardmix.evaluation.kmeans import choose_library
from hardmix.methods.base import Materials, TrainingPosition, build_method
from hardmix.methods.byol import regression, target_momentum
from hardmix.methods.clusters import cluster
from hardmix.methods.co2 import consistency
from hardmix.methods.jigsaw import cut_tiles
from hardmix.methods.pcl import Prototypes, cluster_numbers, concentrations, prototype_loss
from hardmix.methods.swav import sinkhorn, swapped_loss
from hardmix.methods.unmix import draw_mixture, mix_images
from hardmix.mixing import diagnostics
from hardmix.models.lab_pair import MEAN, STD, ToLab
from hardmix.runtime.device import choose_compute
from method_cases import AT, batch_of, given_embeddings, slow_softmax, unit
from ranks import tiny

SIZES = st.tuples(st.integers(2, 6), st.integers(3, 9))


def plain(name, **more):
    """Return the method without points, for 96 images, and a batch of 16."""
    points = {"num_pairs": 0, "num_with_query": 0}
    config = tiny(name, mix=points, **more)
    materials = Materials(choose_compute("cpu", "fp32"), num_images=96)
    torch.manual_seed(7)
    return build_method(config, materials)


def test_simclr_is_nt_xent_with_its_gradient(monkeypatch):
    raw = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    gradients, losses = [], []
    method = plain("simclr", train={"temperature": 0.3})
    for lightlys in (True, False):
        leaf = raw.clone().requires_grad_()
        if lightlys:
            loss = lightly.loss.NTXentLoss(temperature=0.3)(*leaf.chunk(2))
        else:
            given_embeddings(monkeypatch, method, normalize(leaf, dim=1))
            loss = method.loss(batch_of(), AT).loss
        loss.backward()
        gradients.append(leaf.grad)
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


def test_simclr_mixes_other_images_only_and_leaves_out_a_class_with_the_oracle(monkeypatch):
    config = tiny("simclr", oracle=True, mix={"warm_up_epochs": 0})
    method = build_method(config, Materials(choose_compute("cpu", "fp32")))
    both = unit(32, 128).float()
    given_embeddings(monkeypatch, method, both)
    batch = batch_of()
    outcome = method.loss(batch, AT)
    labels = batch.labels.repeat(2)
    for row, parents in enumerate(torch.cat([outcome.plan.base, outcome.plan.partner], dim=1)):
        mixed = labels[parents[parents >= 0]]
        assert len(mixed)
        assert not (mixed == batch.labels[row]).any()
    monkeypatch.setattr(diagnostics, "TOP_PART", 1)  # all 32 count as the highest
    described = method.describe([outcome])
    assert described["false_negatives_top"] == pytest.approx(6 / 32)  # own views are none
    assert 0 < described["synthetic_mass"] < 1


def test_byol_is_lightlys_negative_cosine_and_its_momentum_rises():
    first, second = unit(6, 8).requires_grad_(), unit(6, 8, seed=1)
    loss = regression(first, second)
    theirs = 2 + 2 * lightly.loss.NegativeCosineSimilarity()(first, second)
    slow = sum(((a - b) ** 2).sum() for a, b in zip(first, second, strict=True)) / 6
    torch.testing.assert_close(loss, theirs)
    torch.testing.assert_close(loss, slow)
    assert [target_momentum(0.9, each) for each in (0.0, 0.5, 1.0)] == pytest.approx([0.9, 0.95, 1])


def test_byol_compares_each_prediction_with_the_other_views_projection(monkeypatch):
    method = plain("byol")
    predictions = [unit(16, 128, seed=each).float() for each in (1, 2)]
    given_embeddings(monkeypatch, method, *predictions)
    batch = batch_of()
    with torch.no_grad():
        targets = [normalize(method.target(view), dim=1) for view in batch.views]
    method = plain("byol")  # batch norm has moved
    given_embeddings(monkeypatch, method, *predictions)
    expected = regression(predictions[0], targets[1]) + regression(predictions[1], targets[0])
    torch.testing.assert_close(method.loss(batch, AT).loss, expected)


@given(SIZES, st.integers(1, 8), st.sampled_from([0.02, 0.05, 0.5]))
def test_sinkhorns_marginals_and_lightlys_codes(sizes, iterations, epsilon):
    batch, number = sizes
    scores = unit(batch, 4) @ unit(number, 4, seed=batch + number).T
    codes = sinkhorn(scores, epsilon, iterations)
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(batch).double())
    theirs = lightlys_sinkhorn(scores, iterations=iterations, epsilon=epsilon)
    torch.testing.assert_close(codes, theirs, rtol=1e-6, atol=1e-9)
    long = sinkhorn(scores, 0.5, 300)
    torch.testing.assert_close(long.sum(dim=0), torch.full((number,), batch / number).double())


@pytest.mark.parametrize("queued", [False, True])
def test_swavs_loss_is_lightlys(queued):
    prototypes, rows = unit(7, 5), [unit(4, 5, seed=each) for each in range(5)]
    queues = [unit(6, 5, seed=each) for each in (11, 12)]
    scores = [(each @ prototypes.T).requires_grad_() for each in rows]
    earlier = [each @ prototypes.T for each in queues]
    theirs = lightly.loss.SwaVLoss()(scores[:2], scores[2:], earlier if queued else None)
    theirs.backward()
    gradients = [each.grad.clone() for each in scores]
    codes = []
    for score, more in zip(scores[:2], earlier, strict=True):
        everyone = torch.cat([score.detach(), more]) if queued else score.detach()
        codes.append(sinkhorn(everyone, 0.05, 3)[:4])
    for each in scores:
        each.grad = None
    loss = swapped_loss(scores, codes, 0.1)
    loss.backward()
    torch.testing.assert_close(loss, theirs[0])
    for each, gradient in zip(scores, gradients, strict=True):
        torch.testing.assert_close(each.grad, gradient)


@given(SIZES)
def test_consistency_is_half_the_symmetric_divergence_and_lightlys(sizes):
    batch, number = sizes
    query, key = unit(batch, 4), unit(batch, 4, seed=1)
    queue = unit(number, 4, seed=2)
    first, second = query @ queue.T / 0.05, key @ queue.T / 0.05
    p, q = first.softmax(dim=1), second.softmax(dim=1)
    slow = ((p * (p / q).log()).sum() + (q * (q / p).log()).sum()) / (2 * batch)
    torch.testing.assert_close(consistency(first, second), slow, rtol=1e-9, atol=1e-9)
    # lightly has q.k as a first entry of both, and loses the gradient
    regularizer = CO2Regularizer(alpha=1.0, t_consistency=0.05)
    log_p = regularizer._get_pseudo_labels(query, key, queue.T)
    log_q = regularizer._get_pseudo_labels(key, query, queue.T)
    theirs = (regularizer.kl_div(log_p, log_q.exp()) + regularizer.kl_div(log_q, log_p.exp())) / 2
    if regularizer.log_target:
        theirs = (regularizer.kl_div(log_p, log_q) + regularizer.kl_div(log_q, log_p)) / 2
    positive = (query * key).sum(dim=1, keepdim=True) / 0.05
    ours = consistency(torch.cat([positive, first], dim=1), torch.cat([positive, second], dim=1))
    torch.testing.assert_close(ours, theirs)


def test_co2_adds_the_divergence_over_the_queue(monkeypatch):
    query, key = unit(16, 128).requires_grad_(), unit(16, 128, seed=1)
    method = plain("co2", train={"temperature": 0.2})
    monkeypatch.setattr(method, "encode", lambda *_: (query.float(), key.float()))
    method.memory.enqueue(unit(64, 128, seed=2).float())
    queue = method.memory.keys.double()
    slow = slow_softmax(query, key, queue, 0.2)
    slow = slow + consistency(query @ queue.T / 0.05, key @ queue.T / 0.05)
    outcome = method.loss(batch_of(), AT)
    torch.testing.assert_close(outcome.loss.double(), slow, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(slow, query)[0]
    torch.testing.assert_close(
        torch.autograd.grad(outcome.loss, query)[0], expected, rtol=1e-3, atol=1e-5
    )
    assert method.describe([outcome])["consistency"] > 0


def test_image_mixture_has_both_keys_by_their_shares(monkeypatch):
    """Shen et al.'s code: the mixed queries' embeddings are reversed, not the keys."""
    query, mixed = unit(16, 128).requires_grad_(), unit(16, 128, seed=3).requires_grad_()
    key = unit(16, 128, seed=1)
    method = plain("unmix")
    monkeypatch.setattr(method, "encode", lambda *_: (query.float(), key.float()))
    given_embeddings(monkeypatch, method, mixed.float())
    method.memory.enqueue(unit(64, 128, seed=2).float())
    queue, tau = method.memory.keys.double(), method.config.train.temperature
    share = draw_mixture(0, AT, (32, 32), 1.0, 0.5).share
    slow = slow_softmax(query, key, queue, tau)
    slow = slow + share * slow_softmax(mixed, key, queue, tau)
    slow = slow + (1 - share) * slow_softmax(mixed.flip(0), key, queue, tau)
    loss = method.loss(batch_of(), AT).loss
    torch.testing.assert_close(loss.double(), slow, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(loss, [query, mixed]),
        torch.autograd.grad(slow, [query, mixed]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_mixtures_are_drawn_as_the_authors_draw_them():
    drawn = [draw_mixture(0, TrainingPosition(step, 0), (40, 50), 1.0, 0.5) for step in range(2000)]
    whole = [each.share for each in drawn if each.box is None]
    assert abs(len(whole) / 2000 - 0.5) < 0.05
    assert np.mean(whole) == pytest.approx(0.5, abs=0.03)  # Beta(1, 1) is uniform
    assert np.var(whole) == pytest.approx(1 / 12, abs=0.01)
    images = torch.zeros(2, 3, 40, 50)
    for each in drawn[:50]:
        mixed = mix_images(images, images + 1, each)
        assert float(mixed.mean()) == pytest.approx(1 - each.share, abs=1e-6)


@pytest.mark.parametrize("name", ["instdis", "pirl", "cmc"])
def test_banks_are_contrasted_with_their_images_entries(name, monkeypatch):
    method = plain(name, train={"queue_size": 40})
    outputs = [unit(16, 128, seed=each).requires_grad_() for each in (1, 2)]
    found = outputs[0].float() if name == "instdis" else tuple(each.float() for each in outputs)
    given_embeddings(monkeypatch, method, found)
    batch = batch_of(size=36)
    batch = batch._replace(views=(batch.views[0][..., :32, :32], batch.views[1]))
    outcome = method.loss(batch, AT)
    tau, entries = method.config.train.temperature, method.memory.keys.double()
    rows = method.memory.rows(40, 0)  # of another seed: as many
    assert rows.shape == (40,)
    rows = [int(((entries - each.double()).norm(dim=1)).argmin()) for each in drawn_of(method)]
    hidden = [[row == int(image) for row in rows] for image in batch.ids]
    first = slow_softmax(outputs[0], entries[batch.ids], entries[rows], tau, hidden)
    if name == "instdis":
        slow = first
    elif name == "pirl":
        slow = (
            first + slow_softmax(outputs[1], entries[batch.ids], entries[rows], tau, hidden)
        ) / 2
    else:
        light = method.light.keys.double()
        slow = first + slow_softmax(outputs[1], light[batch.ids], light[rows], tau, hidden)
    torch.testing.assert_close(outcome.loss.double(), slow, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(slow, outputs[0], retain_graph=True)[0]
    ours = torch.autograd.grad(outcome.loss, outputs[0], retain_graph=True)[0]
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-6)
    before = method.memory.keys[batch.ids].clone()
    method.after_step(batch, [outcome])
    written = outputs[1] if name == "cmc" else outputs[0]
    moved = normalize(before.double() / 2 + written.detach() / 2, dim=1)
    torch.testing.assert_close(method.memory.keys[batch.ids].double(), moved, rtol=0, atol=1e-6)
    assert torch.equal(method.memory.labels[batch.ids], batch.labels)


def drawn_of(method):
    """Return the bank's entries that a step at AT has as negatives."""
    from hardmix.runtime.random_numbers import seed_of

    rows = method.memory.rows(40, seed_of("negatives", 0, AT.step, AT.part))
    return method.memory.keys[rows]


def test_an_image_that_comes_twice_is_written_once():
    method = plain("instdis")
    keys, ids = unit(3, 128).float(), torch.tensor([7, 2, 7])
    old = method.memory.keys[7].clone()
    method.memory.remember(keys, torch.tensor([1, 0, 3]), ids, 0.5)
    torch.testing.assert_close(method.memory.keys[7], normalize(old + keys[0], dim=0))
    assert len(method.memory.rows(1000, 0)) == 96  # no more than there are


def test_tiles_come_from_their_cells_in_a_random_order():
    cells = torch.arange(9.0).view(3, 3).repeat_interleave(12, 0).repeat_interleave(12, 1)
    images = cells.expand(200, 3, 36, 36)
    tiles = cut_tiles(images, 9, torch.rand(200, 27))
    assert tiles.shape == (200, 9, 3, 9, 9)
    assert torch.equal(tiles.amin(dim=(2, 3, 4)), tiles.amax(dim=(2, 3, 4)))  # of one cell each
    order = tiles[:, :, 0, 0, 0]
    assert torch.equal(order.sort(dim=1).values, torch.arange(9.0).expand(200, 9))
    assert len({tuple(each.tolist()) for each in order}) > 190
    place = torch.arange(36.0).view(36, 1).expand(50, 3, 36, 36)
    starts = cut_tiles(place, 9, torch.rand(50, 27))[:, :, 0, 0, 0] % 12
    assert set(starts.flatten().tolist()) == {0.0, 1.0, 2.0, 3.0}


def test_lab_is_that_of_known_colours():
    """CIE's values for sRGB's corners, as skimage.color.rgb2lab gives them."""
    known = {
        (1.0, 1.0, 1.0): (100.0, 0.0, 0.0),
        (0.0, 0.0, 0.0): (0.0, 0.0, 0.0),
        (1.0, 0.0, 0.0): (53.241, 80.092, 67.203),
        (0.0, 1.0, 0.0): (87.735, -86.183, 83.179),
        (0.0, 0.0, 1.0): (32.297, 79.188, -107.86),
        (0.5, 0.5, 0.5): (53.389, 0.0, 0.0),
    }
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    images = (torch.tensor(list(known))[..., None, None] - mean) / std
    to_lab = ToLab()
    lab = to_lab(images) * to_lab.reach + to_lab.middle
    assert lab[..., 0, 0].tolist() == [pytest.approx(each, abs=0.05) for each in known.values()]
    from hardmix.data.colours import channel_statistics

    assert channel_statistics(3) == (MEAN, STD)


def slow_concentrations(distance, own, number, tau):
    """The authors' loops, in numpy."""
    members = [[d for d, o in zip(distance, own, strict=True) if o == c] for c in range(number)]
    phi = np.array(
        [np.mean(each) / math.log(len(each) + 10) if len(each) > 1 else 0.0 for each in members]
    )
    phi[[len(each) <= 1 for each in members]] = phi.max()
    phi = phi.clip(np.percentile(phi, 10), np.percentile(phi, 90))
    return tau * phi / phi.mean()


def test_concentrations_and_prototypes_are_the_authors():
    generator = np.random.default_rng(0)
    own = np.r_[np.arange(11), generator.integers(0, 9, 60)]  # 9 and 10 have one image each
    distance = generator.uniform(0.1, 1.0, len(own))
    phi = concentrations(torch.tensor(distance), torch.tensor(own), 12, 0.2)
    torch.testing.assert_close(
        phi.double(),
        torch.tensor(slow_concentrations(distance, own, 12, 0.2)),
        rtol=1e-5,
        atol=1e-6,
    )
    query, centres = unit(5, 4).requires_grad_(), unit(12, 4, seed=1)
    mine, columns = torch.tensor([0, 3, 3, 11, 7]), torch.tensor([2, 3, 5, 7, 8])
    loss = prototype_loss(query, centres, phi.double(), mine, columns)
    slow = []
    for row, positive in zip(query, mine.tolist(), strict=True):
        names = [positive, *(each for each in columns.tolist() if each != positive)]
        logits = torch.stack([row @ centres[each] / phi[each].double() for each in names])
        slow.append(cross_entropy(logits[None], torch.tensor([0])))
    torch.testing.assert_close(loss, torch.stack(slow).mean())


@pytest.fixture(params=["sklearn", "faiss"])
def library(request):
    """Library that does k-means; faiss is an extra of its own."""
    pytest.importorskip(request.param, reason="needs pip install 'hardmix[faiss]'")
    return request.param


def grouped(seed=0):
    """180 unit vectors in six groups, in order."""
    noise = torch.randn(180, 16, generator=torch.Generator().manual_seed(seed))
    return normalize(unit(6, 16).repeat_interleave(30, 0) + 0.02 * noise, dim=1).float()


def prototypes_of(rows, found):
    """Centres, concentrations at tau = 0.2 and clusters, as PCL takes them over."""
    numbers = torch.arange(len(rows))
    prototypes = Prototypes(len(rows), len(found.centres), rows.shape[1])
    prototypes.take(Features(rows, numbers, numbers), found, 0.2)
    return prototypes.centres, prototypes.concentration, prototypes.cluster


def test_clusters_are_found_by_both_libraries_and_repeat_by_their_seed(library):
    rows = grouped()
    *parts, found = cluster(rows, 6, 3, library)
    centres, phi, own = prototypes_of(rows, found)
    assert parts == [None] * (20 if library == "faiss" else 10)
    assert own.dtype == torch.int64
    nearest = torch.cdist(rows, centres).argmin(dim=1)
    assert (own == nearest).float().mean() > 0.95  # nearest before centres were normalised
    *_, again = cluster(rows, 6, 3, library)
    same = zip(prototypes_of(rows, again), (centres, phi, own), strict=True)
    assert all(torch.equal(*each) for each in same)
    *_, other = cluster(rows, 20, 4, library)
    assert not torch.equal(other.centres, list(cluster(rows, 20, 5, library))[-1].centres)


def test_faiss_is_taken_for_many_images_or_by_name_and_asked_for_if_missing(monkeypatch, capfd):
    found = {"sklearn", "faiss"}
    monkeypatch.setattr(kmeans, "find_spec", lambda name: name if name in found else None)
    assert choose_library("auto", 50_000, "pcl.kmeans=auto") == "sklearn"
    assert choose_library("auto", 1_281_167, "pcl.kmeans=auto") == "faiss"
    assert choose_library("faiss", 100, "pcl.kmeans=faiss") == "faiss"
    found.discard("faiss")
    assert not capfd.readouterr().err
    assert choose_library("auto", 1_281_167, "pcl.kmeans=auto") == "sklearn"
    assert "hardmix[faiss]" in capfd.readouterr().err
    with pytest.raises(InputError, match=r"pcl\.kmeans=faiss needs faiss.*hardmix\[faiss\]"):
        choose_library("faiss", 100, "pcl.kmeans=faiss")
    found.clear()
    with pytest.raises(InputError, match=r"needs scikit-learn.*hardmix\[analysis\]"):
        choose_library("auto", 100, "pcl.kmeans=auto")


def test_clusters_are_found_and_their_numbers_follow_the_images():
    rows = grouped()
    *_, found = cluster(rows, 6, 3)
    centres, phi, own = prototypes_of(rows, found)
    assert all(len(each.unique()) == 1 for each in own.view(6, 30))
    assert len(own.unique()) == 6
    torch.testing.assert_close(centres.norm(dim=1), torch.ones(6))
    assert float(phi.mean()) == pytest.approx(0.2)
    assert cluster_numbers((), 1_281_167) == (25_000, 50_000, 100_000)
    assert cluster_numbers((), 50_000) == (976, 1952, 3903)
