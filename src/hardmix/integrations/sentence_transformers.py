"""sentence-transformers: a loss for `SentenceTransformerTrainer`, with mixed hard negatives.

trainer = SentenceTransformerTrainer(
    model, arguments, train_dataset=pairs, loss=MixedNegativesLoss(model, queue_size=1024)
)
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.integrations.mixing_options import MixingOptions, loss_for_batches
from hardmix.mixing.checks import check_temperature, check_whole
from hardmix.mixing.gradient_cache import encode_in_chunks
from hardmix.mixing.queue import MemoryQueue
from hardmix.runtime.distributed import gather, rank

Embeddings = Float[Tensor, "batch dim"]

CITATION = """
@inproceedings{kalantidis2020hard,
    title = {Hard Negative Mixing for Contrastive Learning},
    author = {Kalantidis, Yannis and Sariyildiz, Mert Bulent and Pion, Noe and
        Weinzaepfel, Philippe and Larlus, Diane},
    booktitle = {Advances in Neural Information Processing Systems},
    year = {2020}
}
"""


class MixedNegativesLoss(nn.Module):
    """sentence-transformers' MultipleNegativesRankingLoss, with a queue and mixed hard negatives.

    Takes (anchor, positive) pairs, triplets, and (anchor, positive, n negatives). A query's
    negatives are all other texts of the batch but anchors, and the positives of the last batches if
    there is a queue. The trainer owns the loop, so this loss writes the queue itself, in training.
    MatryoshkaLoss takes it without queue_size and mini_batch_size.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        *,
        queue_size: int = 0,
        mini_batch_size: int | None = None,
        gather_across_devices: bool = False,
        **mixing: Unpack[MixingOptions],
    ) -> None:
        """Create the loss.

        model: a SentenceTransformer.
        scale: what similarities are multiplied by: 1 / temperature.
        queue_size: number of positives of earlier batches that are negatives too; 0 for no queue.
        mini_batch_size: the number of texts that are encoded at once; None for all. With it, the
        batch is not limited by the model's memory, as in CachedMultipleNegativesRankingLoss.
        gather_across_devices: whether texts of all processes are negatives.
        mixing: arguments of `MochiLoss`, such as num_pairs=64 or weights="hardness". Negatives
        given with an anchor are its own, for "given" and hardness_weights(where="own").
        """
        super().__init__()
        check_temperature(scale, "scale")
        check_whole(queue_size=queue_size)
        _check_mini_batch(mini_batch_size)
        self.model = model
        self.scale = scale
        self.mini_batch_size = mini_batch_size
        self.uses_gradient_cache = mini_batch_size is not None  # for sentence-transformers
        self.gather_across_devices = gather_across_devices
        self.mochi = loss_for_batches(1 / scale, mixing)
        self.memory = None
        if queue_size:
            self.memory = MemoryQueue(queue_size, _dim_of(model), start="empty")

    def forward(
        self, sentence_features: Iterable[Mapping[str, Any]], labels: Tensor | None = None
    ) -> Float[Tensor, ""]:
        """Return the loss of the tokens of each column: anchors, positives, negatives.

        labels: not used; the trainer passes them.
        """
        columns = list(sentence_features)
        if len(columns) < 2:
            raise InputError(
                f"the data set has {len(columns)} column of texts: this loss needs (anchor,"
                " positive) or (anchor, positive, negative, ...)."
            )
        embeddings = self._embeddings(columns)
        value = self.compute_loss_from_embeddings(embeddings, labels)
        if self.memory is not None and self.training:
            self.memory.enqueue(gather(embeddings[1].detach()))
        return value

    def compute_loss_from_embeddings(
        self, embeddings: list[Embeddings], labels: Tensor | None = None
    ) -> Float[Tensor, ""]:
        """Return the loss of the embeddings of each column; the queue is read, not written."""
        del labels
        query, key, *given = embeddings
        self._check_dim(query)
        shared = [
            gather(each, with_gradient=True) if self.gather_across_devices else each
            for each in (key, *given)
        ]
        first_row = rank() * len(query) if self.gather_across_devices else 0
        place = torch.arange(len(query), device=query.device).unsqueeze(1) + first_row
        own = place == torch.arange(len(shared[0]), device=query.device)
        exclude = own.repeat(1, len(shared))  # the anchor's own are its key and its own negatives
        if self.memory is not None and self.memory.filled:
            shared.append(self.memory.keys[: self.memory.filled])
            exclude = torch.cat([exclude, exclude.new_zeros(len(query), len(shared[-1]))], dim=1)
        candidates = torch.cat(shared)
        if len(candidates) == 1:  # the last batch of an epoch may be one pair, without a negative
            return 0.0 * (query.sum() + key.sum())
        return self.mochi.in_batch(
            query,
            key,
            exclude,
            gathered=candidates,
            first_row=first_row,
            own_negatives=torch.stack(given, dim=1) if given else None,
        )

    def _check_dim(self, query: Tensor) -> None:
        dim = query.shape[1] if self.memory is None else self.memory.keys.shape[1]
        if query.shape[1] != dim:
            raise InputError(
                f"embeddings have {query.shape[1]} dimensions and the queue {dim}: inside"
                " MatryoshkaLoss, which shortens them, set queue_size=0."
            )

    def _embeddings(self, columns: list[Mapping[str, Any]]) -> list[Tensor]:
        if self.mini_batch_size is None:
            return [self._embed(**tokens) for tokens in columns]
        chunks = [_split(tokens, self.mini_batch_size) for tokens in columns]
        more_follow = getattr(self.model, "no_sync", nullcontext)  # DistributedDataParallel's
        encoded = [(self._embed, each) for each in chunks]
        return list(encode_in_chunks(*encoded, more_follow=more_follow))

    def _embed(self, **tokens: Any) -> Tensor:
        embeddings: Tensor = self.model(tokens)["sentence_embedding"]
        return embeddings

    def get_config_dict(self) -> dict[str, Any]:
        """Return what sentence-transformers writes on the model's card."""
        return {
            "scale": self.scale,
            "num_hardest": self.mochi.num_hardest,
            "num_pairs": self.mochi.num_pairs,
            "num_with_query": self.mochi.num_with_query,
            "queue_size": 0 if self.memory is None else len(self.memory),
            "mini_batch_size": self.mini_batch_size,
            "gather_across_devices": self.gather_across_devices,
        }

    @property
    def citation(self) -> str:
        """The paper, for the model's card."""
        return CITATION


