"""Data of sentence_transformers_loop.py: pairs of sentences, and a tiny transformer."""

import itertools
import tempfile

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizer

SIZES = {"small": "little", "large": "big", "huge": "enormous", "slim": "thin"}
COLOURS = {"red": "crimson", "green": "emerald", "blue": "azure", "grey": "ashen"}
THINGS = {"house": "building", "boat": "ship", "rock": "stone", "cat": "kitten", "road": "street"}
PLACES = {"hill": "slope", "shore": "beach", "forest": "woods", "town": "city"}


def sentence_pairs() -> Dataset:
    """Return 320 descriptions, each in two wordings that share no word of meaning."""
    parts = itertools.product(*(words.items() for words in (SIZES, COLOURS, THINGS, PLACES)))
    pairs = [tuple(zip(*words, strict=True)) for words in parts]
    return Dataset.from_dict(
        {
            "anchor": ["a {} {} {} by the {}".format(*first) for first, _ in pairs],
            "positive": ["{} and {} is this {} near a {}".format(*second) for _, second in pairs],
        }
    ).shuffle(seed=0)


def tiny_model() -> SentenceTransformer:
    """Return a transformer of one layer with random weights and a vocabulary of these sentences."""
    pairs = sentence_pairs()
    words = sorted(set(" ".join([*pairs["anchor"], *pairs["positive"]]).split()))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=128,
    )
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(vocabulary)})
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        modules = [Transformer(folder), Pooling(config.hidden_size)]
    return SentenceTransformer(modules=modules)


def found(model: SentenceTransformer, pairs: Dataset) -> float:
    """Return the share of sentences to which their own paraphrase is the closest of all."""
    first, second = model.encode(pairs["anchor"]), model.encode(pairs["positive"])
    closest = model.similarity(first, second).argmax(dim=1)
    return float((closest == torch.arange(len(pairs))).float().mean())
