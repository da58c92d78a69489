"""Text: sentence-transformers' trainer with hard negative mixing over batch and queue.

A sentence is the query, its paraphrase the key. Negatives are the other paraphrases of the batch,
which get gradients, and those of the last batches, kept in a queue.

python examples/sentence_transformers_loop.py [--steps 60] [--model all-MiniLM-L6-v2]

The model is a name on Hugging Face's hub or a folder; without one, a tiny untrained transformer.
"""

import tempfile
from collections.abc import Iterable

import torch
import tyro
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from torch import Tensor, nn

from hardmix import MemoryQueue, MochiLoss
from sentences import found, sentence_pairs, tiny_model


class MixedNegativesLoss(nn.Module):
    """In place of sentence-transformers' MultipleNegativesRankingLoss."""

    def __init__(self, model: SentenceTransformer, loss: MochiLoss, queue_size: int) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.memory = MemoryQueue(queue_size, model.get_embedding_dimension(), start="empty")

    def forward(self, features: Iterable[dict[str, Tensor]], _: Tensor | None = None) -> Tensor:
        """The trainer's call: tokens of the sentences, then of their paraphrases."""
        query, key = (self.model(tokens)["sentence_embedding"] for tokens in features)
        own = torch.eye(len(key), dtype=torch.bool, device=key.device)
        empty = torch.arange(len(self.memory), device=key.device) >= int(self.memory.filled)
        exclude = torch.cat([own, empty.expand(len(key), -1)], dim=1)
        value = self.loss(query, key, torch.cat([key, self.memory.keys]), exclude)
        if self.training:
            self.memory.enqueue(key)
        return value


def main(steps: int = 60, batch_size: int = 16, model: str | None = None) -> tuple[float, float]:
    """Train on some pairs; return how many paraphrases of others were found before and after."""
    torch.manual_seed(0)
    pairs = sentence_pairs()  # your own here: a data set with two columns of text
    train, test = pairs.select(range(220)), pairs.select(range(220, 320))
    encoder = tiny_model() if model is None else SentenceTransformer(model)
    mochi = MochiLoss(num_hardest=32, num_pairs=32, num_with_query=8, temperature=0.05)
    before = found(encoder, test)
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=2e-3 if model is None else 2e-5,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        loss = MixedNegativesLoss(encoder, mochi, queue_size=64)
        SentenceTransformerTrainer(encoder, arguments, train_dataset=train, loss=loss).train()
    after = found(encoder, test)
    print(f"the paraphrase found among {len(test)}: {before:.0%} before, {after:.0%} after")
    return before, after


if __name__ == "__main__":
    tyro.cli(main)
