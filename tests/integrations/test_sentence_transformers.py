"""The loss for sentence-transformers' trainer, against its own losses."""

from importlib import import_module

import pytest
import torch

from hardmix import InputError, MochiLoss
from hardmix.integrations import MixedNegativesLoss
from hardmix.losses import hardness_weights
from hardmix.runtime.distributed import gather, wrap
from places import ROOT
from ranks import in_two_processes

pytestmark = pytest.mark.slow

PLAIN = {"num_pairs": 0, "num_with_query": 0}
TEXTS = [
    ["a red cat", "a blue boat by the hill", "a small road", "a grey rock", "a huge town"],
    ["crimson kitten", "azure ship near a slope", "little street", "ashen stone", "enormous city"],
    ["azure kitten", "crimson ship", "little stone", "emerald stone", "little city"],
    ["a ship", "a slope", "a large street", "a thin stone", "woods"],
]


@pytest.fixture(scope="module")
def library():
    pytest.importorskip("datasets", reason="pip install 'hardmix[examples]'")
    pytest.importorskip("accelerate", reason="pip install 'hardmix[examples]'")
    return pytest.importorskip("sentence_transformers", reason="pip install 'hardmix[examples]'")


@pytest.fixture(scope="module")
def losses(library):
    return import_module("sentence_transformers.sentence_transformer.losses")


