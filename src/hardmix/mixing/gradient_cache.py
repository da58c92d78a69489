"""GradCache (Gao et al. 2021): one loss over a batch that the encoder's memory does not hold.

A contrastive loss needs all embeddings at once, but only the encoder needs much memory. So:
encode chunk by chunk without a graph; take the loss's gradient by the embeddings; encode each chunk
again, with its graph, and send its part of that gradient through it. The result is that of the
whole batch, for one more forward pass.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hardmix.errors import InputError

Encoded = tuple[Callable[[Any], Tensor], Sequence[Any]]
"""An encoder, and the chunks of its input."""


def backward_in_chunks(
    loss: Callable[..., Tensor],
    *encoded: Encoded,
    more_follow: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """Compute loss(*embeddings), call backward, and return the loss, detached.

    loss: called with the embeddings of every (encoder, chunks) pair, in order, each concatenated.
    It may use a queue, and may have parameters of its own, which get their gradients. If chunks are
    tuples or lists, they are the encoder's arguments; if dicts, its keyword arguments.
    more_follow: entered for all but the last backward pass, such as `model.no_sync` of
    DistributedDataParallel.

    Dropout repeats itself in the second pass. Batch normalisation sees each chunk as a batch,
    twice: use layers without batch statistics, or accept those of the chunk.
    """
    if not encoded or any(len(chunks) == 0 for _, chunks in encoded):
        raise InputError(
            "backward_in_chunks needs one or more (encoder, chunks) pairs, each with one or more"
            " chunks: pass e.g. (encoder, images.split(64))."
        )
    states, embeddings = [], []
    with torch.no_grad():
        for encoder, chunks in encoded:
            parts = []
            for chunk in chunks:
                states.append(_random_state(chunk))
                parts.append(_encode(encoder, chunk))
            embeddings.append(parts)
    leaves = [torch.cat(parts).requires_grad_() for parts in embeddings]
    value = loss(*leaves)
    with more_follow():
        value.backward()
    steps = [
        (encoder, chunk, gradient)
        for (encoder, chunks), leaf, parts in zip(encoded, leaves, embeddings, strict=True)
        for chunk, gradient in zip(chunks, _split(leaf, parts), strict=True)
    ]
    for number, ((encoder, chunk, gradient), state) in enumerate(zip(steps, states, strict=True)):
        last = number == len(steps) - 1
        with nullcontext() if last else more_follow():
            with _as_before(state):
                again = _encode(encoder, chunk)
            if again.requires_grad:
                again.backward(gradient.to(again.dtype))
    return value.detach()


def _split(leaf: Tensor, parts: list[Tensor]) -> Iterable[Tensor]:
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return torch.split(gradient, [len(part) for part in parts])


def _encode(encoder: Callable[..., Tensor], chunk: Any) -> Tensor:
    if isinstance(chunk, dict):
        return encoder(**chunk)
    return encoder(*chunk) if isinstance(chunk, tuple | list) else encoder(chunk)


def _devices(chunk: Any) -> list[torch.device]:
    """GPUs whose random numbers an encoder may use: those of its input."""
    parts = chunk.values() if isinstance(chunk, dict) else chunk
    given = parts if isinstance(chunk, dict | tuple | list) else [chunk]
    found = {each.device for each in given if isinstance(each, Tensor)}
    return [each for each in found if each.type == "cuda"]


def _random_state(chunk: Any) -> list[tuple[torch.device, Tensor]]:
    """The states of PyTorch's generators before this chunk."""
    on_gpus = [(each, torch.cuda.get_rng_state(each)) for each in _devices(chunk)]
    return [(torch.device("cpu"), torch.get_rng_state()), *on_gpus]


@contextmanager
def _as_before(state: list[tuple[torch.device, Tensor]]) -> Iterator[None]:
    """Within, PyTorch's generators repeat what they drew from this state on."""
    gpus = [device for device, _ in state if device.type == "cuda"]
    with torch.random.fork_rng(devices=gpus):
        for device, each in state:
            if device.type == "cuda":
                torch.cuda.set_rng_state(each, device)
            else:
                torch.set_rng_state(each)
        yield
