import io

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch.nn.functional import normalize

from hardmix import InputError, MemoryQueue, MochiLoss, contrast

DIM = 3


def numbered(first: int, batch: int) -> torch.Tensor:
    """Ids that go on from batch to batch."""
    return torch.arange(first, first + batch)


def assert_same_state(queue: MemoryQueue, state: dict[str, torch.Tensor]) -> None:
    assert queue.state_dict().keys() == state.keys()
    for name, value in queue.state_dict().items():
        assert torch.equal(value, state[name]), name


def copy_of_state(queue: MemoryQueue) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in queue.state_dict().items()}


class QueueAgainstAList(RuleBasedStateMachine):
    """The model writes one key at a time into a list of slots."""

    @initialize(size=st.integers(1, 7), start=st.sampled_from(["random", "empty"]))
    def begin(self, size, start):
        self.queue = MemoryQueue(size, DIM, start=start)
        self.slots = [(key, -1, -1) for key in self.queue.keys.clone()]
        self.position = self.filled = self.written = 0

    @rule(batch=st.integers(0, 17), labels=st.booleans(), ids=st.booleans())
    def enqueue(self, batch, labels, ids):
        keys = torch.randn(batch, DIM) * 5
        label = torch.randint(-1, 4, (batch,)) if labels else None
        number = numbered(self.written, batch) if ids else None
        self.queue.enqueue(keys, label, number)
        for i in range(batch):
            self.slots[self.position] = (
                keys[i] / keys[i].norm(),
                int(label[i]) if labels else -1,
                self.written + i if ids else -1,
            )
            self.position = (self.position + 1) % len(self.slots)
            self.filled = min(self.filled + 1, len(self.slots))
        self.written += batch

    @rule()
    def save_and_load_into_a_fresh_queue(self):
        file = io.BytesIO()
        torch.save(self.queue.state_dict(), file)
        file.seek(0)
        self.queue = MemoryQueue(len(self.slots), DIM, start=self.queue.start)
        self.queue.load_state_dict(torch.load(file, weights_only=True))

    @invariant()
    def holds_what_the_list_holds(self):
        keys, labels, ids = zip(*self.slots, strict=True)
        torch.testing.assert_close(self.queue.keys, torch.stack(keys))
        assert self.queue.labels.tolist() == list(labels)
        assert self.queue.ids.tolist() == list(ids)

    @invariant()
    def knows_where_to_write_and_how_much_it_holds(self):
        assert len(self.queue) == len(self.slots)
        assert (int(self.queue.position), int(self.queue.filled)) == (self.position, self.filled)
        unfilled = self.queue.unfilled()
        expected = [slot >= self.filled for slot in range(len(self.slots))]
        assert (unfilled.tolist() if unfilled is not None else [False] * self.filled) == expected


TestQueueFollowsAListThroughAnySequence = QueueAgainstAList.TestCase
TestQueueFollowsAListThroughAnySequence.settings = settings(max_examples=40, stateful_step_count=20)


@pytest.mark.parametrize("start", ["random", "empty"])
@pytest.mark.parametrize("shape", [(500, 4), (4, 500), (1, 1)])
def test_every_row_has_unit_length_from_the_start(start, shape):
    queue = MemoryQueue(*shape, start=start)
    torch.testing.assert_close(queue.keys.norm(dim=1), torch.ones(shape[0]))


def test_a_fresh_queue_holds_no_key_and_knows_no_image():
    queue = MemoryQueue(5, DIM)
    assert int(queue.position) == int(queue.filled) == 0
    assert queue.unfilled().all()
    assert queue.labels.tolist() == queue.ids.tolist() == [-1] * 5


