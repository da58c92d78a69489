"""The two-tower loss, against CLIP's symmetric cross-entropy; two processes against one.

`OPEN_CLIP` are numbers that open_clip 3.3.0's ClipLoss gave, run once outside this project in
float64, on one process and on two (gloo, local_loss and gather_with_grad): its value, and its
gradients by the first image, the first text and logit_scale. With local_loss=False it gives every
process the mean of the two values, and the same gradients of the features.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from hardmix import InputError, MochiLoss
from hardmix.integrations import TwoTowerLoss
from hardmix.methods.mixing_schedule import RowDraws
from hardmix.runtime.distributed import gather
from ranks import in_two_processes

PLAIN = {"num_pairs": 0, "num_with_query": 0}
OPEN_CLIP = {
    "one": (3.458476513045, [0.464462018777, -0.604965867519, -0.282579608554, -0.218689283132,
            -0.061028352858, 0.475415048789], [-0.173198468031, 0.16224330553, -0.137042465191,
            -0.091016089061, -0.245587598942, -0.426519786032], 2.963746294521),
    0: (5.203648023038, [-1.539165252443, 0.917956315036, -1.227877479903, 1.535415313436,
        -0.717400337209, 0.547598742532], [1.152066263681, 1.452969666628, -1.365011794494,
        -1.099305333369, 0.220558929361, -0.486503727651], 4.416266697819),
    1: (6.734503953688, [2.173281591459, -0.726147556922, -1.23125504566, 0.350618838246,
        -0.75389398319, -1.323138356744], [0.115304764069, -1.841772805945, 0.822527397764,
        -0.574252359334, 0.728878306112, 1.174998562796], 5.97844910589),
}  # fmt: skip


def features(batch=6, dim=8):
    return torch.randn(2, batch, dim).double().requires_grad_().unbind()


def clip_loss(image, text, scale, own_texts=None, own_images=None):
    """Radford et al. 2021, Fig. 3, with further columns for own negatives."""
    image, text = normalize(image, dim=1), normalize(text, dim=1)
    value = 0.0
    for one, other, own in [(image, text, own_texts), (text, image, own_images)]:
        logits = one @ other.T
        if own is not None:
            columns = torch.einsum("bd,bmd->bm", one, normalize(own, dim=2))
            logits = torch.cat([logits, columns], dim=1)
        value = value + cross_entropy(scale * logits, torch.arange(len(one))) / 2
    return value


def assert_same(ours, theirs, *inputs):
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_without_mixing_it_is_clips_loss_with_its_learnt_scale():
    image, text = features()
    loss = TwoTowerLoss(**PLAIN).double()
    theirs = clip_loss(image, text, loss.logit_scale.exp())
    assert_same(loss(image, text), theirs, image, text, loss.logit_scale)


def test_a_scale_that_open_clip_passes_is_used_and_learnt():
    """open_clip's loop calls loss(**model_out, output_dict=True)."""
    image, text = features()
    learnt = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    out = {"image_features": image, "text_features": text, "logit_scale": learnt.exp()}
    ours = TwoTowerLoss(**PLAIN)(**out, output_dict=True)
    assert ours.keys() == {"contrastive_loss"}
    assert_same(ours["contrastive_loss"], clip_loss(image, text, learnt.exp()), image, text, learnt)


def assert_open_clips(which, batch):
    """Check the loss and gradients of this process's part of a batch of unit vectors."""
    generator = torch.Generator().manual_seed(7)
    whole = [
        normalize(torch.randn(batch, 6, generator=generator, dtype=torch.float64), dim=1)
        for _ in range(2)
    ]
    image, text = (
        (each if which == "one" else each.chunk(2)[which]).clone().requires_grad_()
        for each in whole
    )
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    value = TwoTowerLoss(**PLAIN)(image, text, scale.exp())
    of_image, of_text, of_scale = torch.autograd.grad(value, [image, text, scale])
    found = value.detach(), of_image[0], of_text[0], of_scale
    for ours, theirs in zip(found, OPEN_CLIP[which], strict=True):
        expected = torch.tensor(theirs, dtype=torch.float64)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)


def test_without_mixing_it_is_open_clips_loss():
    assert_open_clips("one", 5)


def open_clip_on_two(number):
    assert_open_clips(number, 6)


def test_on_two_processes_it_is_open_clips_local_loss_with_gathered_gradients():
    in_two_processes(open_clip_on_two)


