"""Text: sentence-transformers' trainer, with duplicates masked and mixed hard negatives.

python examples/sentence_transformers_loop.py [--steps 60] [--model all-MiniLM-L6-v2 or FOLDER]
"""

import tempfile

import sentence_transformers as st
import torch
import tyro

from hardmix.integrations import MixedNegativesLoss
from sentences import found, sentence_pairs, tiny_model


def main(steps: int = 60, seed: int = 0, model: str | None = None) -> tuple[float, float]:
    """Train on some pairs; return how many paraphrases of others were found before and after."""
    torch.manual_seed(seed)
    pairs = sentence_pairs()  # your own here: columns anchor, positive, and perhaps negatives
    train, test = pairs.select(range(220)), pairs.select(range(220, 320))
    encoder = tiny_model() if model is None else st.SentenceTransformer(model)
    before = found(encoder, test)
    loss = MixedNegativesLoss(encoder, num_pairs=8)
    with tempfile.TemporaryDirectory() as folder:
        rate = 2e-3 if model is None else 2e-5
        options = {"max_steps": steps, "learning_rate": rate, "seed": seed, "report_to": "none"}
        # No checkpoints: for the card of each, the library asks huggingface.co.
        options |= {"per_device_train_batch_size": 16, "save_strategy": "no"}
        arguments = st.SentenceTransformerTrainingArguments(folder, **options)
        trainer = st.SentenceTransformerTrainer(encoder, arguments, train_dataset=train, loss=loss)
        trainer.train()
    after = found(encoder, test)
    print(f"the paraphrase found among {len(test)}: {before:.0%} before, {after:.0%} after")
    return before, after


if __name__ == "__main__":
    tyro.cli(main)