def _check_mini_batch(size: int | None) -> None:
    if size is not None:
        check_whole(mini_batch_size=size)
        if size < 1:
            raise InputError(
                f"mini_batch_size={size} is below 1: it is the number of texts that are encoded at"
                " once; None encodes all."
            )


def _dim_of(model: nn.Module) -> int:
    ask = getattr(model, "get_embedding_dimension", lambda: None)
    dim = ask()
    if not isinstance(dim, int):
        raise InputError(
            "queue_size needs a model that says its get_embedding_dimension(), as a"
            " SentenceTransformer of sentence-transformers 6 or newer does; else set queue_size=0."
        )
    return dim


def _split(tokens: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    """Return the tokens of `size` texts at a time; what is no tensor belongs to all."""
    tensors = {name: each for name, each in tokens.items() if _has_rows(each)}
    lengths = {name: len(each) for name, each in tensors.items()}
    if len(set(lengths.values())) != 1 or "cu_seq_lens_q" in tokens:
        raise InputError(
            f"mini_batch_size={size} cannot split this input, whose tensors have {lengths} rows:"
            " only padded texts can be split; set mini_batch_size=None."
        )
    rest = {name: each for name, each in tokens.items() if name not in tensors}
    pieces = zip(*(each.split(size) for each in tensors.values()), strict=True)
    return [rest | dict(zip(tensors, piece, strict=True)) for piece in pieces]


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