def test_the_random_start_is_the_generators():
    first, second = (
        MemoryQueue(5, DIM, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    assert torch.equal(first.keys, second.keys)
    assert not torch.equal(first.keys, MemoryQueue(5, DIM).keys)


def test_all_five_are_saved_and_restored_bit_for_bit():
    queue = MemoryQueue(5, DIM)
    queue.enqueue(torch.randn(7, DIM), torch.arange(7), numbered(10, 7))
    state = copy_of_state(queue)
    assert set(state) == {"keys", "labels", "ids", "_extra_state"}
    assert state["_extra_state"].tolist() == [queue.position, queue.filled] == [2, 5]
    restored = MemoryQueue(5, DIM)
    restored.load_state_dict(state)
    assert_same_state(restored, state)
    more = torch.randn(2, DIM)
    queue.enqueue(more)
    restored.enqueue(more)
    assert_same_state(restored, queue.state_dict())


@pytest.mark.parametrize("batch", [1, 3, 4, 7, 9])
def test_a_size_that_is_no_multiple_of_the_batch_loses_no_key(batch):
    queue, size = MemoryQueue(10, DIM), 10
    for step in range(8):
        queue.enqueue(torch.randn(batch, DIM), ids=numbered(step * batch, batch))
        written = (step + 1) * batch
        held = sorted(number for number in queue.ids.tolist() if number >= 0)
        assert held == list(range(max(0, written - size), written))


def test_a_batch_larger_than_the_queue_keeps_its_last_keys():
    queue, keys = MemoryQueue(4, DIM), torch.randn(11, DIM)
    queue.enqueue(torch.randn(1, DIM))
    queue.enqueue(keys, ids=numbered(0, 11))
    assert sorted(queue.ids.tolist()) == [7, 8, 9, 10]
    torch.testing.assert_close(queue.keys, normalize(keys, dim=1)[queue.ids])


def test_keys_without_labels_and_ids_forget_those_of_the_slot():
    queue = MemoryQueue(2, DIM)
    queue.enqueue(torch.randn(2, DIM), torch.tensor([3, 4]), torch.tensor([5, 6]))
    queue.enqueue(torch.randn(1, DIM))
    assert queue.labels.tolist() == [-1, 4]
    assert queue.ids.tolist() == [-1, 6]


def test_a_random_start_counts_unfilled_slots_but_never_mixes_them():
    queue, query, key = MemoryQueue(64, DIM), torch.randn(4, DIM), torch.randn(4, DIM)
    queue.enqueue(torch.randn(6, DIM))
    loss = MochiLoss(num_hardest=32, num_pairs=50, num_with_query=50)
    _, plan = loss.contrast(query, key, queue)
    assert plan.base.min() >= 0
    assert max(plan.base.max(), plan.partner.max()) < 6
    plain, _ = loss.contrast(query, key, queue, mix=False)
    whole, _ = loss.contrast(query, key, queue.keys, mix=False)
    torch.testing.assert_close(plain.loss, whole.loss)


def test_an_empty_start_leaves_unfilled_slots_out_of_everything():
    queue = MemoryQueue(64, DIM, start="empty")
    query, key = normalize(torch.randn(2, 4, DIM), dim=2)
    queue.enqueue(torch.randn(6, DIM))
    loss = MochiLoss(num_hardest=32, num_pairs=50, num_with_query=50)
    outcome, plan = loss.contrast(query, key, queue)
    expected = contrast(query, key, queue.keys[:6], plan, temperature=loss.temperature)
    torch.testing.assert_close(outcome.per_query, expected.per_query)


def test_a_prefilled_queue_is_full_and_in_order():
    keys, labels, ids = torch.randn(5, DIM), torch.arange(5), numbered(20, 5)
    queue = MemoryQueue.prefilled(keys, labels, ids)
    torch.testing.assert_close(queue.keys, normalize(keys, dim=1))
    assert torch.equal(queue.labels, labels)
    assert torch.equal(queue.ids, ids)
    assert (len(queue), int(queue.position), int(queue.filled)) == (5, 0, 5)
    assert queue.unfilled() is None


def test_unfilled_names_the_slots_without_a_key_and_then_nothing():
    queue = MemoryQueue(4, DIM)
    queue.enqueue(torch.randn(3, DIM))
    assert queue.unfilled().tolist() == [False, False, False, True]
    queue.enqueue(torch.randn(1, DIM))
    assert queue.unfilled() is None


@pytest.mark.parametrize("name", ["class", "image"])
def test_unknown_equals_nothing_itself_included(name):
    queue, stored = MemoryQueue(4, DIM), torch.tensor([7, -1, 2])
    if name == "class":
        queue.enqueue(torch.randn(3, DIM), labels=stored)
        same = queue.same_class
    else:
        queue.enqueue(torch.randn(3, DIM), ids=stored)
        same = queue.same_image
    assert same(torch.tensor([2, -1, 7, 3])).tolist() == [
        [False, False, True, False],
        [False, False, False, False],
        [True, False, False, False],
        [False, False, False, False],
    ]


@pytest.mark.parametrize("move", [{"device": "meta"}, {"dtype": torch.float64}])
def test_position_and_filled_stay_with_the_host_and_keep_their_values(move):
    queue = MemoryQueue(4, DIM)
    queue.enqueue(torch.randn(6, DIM))
    queue = torch.nn.Sequential(queue).to(**move)[0]
    assert queue.keys.device.type == move.get("device", "cpu")
    assert queue.keys.dtype == move.get("dtype", torch.float32)
    assert (queue.position, queue.filled) == (2, 4)
    assert [name for name, _ in queue.named_buffers()] == ["keys", "labels", "ids"]
    assert queue.state_dict()["_extra_state"].device.type == "cpu"


def test_position_and_filled_are_the_hosts_under_another_default_device():
    with torch.device("meta"):
        queue = MemoryQueue(4, DIM)
    assert (queue.position, queue.filled) == (0, 0)
    assert queue.state_dict()["_extra_state"].device.type == "cpu"


@pytest.mark.parametrize("within", [False, True])
def test_a_state_dict_of_older_versions_loads(within):
    queue, keys = MemoryQueue(5, DIM), normalize(torch.randn(5, DIM), dim=1)
    old = {"keys": keys, "labels": torch.arange(5), "ids": torch.arange(5) + 7}
    old |= {"position": torch.tensor(3), "filled": torch.tensor(5)}
    model = torch.nn.Sequential(queue) if within else queue
    model.load_state_dict({f"0.{k}" if within else k: v for k, v in old.items()}, strict=True)
    assert (queue.position, queue.filled) == (3, 5)
    assert torch.equal(queue.keys, keys)
    assert torch.equal(queue.ids, old["ids"])
    assert set(old) == {"keys", "labels", "ids", "position", "filled"}  # the caller's, untouched


def test_a_state_dict_without_position_and_fill_is_refused():
    state = MemoryQueue(5, DIM).state_dict()
    del state["_extra_state"]
    with pytest.raises(RuntimeError, match="_extra_state"):
        MemoryQueue(5, DIM).load_state_dict(state)


def test_state_is_shared_in_place_as_that_of_buffers():
    queue = MemoryQueue(5, DIM)
    queue.state_dict()["_extra_state"].copy_(torch.tensor([1, 4]))  # as a broadcast does
    assert (queue.position, queue.filled) == (1, 4)


def test_a_double_queue_goes_on_in_double():
    queue, keys = MemoryQueue(4, DIM).double(), torch.randn(3, DIM, dtype=torch.float64)
    queue.enqueue(keys)
    torch.testing.assert_close(queue.keys[:3], normalize(keys, dim=1), rtol=0, atol=1e-15)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["to", "within a model", "saved in half"])
def test_half_precision_leaves_keys_of_unit_length(half, how):
    queue = MemoryQueue.prefilled(torch.randn(50, DIM))
    if how == "to":
        queue = queue.to(half)
    elif how == "within a model":
        queue = torch.nn.Sequential(queue, torch.nn.Linear(2, 2)).to(half)[0]
    else:
        state = queue.state_dict()
        queue.load_state_dict(state | {"keys": state["keys"].to(half)})
    queue.enqueue(torch.randn(5, DIM, dtype=half))
    torch.testing.assert_close(queue.keys.float().norm(dim=1), torch.ones(50), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_key_is_refused_and_the_queue_unchanged(bad):
    queue, keys = MemoryQueue(4, DIM), torch.randn(3, DIM)
    queue.enqueue(torch.randn(2, DIM), torch.tensor([1, 2]))
    state = copy_of_state(queue)
    keys[1, 2] = bad
    with pytest.raises(InputError, match=r"keys holds NaN or infinity in 1 of 3 rows.*keys\[1\]"):
        queue.enqueue(keys, torch.arange(3), torch.arange(3))
    assert_same_state(queue, state)


@pytest.mark.parametrize(
    ("value", "given", "stored"),
    [
        (0.0, torch.float32, torch.float32),
        (1e-30, torch.float32, torch.float32),
        (1e30, torch.float32, torch.float32),
        (1e200, torch.float64, torch.float32),
        (1e6, torch.float32, torch.float16),
    ],
)
def test_every_row_keeps_unit_length_whatever_finite_key_is_offered(value, given, stored):
    queue = MemoryQueue(4, DIM).to(stored)
    try:
        queue.enqueue(torch.full((1, DIM), value, dtype=given))
    except InputError as error:
        assert "keys" in str(error)  # noqa: PT017  (to refuse it is as good as to normalise it)
    torch.testing.assert_close(queue.keys.float().norm(dim=1), torch.ones(4), rtol=0, atol=2e-3)


def test_keys_in_the_queue_carry_no_gradient_and_are_copies():
    queue, keys = MemoryQueue(4, DIM), torch.randn(4, DIM, requires_grad=True)
    queue.enqueue(keys)
    assert not queue.keys.requires_grad
    held = queue.keys.clone()
    with torch.no_grad():
        keys.zero_()
    assert torch.equal(queue.keys, held)
    query = torch.randn(2, DIM, requires_grad=True)
    MochiLoss(2, 3, 3)(query, torch.randn(2, DIM), queue).backward()
    assert keys.grad is None
    assert query.grad.abs().sum() > 0


@pytest.mark.parametrize("start", ["random", "empty"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mix", [True, False])
def test_the_loss_never_enqueues(start, training, mix):
    queue = MemoryQueue(8, DIM, start=start)
    queue.enqueue(torch.randn(5, DIM), torch.arange(5), torch.arange(5))
    state = copy_of_state(queue)
    loss = MochiLoss(4, 6, 6).train(training)
    query = torch.randn(3, DIM, requires_grad=True)
    loss(query, torch.randn(3, DIM), queue, mix=mix).backward()
    loss.contrast(query, torch.randn(3, DIM), queue, queue.same_class(torch.arange(3)), mix=mix)
    assert_same_state(queue, state)
