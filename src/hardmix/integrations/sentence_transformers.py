"""sentence-transformers: a loss for `SentenceTransformerTrainer`, without false negatives.

trainer = SentenceTransformerTrainer(
    model, arguments, train_dataset=pairs, loss=MixedNegativesLoss(model, queue_size=1024)
)
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hardmix.errors import InputError
from hardmix.integrations.mixing_options import MixingOptions, replacement_loss
from hardmix.mixing.checks import check_temperature, check_whole
from hardmix.mixing.gradient_cache import encode_in_chunks
from hardmix.mixing.queue import MemoryQueue
from hardmix.runtime.distributed import gather, rank

Embeddings = Float[Tensor, "batch dim"]

QUEUE_AFTER = 100
"""Steps: from random weights a queue that was used at once ruined 12 of 12 small models, one used
after 20 or more steps none of 16."""

PLACES = 2**20
"""More than a text has tokens."""
MIXERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
"""The factors of splitmix64, as signed numbers."""

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
    """sentence-transformers' MultipleNegativesRankingLoss; with a queue and mixing if wanted.

    Takes (anchor, positive) pairs, triplets, and (anchor, positive, n negatives). A query's
    negatives are all other texts of the batch but anchors, and the positives of the last batches if
    there is a queue. Texts that equal the query's own positive are left out.
    The trainer owns the loop, so this loss writes the queue itself, in training. MatryoshkaLoss
    takes it without queue_size and mini_batch_size.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        *,
        queue_size: int = 0,
        queue_after: int = QUEUE_AFTER,
        mask_duplicates: bool = True,
        mini_batch_size: int | None = None,
        gather_across_devices: bool = False,
        **mixing: Unpack[MixingOptions],
    ) -> None:
        """Create the loss.

        Args:
            model: a SentenceTransformer.
            scale: the factor of similarities: 1 / temperature.
            queue_size: number of positives of earlier batches that are negatives too; 0 for none.
            queue_after: the number of steps before the queue is used. Its embeddings are those of
                an older model, which changes quickly at first.
            mask_duplicates: whether texts that equal the query's own positive are left out.
            mini_batch_size: the number of texts that are encoded at once; None for all. With it,
                the batch is not limited by the model's memory, as in
                CachedMultipleNegativesRankingLoss.
            gather_across_devices: whether texts of all processes are negatives.
            mixing: arguments of `MochiLoss`, such as weights="hardness" or num_pairs=64. Negatives
                given with an anchor are its own, for "given" and hardness_weights(where="own").
        """
        super().__init__()
        check_temperature(scale, "scale")
        check_whole(queue_size=queue_size, queue_after=queue_after)
        _check_mini_batch(mini_batch_size)
        self.model = model
        self.scale = scale
        self.mini_batch_size = mini_batch_size
        self.uses_gradient_cache = mini_batch_size is not None  # for sentence-transformers
        self.gather_across_devices = gather_across_devices
        self.queue_after = queue_after
        self.mask_duplicates = mask_duplicates
        self.steps = 0
        """Training steps so far; part of the state_dict."""
        self.mochi = replacement_loss(1 / scale, mixing, None)
        self.memory = None
        if queue_size:
            self.memory = MemoryQueue(queue_size, _dim_of(model), start="empty")

    def forward(
        self, sentence_features: Iterable[Mapping[str, Any]], labels: Tensor | None = None
    ) -> Float[Tensor, ""]:
        """Return the loss of the tokens of each column: anchors, positives, negatives.

        Args:
            sentence_features: the tokens of each column.
            labels: not used; the trainer passes them.
        """
        columns = list(sentence_features)
        if len(columns) < 2:
            raise InputError(
                f"the data set has {len(columns)} column of texts: this loss needs (anchor,"
                " positive) or (anchor, positive, negative, ...)."
            )
        embeddings = self._embeddings(columns)
        ids = [_text_ids(tokens) for tokens in columns[1:]] if self.mask_duplicates else []
        value = self.compute_loss_from_embeddings(embeddings, labels, ids)
        if self.training:
            self._remember(embeddings[1].detach(), ids[0] if ids else None)
        return value

    def compute_loss_from_embeddings(
        self,
        embeddings: list[Embeddings],
        labels: Tensor | None = None,
        text_ids: Sequence[Int[Tensor, " batch"] | None] = (),
    ) -> Float[Tensor, ""]:
        """Return the loss of the embeddings of each column; the queue is read, not written.

        Args:
            embeddings: those of each column.
            labels: not used.
            text_ids: an id of each text, of all columns but the first. Texts with the id of the
                query's positive are left out.
        """
        del labels
        query, key, *negatives = embeddings
        self._check_dim(query)
        spread = gather if self.gather_across_devices else _as_it_is
        shared = [spread(column, with_gradient=True) for column in (key, *negatives)]
        first_row = rank() * len(query) if self.gather_across_devices else 0
        place = torch.arange(len(query), device=query.device).unsqueeze(1) + first_row
        own = place == torch.arange(len(shared[0]), device=query.device)
        exclude = own.repeat(1, len(shared))  # the anchor's own are its key and its own negatives
        known = [ids for ids in text_ids if ids is not None]
        ids = [spread(column) for column in known] if len(known) == len(shared) else []
        if self.memory is not None and self.memory.filled and self.steps >= self.queue_after:
            shared.append(self.memory.keys[: self.memory.filled])
            ids = [*ids, self.memory.ids[: self.memory.filled]] if ids else []
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
            own_negatives=torch.stack(negatives, dim=1) if negatives else None,
            ids=known[0] if ids else None,
            negative_ids=torch.cat(ids) if ids else None,
        )

    def _remember(self, keys: Tensor, ids: Tensor | None) -> None:
        """Write the positives of a batch to the queue, if there is one; count the step."""
        self.steps += 1
        if self.memory is not None:
            self.memory.enqueue(gather(keys), ids=None if ids is None else gather(ids))

    def get_extra_state(self) -> Int[Tensor, ""]:
        """Return the number of steps as a tensor, which every format can store."""
        return torch.tensor(self.steps)

    def set_extra_state(self, state: Int[Tensor, ""]) -> None:
        """Restore the number of steps."""
        self.steps = int(state)

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
            "queue_after": self.queue_after,
            "mask_duplicates": self.mask_duplicates,
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
    """Return the tokens of `size` texts at a time; other values belong to all."""
    tensors = {name: value for name, value in tokens.items() if _has_rows(value)}
    lengths = {name: len(value) for name, value in tensors.items()}
    if len(set(lengths.values())) != 1 or "cu_seq_lens_q" in tokens:
        raise InputError(
            f"mini_batch_size={size} cannot split this input, whose tensors have {lengths} rows:"
            " only padded texts can be split; set mini_batch_size=None."
        )
    rest = {name: value for name, value in tokens.items() if name not in tensors}
    pieces = zip(*(value.split(size) for value in tensors.values()), strict=True)
    return [rest | dict(zip(tensors, piece, strict=True)) for piece in pieces]


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _as_it_is(tensor: Tensor, with_gradient: bool = False) -> Tensor:
    del with_gradient
    return tensor


def _text_ids(tokens: Mapping[str, Any]) -> Int[Tensor, " batch"] | None:
    """Return a number for each text, equal for equal texts, without reading them on the host.

    It is a hash of 63 bits of the tokens and their places, so that padding does not matter. None if
    the input is not one line of tokens for each text.
    """
    words, mask = tokens.get("input_ids"), tokens.get("attention_mask")
    if not isinstance(words, Tensor) or words.ndim != 2 or words.is_floating_point():
        return None
    shown = torch.ones_like(words) if mask is None else (mask != 0).to(words)
    place = shown.cumsum(dim=1)
    # A round of splitmix64 mixes token and place; sums of int64 wrap around, as hashes may.
    bits = (words.long() * PLACES + place) * MIXERS[0]
    bits = (bits ^ (bits >> 29)) * MIXERS[1]
    bits = (bits ^ (bits >> 32)) * shown
    return bits.sum(dim=1) & (2**63 - 1)