def test_own_negatives_are_each_modalitys():
    image, text = features()
    texts, images = torch.randn(6, 3, 8).double(), torch.randn(6, 2, 8).double()
    texts.requires_grad_(), images.requires_grad_()
    ours = TwoTowerLoss(**PLAIN)(image, text, 10.0, own_texts=texts, own_images=images)
    theirs = clip_loss(image, text, 10.0, texts, images)
    assert_same(ours, theirs, image, text, texts, images)
    with pytest.raises(InputError, match="option='own_text' is unknown: choose one of own_texts"):
        TwoTowerLoss(**PLAIN)(image, text, own_text=texts)


def test_with_mixing_it_is_mochi_loss_within_the_other_modality():
    image, text = features()
    counts = {"num_hardest": 4, "num_pairs": 7, "num_with_query": 3}
    own = ~torch.ones(6, 6, dtype=torch.bool).fill_diagonal_(False)
    mochi = MochiLoss(**counts, temperature=0.07)
    generator = torch.Generator().manual_seed(2)
    there = mochi(image, text, text, own, generator=generator)
    back = mochi(text, image, image, own, generator=generator)
    loss = TwoTowerLoss(**counts).double()
    ours = loss(image, text, generator=torch.Generator().manual_seed(2))
    assert_same(ours, (there + back) / 2, image, text)
    assert ours > loss(image, text, mix=False)


def test_pairs_that_are_excluded_are_no_negatives():
    image, text = features(4)
    equal = torch.zeros(4, 4, dtype=torch.bool)
    equal[0, 1] = equal[1, 0] = True  # the same caption twice
    loss = TwoTowerLoss(**PLAIN)
    logits = 5 * normalize(image, dim=1) @ normalize(text, dim=1).T
    masked = [each.masked_fill(equal, -torch.inf) for each in (logits, logits.T)]
    expected = sum(cross_entropy(each, torch.arange(4)) for each in masked) / 2
    torch.testing.assert_close(loss(image, text, 5.0, exclude=equal), expected)


def test_the_learnt_scale_stays_at_or_below_its_maximum_and_the_loss_can_be_copied():
    loss = TwoTowerLoss()
    with torch.no_grad():
        loss.logit_scale.fill_(9.0)
    image, text = (each.float() for each in features())
    value = copy.deepcopy(loss)(image, text, mix=False)
    assert loss.logit_scale.item() == 9.0
    assert value == loss(image, text, mix=False)
    assert loss.logit_scale.item() == pytest.approx(math.log(100))
    with pytest.raises(InputError, match=r"logit_scale=5.0 with max_scale=100.0"):
        TwoTowerLoss(5.0)
    with pytest.raises(InputError, match=r"max_scale=0"):
        TwoTowerLoss(max_scale=0)


def one_process_and_two(number):
    """Each process's pairs against those of all, mixed too; gradients averaged as by DDP."""
    torch.manual_seed(2)
    inputs, towers = torch.randn(2, 8, 6, dtype=torch.float64), nn.ModuleList()
    for _ in range(2):
        towers.append(nn.Linear(6, 4).double())
    own = torch.randn(8, 3, 4, dtype=torch.float64)
    for counts in (PLAIN, {"num_hardest": 5, "num_pairs": 6, "num_with_query": 3}):
        loss = TwoTowerLoss(1.0, **counts).double()
        parameters = [*towers.parameters(), loss.logit_scale]
        mochi = MochiLoss(**{"num_hardest": 64, **counts}, temperature=math.exp(-1.0))
        image, text = (tower(each) for tower, each in zip(towers, inputs, strict=True))
        draws = RowDraws(3)
        there = mochi.in_batch(image, text, own_negatives=own, generator=draws)
        whole = (there + mochi.in_batch(text, image, generator=draws)) / 2
        expected = torch.autograd.grad(whole, parameters[:-1], retain_graph=True)

        mine = [each.chunk(2)[number] for each in (image, text, own)]
        value = loss(*mine[:2], own_texts=mine[2], generator=RowDraws(3, part=number))
        gradients = torch.autograd.grad(value, parameters)
        torch.testing.assert_close(gather(value.detach().unsqueeze(0)).mean(), whole.detach())
        for gradient, other in zip(gradients[:-1], expected, strict=True):
            averaged = gather(gradient.unsqueeze(0)).mean(dim=0)
            torch.testing.assert_close(averaged, other, rtol=1e-10, atol=1e-12)
        assert gradients[-1].abs() > 0


def test_two_processes_are_one_with_the_whole_batch():
    in_two_processes(one_process_and_two)
