"""GradCache (Gao et al. 2021): one loss over a batch that is too large to be encoded at once.

A contrastive loss needs all embeddings at once, but only the encoder needs much memory. Therefore,
chunks are encoded without a graph, and the loss gives the gradient of each embedding. Each chunk is
then encoded again, with its graph, and its part of that gradient is sent through it. The result is
that of the whole batch, for one more forward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hardmix.errors import InputError

Encoded = tuple[Callable[..., Tensor], Sequence[Any]]
"""An encoder, and the chunks of its input."""

RandomState = tuple[torch.device, Tensor]


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
    parts, states = _embed(encoded)
    leaves = [torch.cat(each).requires_grad_() for each in parts]
    value = loss(*leaves)
    with more_follow():
        value.backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    _send_back(encoded, gradients, states, more_follow)
    return value.detach()


def encode_in_chunks(
    *encoded: Encoded, more_follow: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> tuple[Tensor, ...]:
    """Return the embeddings of every (encoder, chunks) pair; their backward works in chunks.

    As `backward_in_chunks`, for loops in which somebody else calls backward, perhaps of a scaled
    loss. The encoders' parameters get their gradients in `.grad`; torch.autograd.grad does
    not see them.
    """
    switch = torch.zeros(0, requires_grad=True)  # without it, backward would never be called
    embeddings: tuple[Tensor, ...] = _InChunks.apply(switch, encoded, more_follow)
    return embeddings


class _InChunks(torch.autograd.Function):
    """Encode without a graph; on the way back encode each chunk again, and go through it."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, encoded: Sequence[Encoded], more_follow: Any) -> Any:
        parts, states = _embed(encoded)
        ctx.encoded, ctx.states, ctx.more_follow = encoded, states, more_follow
        ctx.precision = _precision(parts[0][0])
        return tuple(torch.cat(each) for each in parts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        with torch.enable_grad(), torch.autocast(**ctx.precision):
            _send_back(ctx.encoded, gradients, ctx.states, ctx.more_follow)
        return None, None, None


def _precision(of: Tensor) -> dict[str, Any]:
    """Return the autocast settings that an encoder ran in: backward is called outside of them."""
    kind = of.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return {"device_type": kind, "dtype": dtype, "enabled": enabled}


def _embed(encoded: Sequence[Encoded]) -> tuple[list[list[Tensor]], list[list[RandomState]]]:
    """Return all embeddings by chunks, without a graph, and the random states before each chunk."""
    parts: list[list[Tensor]] = []
    states: list[list[RandomState]] = []
    with torch.no_grad():
        for encoder, chunks in encoded:
            parts.append([])
            for chunk in chunks:
                states.append(_random_state(chunk))
                parts[-1].append(_encode(encoder, chunk))
    return parts, states


def _send_back(
    encoded: Sequence[Encoded],
    gradients: Sequence[Tensor],
    states: Sequence[list[RandomState]],
    more_follow: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Encode each chunk again, with its graph, and send its part of the gradient through it."""
    remaining = list(gradients)
    steps = [(place, chunk) for place, (_, chunks) in enumerate(encoded) for chunk in chunks]
    for number, ((place, chunk), state) in enumerate(zip(steps, states, strict=True)):
        last = number == len(steps) - 1
        with nullcontext() if last else more_follow():
            with _as_before(state):
                again = _encode(encoded[place][0], chunk)
            gradient, remaining[place] = remaining[place].tensor_split([len(again)])
            if again.requires_grad:
                again.backward(gradient.to(again.dtype))


def _encode(encoder: Callable[..., Tensor], chunk: Any) -> Tensor:
    if isinstance(chunk, dict):
        return encoder(**chunk)
    return encoder(*chunk) if isinstance(chunk, tuple | list) else encoder(chunk)


def _devices(chunk: Any) -> list[torch.device]:
    """Return the GPUs whose random numbers an encoder may use: those of its input."""
    parts = chunk.values() if isinstance(chunk, dict) else chunk
    inputs = parts if isinstance(chunk, dict | tuple | list) else [chunk]
    devices = {value.device for value in inputs if isinstance(value, Tensor)}
    return [device for device in devices if device.type == "cuda"]


def _random_state(chunk: Any) -> list[RandomState]:
    """Return the states of PyTorch's generators before this chunk."""
    on_gpus = [(gpu, torch.cuda.get_rng_state(gpu)) for gpu in _devices(chunk)]
    return [(torch.device("cpu"), torch.get_rng_state()), *on_gpus]


@contextmanager
def _as_before(state: list[RandomState]) -> Iterator[None]:
    """Let PyTorch's generators repeat what they drew after this state, within the context."""
    gpus = [device for device, _ in state if device.type == "cuda"]
    with torch.random.fork_rng(devices=gpus):
        for device, numbers in state:
            if device.type == "cuda":
                torch.cuda.set_rng_state(numbers, device)
            else:
                torch.set_rng_state(numbers)
        yield
