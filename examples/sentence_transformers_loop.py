"""Text: sentence-transformers' trainer, with mixed hard negatives of batch and queue.

python examples/sentence_transformers_loop.py [--steps 60] [--model all-MiniLM-L6-v2]

The model is a name on Hugging Face's hub or a folder; without one, a tiny untrained transformer.
"""

import tempfile

import torch
import tyro
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments

from hardmix.integrations import MixedNegativesLoss
from sentences import found, sentence_pairs, tiny_model


def main(steps: int = 60, batch_size: int = 16, model: str | None = None) -> tuple[float, float]:
    """Train on some pairs; return how many paraphrases of others were found before and after."""
    torch.manual_seed(0)
    pairs = sentence_pairs()  # your own here: columns anchor, positive, and perhaps negatives
    train, test = pairs.select(range(220)), pairs.select(range(220, 320))
    encoder = tiny_model() if model is None else SentenceTransformer(model)
    before = found(encoder, test)
    loss = MixedNegativesLoss(encoder, queue_size=64, num_hardest=32, num_pairs=32)
    with tempfile.TemporaryDirectory() as folder:
        rate = 2e-3 if model is None else 2e-5
        quiet = {"save_strategy": "no", "report_to": "none"}
        arguments = Arguments(folder, max_steps=steps, learning_rate=rate, **quiet)
        arguments.per_device_train_batch_size = batch_size
        SentenceTransformerTrainer(encoder, arguments, train_dataset=train, loss=loss).train()
    after = found(encoder, test)
    print(f"the paraphrase found among {len(test)}: {before:.0%} before, {after:.0%} after")
    return before, after


if __name__ == "__main__":
    tyro.cli(main)