@pytest.fixture
def sentences(library, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return import_module("sentences")


@pytest.fixture
def model(sentences):
    """Return a model without dropout, so that every pass is the same."""
    return sentences.tiny_model().eval()


def tokens(model, columns):
    return [model.preprocess(texts) for texts in TEXTS[:columns]]


def value_and_gradients(loss, model, columns):
    model.zero_grad()
    value = loss([dict(each) for each in tokens(model, columns)], None)
    value.backward()
    parameters = {name: each for name, each in model.named_parameters() if each.grad is not None}
    return value.detach(), {name: each.grad.clone() for name, each in parameters.items()}


def assert_same(ours, theirs):
    torch.testing.assert_close(ours[0], theirs[0])
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(ours[1][name], gradient, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("columns", [2, 3, 4])
def test_without_mixing_it_is_multiple_negatives_ranking_loss(losses, model, columns):
    theirs = losses.MultipleNegativesRankingLoss(model, scale=10.0)
    ours = MixedNegativesLoss(model, 10.0, **PLAIN)
    assert_same(*(value_and_gradients(each, model, columns) for each in (ours, theirs)))


MODES = {"all_negatives": "all", "hard_negatives": "own", "in_batch_negatives": "shared"}


@pytest.mark.parametrize("mode", MODES)
def test_hardness_weights_are_the_librarys_three_modes(losses, model, mode):
    theirs = losses.MultipleNegativesRankingLoss(model, hardness_mode=mode, hardness_strength=3.0)
    ours = MixedNegativesLoss(model, **PLAIN, weights=hardness_weights(3.0, MODES[mode]))
    assert_same(*(value_and_gradients(each, model, 4) for each in (ours, theirs)))


@pytest.mark.parametrize("mixing", [PLAIN, {"num_pairs": 12, "num_with_query": 6}])
@pytest.mark.parametrize("size", [2, 5])
def test_the_cached_variant_is_the_uncached_and_the_librarys(losses, model, mixing, size):
    results = []
    for mini_batch_size in (None, size):
        torch.manual_seed(3)  # of the points
        queue = {"queue_size": 6, "queue_after": 0}
        loss = MixedNegativesLoss(model, mini_batch_size=mini_batch_size, **queue, **mixing)
        loss.memory.enqueue(torch.randn(4, 64))
        torch.manual_seed(4)
        results.append(value_and_gradients(loss, model, 3))
    assert_same(*results)
    if mixing is PLAIN:
        theirs = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=size)
        ours = MixedNegativesLoss(model, mini_batch_size=size, **PLAIN)
        assert_same(*(value_and_gradients(each, model, 3) for each in (ours, theirs)))


def test_chunks_repeat_their_dropout_and_a_scaled_loss_scales_its_gradients(model):
    loss = MixedNegativesLoss(model.train(), mini_batch_size=2, num_pairs=5)
    grads = []
    for scale in (1.0, 8.0):
        torch.manual_seed(5)
        model.zero_grad()
        value = loss(tokens(model, 2))
        (scale * value).backward()
        grads.append(model[0].auto_model.embeddings.word_embeddings.weight.grad.clone())
    torch.manual_seed(5)
    model.zero_grad()
    embeddings = []
    for given in tokens(model, 2):
        tensors = {name: each for name, each in given.items() if torch.is_tensor(each)}
        parts = [{k: v[i : i + 2] for k, v in tensors.items()} for i in (0, 2, 4)]
        embeddings.append(torch.cat([model(part)["sentence_embedding"] for part in parts]))
    whole = loss.compute_loss_from_embeddings(embeddings)
    whole.backward()
    torch.testing.assert_close(value.detach(), whole.detach())
    expected = model[0].auto_model.embeddings.word_embeddings.weight.grad
    torch.testing.assert_close(grads[0], expected, atol=2e-5, rtol=1e-3)
    torch.testing.assert_close(grads[1], 8 * grads[0])


@pytest.mark.parametrize("columns", [2, 4])
def test_with_mixing_it_is_mochi_loss_over_batch_given_negatives_and_queue(model, columns):
    counts = {"num_hardest": 6, "num_pairs": 9, "num_with_query": 4}
    loss = MixedNegativesLoss(model, 5.0, queue_size=8, queue_after=0, **counts)
    loss.memory.enqueue(torch.randn(3, 64))
    vectors = [model(dict(each))["sentence_embedding"].detach() for each in tokens(model, columns)]
    query, key, *given = vectors
    shared = torch.cat([key, *given, loss.memory.keys[:3]])
    own = torch.eye(5, dtype=torch.bool)
    exclude = torch.cat([own.repeat(1, columns - 1), torch.zeros(5, 3, dtype=torch.bool)], dim=1)
    mochi = MochiLoss(**counts, temperature=0.2)
    torch.manual_seed(7)
    own_negatives = torch.stack(given, dim=1) if given else None
    expected = mochi(query, key, shared, exclude, own_negatives=own_negatives)
    torch.manual_seed(7)
    torch.testing.assert_close(loss.compute_loss_from_embeddings(vectors), expected)


def test_matryoshka_loss_takes_it_as_it_takes_the_librarys_own(losses, model):
    def at_two_widths(loss):
        return value_and_gradients(losses.MatryoshkaLoss(model, loss, [64, 16]), model, 3)

    ours = MixedNegativesLoss(model, **PLAIN)
    theirs = losses.MultipleNegativesRankingLoss(model)
    assert_same(at_two_widths(ours), at_two_widths(theirs))
    with pytest.raises(InputError, match=r"16 dimensions and the queue 64: inside Matryoshka"):
        at_two_widths(MixedNegativesLoss(model, queue_size=8))


def test_only_training_writes_the_queue(model):
    loss = MixedNegativesLoss(model, queue_size=8)
    loss.eval()(tokens(model, 2))
    assert loss.memory.filled == 0
    loss.train()(tokens(model, 2))
    assert loss.memory.filled == 5


def test_a_pair_alone_has_no_loss_and_the_queue_gives_it_one(model):
    alone = [model.preprocess(texts[:1]) for texts in TEXTS[:2]]
    loss = MixedNegativesLoss(model, queue_size=8, queue_after=0, num_pairs=4)
    assert loss([dict(each) for each in alone]) == 0
    loss.memory.enqueue(torch.randn(1, 64))
    assert loss([dict(each) for each in alone]) > 0


def test_wrong_input_is_refused(model):
    with pytest.raises(InputError, match="mini_batch_size=0 is below 1"):
        MixedNegativesLoss(model, mini_batch_size=0)
    with pytest.raises(InputError, match="scale=0"):
        MixedNegativesLoss(model, scale=0.0)
    with pytest.raises(InputError, match="1 column of texts"):
        MixedNegativesLoss(model)(tokens(model, 1))
    with pytest.raises(InputError, match="get_embedding_dimension"):
        MixedNegativesLoss(torch.nn.Linear(3, 3), queue_size=4)
    flat = {"input_ids": torch.zeros(9), "cu_seq_lens_q": torch.tensor([0, 4, 9])}
    with pytest.raises(InputError, match="only padded texts can be split"):
        MixedNegativesLoss(model, mini_batch_size=2)([flat, flat])


class Embedding(torch.nn.Module):
    """A model as sentence-transformers have it: a dictionary in, a dictionary out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = torch.nn.Linear(6, 4).double()

    def forward(self, tokens):
        return {"sentence_embedding": self.layer(tokens["input_ids"])}

    def get_embedding_dimension(self):
        return 4


def one_process_and_two(number):
    """Texts of both are negatives; the model in DistributedDataParallel, also in chunks."""
    for mini_batch_size in (None, 3):
        one, shared = Embedding(), wrap(Embedding(), torch.device("cpu"))
        options = {"mini_batch_size": mini_batch_size, "queue_size": 20, "queue_after": 0}
        whole = MixedNegativesLoss(one, **options).eval()
        ours = MixedNegativesLoss(Embedding(), gather_across_devices=True, **options)
        ours.model = shared  # as the trainer does it
        for _ in range(3):
            columns = torch.randn(3, 8, 6, dtype=torch.float64)
            expected = whole([{"input_ids": each} for each in columns])
            whole.memory.enqueue(one.layer(columns[1]))
            value = ours([{"input_ids": each.chunk(2)[number]} for each in columns])
            torch.testing.assert_close(
                gather(value.detach().unsqueeze(0)).mean(), expected.detach()
            )
            for loss, model in ((expected, one), (value, shared)):
                model.zero_grad()
                loss.backward()
            torch.testing.assert_close(shared.module.layer.weight.grad, one.layer.weight.grad)
        torch.testing.assert_close(ours.memory.keys, whole.memory.keys)


def test_two_processes_are_one_with_the_whole_batch():
    in_two_processes(one_process_and_two)


def with_negatives(pairs):
    """Return a wrong paraphrase for each anchor: the next one's."""
    wrong = [*pairs["positive"][1:], pairs["positive"][0]]
    return pairs.add_column("negative", wrong)


def test_the_trainer_learns_from_triplets_in_chunks_with_accumulation(library, sentences, tmp_path):
    """Cached, with a queue; the trainer divides the loss, and writes the model's card."""
    torch.manual_seed(0)
    model, pairs = sentences.tiny_model(), sentences.sentence_pairs()
    train, test = with_negatives(pairs.select(range(220))), pairs.select(range(220, 320))
    before = sentences.found(model, test)
    counts = {"num_hardest": 32, "num_pairs": 64, "num_with_query": 8}
    loss = MixedNegativesLoss(model, queue_size=64, queue_after=0, mini_batch_size=16, **counts)
    arguments = library.SentenceTransformerTrainingArguments(
        tmp_path,
        max_steps=25,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = library.SentenceTransformerTrainer(model, arguments, train_dataset=train, loss=loss)
    trainer.train()
    assert before < 0.1
    assert sentences.found(model, test) > 0.3
    assert loss.memory.filled == 64
    model.save_pretrained(str(tmp_path / "model"))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "MixedNegativesLoss" in card
    assert "Hard Negative Mixing" in card
