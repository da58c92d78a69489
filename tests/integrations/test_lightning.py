"""MomentumContrast in Lightning's trainer and in a plain loop."""

import copy
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from hardmix import InputError, MemoryQueue, MochiLoss
from hardmix.integrations import MomentumContrast
from places import ROOT
from ranks import in_two_processes

pytestmark = pytest.mark.slow


def encoder():
    torch.manual_seed(3)
    return nn.Linear(6, 4)


def small(**options):
    return MomentumContrast(encoder(), dim=4, queue_size=16, momentum=0.9, **options)


def test_it_is_mochi_loss_with_a_queue_and_momentum_step_by_step():
    counts = {"num_hardest": 16, "num_pairs": 5, "num_with_query": 3}
    module, plain, slow = small(**counts), encoder(), encoder()
    torch.manual_seed(8)
    memory = MemoryQueue(16, 4, start="empty")
    module.memory.keys.copy_(memory.keys)
    loss = MochiLoss(16, 5, 3)
    for step in range(4):
        first, second = torch.randn(2, 5, 6)
        with torch.no_grad():
            slow.weight.lerp_(plain.weight, 0.1)
            slow.bias.lerp_(plain.bias, 0.1)
            key = slow(second)
        torch.manual_seed(step)
        expected = loss(plain(first), key, memory)
        memory.enqueue(key)
        torch.manual_seed(step)
        ours = module.contrast(first, second)
        torch.testing.assert_close(ours, expected)
        for value, network in ((ours, module.encoder), (expected, plain)):
            network.zero_grad()
            value.backward()
            with torch.no_grad():
                for each in network.parameters():
                    each -= 0.3 * each.grad
    torch.testing.assert_close(module.key_encoder.weight, slow.weight)
    torch.testing.assert_close(module.memory.keys, memory.keys)
    assert not module.key_encoder.weight.requires_grad


def test_evaluation_changes_nothing():
    module = small().eval()
    before = {name: each.clone() for name, each in module.state_dict().items()}
    module.contrast(*torch.randn(2, 5, 6))
    for name, each in module.state_dict().items():
        assert torch.equal(each, before[name])


def test_labels_and_ids_leave_out_negatives_of_the_same():
    module = small(num_pairs=0, num_with_query=0)
    views, labels = torch.randn(2, 16, 6), torch.arange(16) % 4
    module.contrast(*views, labels=labels, ids=torch.arange(16))
    module.eval()
    unit = [normalize(each, dim=1) for each in (module.encoder(views[0]), module.memory.keys)]
    logits = unit[0] @ unit[1].T / 0.2
    for given, same in [
        ({"labels": labels}, labels[:, None] == labels),
        ({"ids": torch.arange(16)}, torch.eye(16, dtype=torch.bool)),
    ]:
        positive = (unit[0] * normalize(module.key_encoder(views[1]), dim=1)).sum(dim=1)
        columns = torch.cat([positive[:, None] / 0.2, logits.masked_fill(same, -torch.inf)], dim=1)
        expected = -columns.log_softmax(dim=1)[:, 0].mean()
        torch.testing.assert_close(module.contrast(*views, **given), expected)


def queue_of_two(number):
    module = small(num_pairs=0, num_with_query=0)
    views, ids = torch.randn(2, 10, 6), torch.arange(10)
    module.contrast(*(each.chunk(2)[number] for each in views), ids=ids.chunk(2)[number])
    expected = normalize(module.key_encoder(views[1]), dim=1)
    torch.testing.assert_close(module.memory.keys[:10], expected)
    assert torch.equal(module.memory.ids[:10], ids)
    assert module.memory.filled == 10


def test_the_queue_holds_the_keys_of_all_processes():
    in_two_processes(queue_of_two)


def test_wrong_settings_are_refused():
    with pytest.raises(InputError, match=r"momentum=1.5 must be from 0 to 1"):
        MomentumContrast(encoder(), dim=4, queue_size=16, momentum=1.5)
    with pytest.raises(InputError, match="num_hardest=17 exceeds the 16 negatives"):
        small(num_hardest=17, num_pairs=1)
    with pytest.raises(InputError, match="key_groups=0 is below 1"):
        small(key_groups=0)


def test_keys_in_groups_have_the_statistics_of_their_group_and_keep_their_order():
    module = MomentumContrast(
        nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), dim=4, queue_size=16, key_groups=3
    )
    whole = copy.deepcopy(module.key_encoder)
    views = torch.randn(2, 9, 6)
    torch.manual_seed(5)
    module.contrast(*views)
    torch.manual_seed(5)
    order = torch.randperm(9)
    expected = torch.empty(9, 4)
    for rows in order.split(3):
        expected[rows] = whole(views[1][rows])
    torch.testing.assert_close(module.memory.keys[:9], normalize(expected, dim=1))
    torch.testing.assert_close(module.key_encoder[1].running_mean, whole[1].running_mean)


def fitted(monkeypatch, tmp_path, accumulate, steps, checkpoint=None):
    lightning = pytest.importorskip("lightning", reason="pip install 'hardmix[examples]'")
    pytest.importorskip("sklearn", reason="pip install 'hardmix[examples]'")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    digits = import_module("digits")
    moves = []

    class Module(MomentumContrast, lightning.LightningModule):
        def __init__(self):
            lightning.seed_everything(0, verbose=False)
            network = digits.build_encoder()
            super().__init__(network, dim=digits.DIM, queue_size=512, momentum=0.9, num_pairs=64)

        def training_step(self, batch, number):
            torch.manual_seed(1000 * self.current_epoch + number)
            before = self.key_encoder[0].weight.clone()
            loss = self.contrast(digits.view(batch[0]), digits.view(batch[0]))
            moves.append(not torch.equal(before, self.key_encoder[0].weight))
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.encoder.parameters(), lr=0.1, momentum=0.9)

    images = torch.utils.data.TensorDataset(digits.read_digits()[0][:384])
    loader = torch.utils.data.DataLoader(images, 32)
    trainer = lightning.Trainer(
        max_epochs=steps,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    module = Module()
    trainer.fit(module, loader, ckpt_path=checkpoint)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    return module, moves


def test_the_key_encoder_moves_once_per_step_of_the_optimizer(monkeypatch, tmp_path):
    _, moves = fitted(monkeypatch, tmp_path, accumulate=3, steps=1)
    assert moves == [False] * 3 + [True, False, False] * 3


def test_a_resumed_run_is_the_unbroken_one(monkeypatch, tmp_path):
    whole, _ = fitted(monkeypatch, tmp_path, accumulate=1, steps=2)
    fitted(monkeypatch, tmp_path, accumulate=1, steps=1)
    resumed, _ = fitted(
        monkeypatch, tmp_path, accumulate=1, steps=2, checkpoint=tmp_path / "last.ckpt"
    )
    assert resumed.memory.position == whole.memory.position
    for name, each in whole.state_dict().items():
        assert torch.equal(each, resumed.state_dict()[name]), name
