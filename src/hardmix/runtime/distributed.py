"""Communication between processes; a no-op when there is only one.

Every function may be called without torch.distributed; tests and single-device runs then read the
same as `torchrun`. Rank order is the order of rows everywhere. Tensors on GPUs travel by NCCL,
others by gloo: by the default group where it takes both, else, as in a program that called
`init_process_group("nccl")`, by a gloo group of our own. How processes find each other, and leave,
stands in rendezvous.py.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Part = TypeVar("Part")

_gloo: WeakKeyDictionary[Any, ReferenceType[Any]] = WeakKeyDictionary()
"""For tensors on CPUs: our own group beside each default group that does not take them. torch holds
both until they are destroyed; if we held them longer, their threads could abort a Python that ends.
"""


def group_for(device: torch.device) -> Any:
    """The process group that takes tensors of this device; the first call is one of all ranks.

    None is the default group, as torch.distributed has it.
    """
    default = torch.distributed.distributed_c10d._get_default_group()
    if device.type != "cpu" or torch.device("cpu") in default._device_types:
        return None
    known = _gloo.get(default)
    group = None if known is None else known()
    if group is None:
        group = torch.distributed.new_group(backend="gloo")
        _gloo[default] = ref(group)
    return group


def world_size() -> int:
    """Return the number of processes that train together."""
    return torch.distributed.get_world_size() if _running() else 1


def rank() -> int:
    """Return the index of this process, from 0."""
    return torch.distributed.get_rank() if _running() else 0


def is_main() -> bool:
    """Whether this process is the one that prints and writes files."""
    return rank() == 0


def gather(
    tensor: Shaped[Tensor, "rows ..."], with_gradient: bool = False
) -> Shaped[Tensor, "all_rows ..."]:
    """Return the rows of all ranks, in rank order: official MoCo's `concat_all_gather`.

    Shapes must be equal on all ranks. The result has no gradient, unless `with_gradient`: then a
    row gets the sum of the gradients that all ranks have for it, and with losses and gradients
    averaged over the ranks (DistributedDataParallel) the result is that of one process with the
    whole batch. With one process this returns the tensor itself.
    """
    if world_size() == 1:
        return tensor
    if with_gradient and torch.is_grad_enabled() and tensor.requires_grad:
        gathered: Tensor = _GatherWithGradient.apply(tensor)
        return gathered
    with torch.no_grad():
        return _everyone(tensor)


def _everyone(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    everyone = tensor.new_empty(world_size() * len(tensor), *tensor.shape[1:])
    torch.distributed.all_gather_into_tensor(everyone, tensor, group=group_for(tensor.device))
    return everyone


class _GatherWithGradient(torch.autograd.Function):
    """Gather forward, sum over the ranks backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.rows = len(tensor)
        return _everyone(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = add_up(gradient.contiguous().clone())
        return total[rank() * ctx.rows : (rank() + 1) * ctx.rows]


@torch.no_grad()
def gather_uneven(tensor: Shaped[Tensor, "rows ..."]) -> Shaped[Tensor, "all_rows ..."]:
    """As `gather`, for ranks with different numbers of rows, or none."""
    if world_size() == 1:
        return tensor
    counts = gather(torch.tensor([len(tensor)])).tolist()
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = gather(padded).split(max(counts)) if max(counts) else [tensor]
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=False)])


@torch.no_grad()
def broadcast(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Rank 0's values, written over this rank's in place; on one process nothing happens."""
    if world_size() > 1 and tensor.numel():
        values = tensor.contiguous()  # a copy where the memory is not: gloo sends plain blocks
        torch.distributed.broadcast(values, src=0, group=group_for(values.device))
        if values is not tensor:
            tensor.copy_(values)
    return tensor


def broadcast_text(text: str) -> str:
    """Rank 0's text, on every rank."""
    if world_size() == 1:
        return text
    data = text.encode()
    size = broadcast(torch.tensor([len(data)]))
    letters = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)
    if not is_main():
        letters = torch.zeros(int(size), dtype=torch.uint8)
    return bytes(broadcast(letters[: int(size)]).tolist()).decode()


@torch.no_grad()
def mean_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """The mean of each number over all ranks, which must know the same names."""
    if world_size() == 1 or not values:
        return values
    rows = gather(torch.tensor([list(values.values())], dtype=torch.float64))
    return dict(zip(values, rows.mean(dim=0).tolist(), strict=True))


def agree_on_max(value: int) -> int:
    """The highest of all ranks' numbers: how they agree on what to do next.

    Between CPUs, so that no GPU is waited for; a process that died is noticed here at once.
    """
    if world_size() == 1:
        return value
    agreed = torch.tensor([value])
    highest = torch.distributed.ReduceOp.MAX
    torch.distributed.all_reduce(agreed, highest, group=group_for(agreed.device))
    return int(agreed)


def meet() -> None:
    """Wait until all ranks are here, before a call between GPUs that would wait without end.

    A process that died, or that raised an error, is noticed here at once: between CPUs.
    """
    agree_on_max(0)


def together(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield each part when all ranks have theirs, as many on each: a batch, for a step on GPUs.

    A process whose disk failed is noticed before the others wait for it.
    """
    for part in parts:
        meet()
        yield part


def while_main_works(parts: Iterable[Part]) -> list[Part]:
    """Rank 0 goes through `parts`; the others get none and hear of each, so that none gives up."""
    done: list[Part] = []
    for part in parts if is_main() else ():
        done.append(part)
        agree_on_max(1)
    while agree_on_max(0):
        pass
    return done


@torch.no_grad()
def add_up(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """The sum over all ranks, in place."""
    if world_size() > 1:
        torch.distributed.all_reduce(tensor, group=group_for(tensor.device))
    return tensor


def gather_objects(mine: Part) -> list[Part]:
    """What every rank has, in rank order: anything that can be pickled, between CPUs."""
    if world_size() == 1:
        return [mine]
    everyone: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(everyone, mine, group=group_for(torch.device("cpu")))
    return everyone


def data_parallel(module: nn.Module, *example: Shaped[Tensor, "batch ..."]) -> nn.Module:
    """`module` with gradients averaged over all ranks; on one process the module itself.

    Buffers stay each rank's own: DistributedDataParallel would send all of them at every step. A
    first pass with `example` settles in which order gradients are summed, else a resumed run would
    differ from the unbroken one in its last bits; it leaves no trace.
    """
    if world_size() == 1:
        return module
    buffers = [buffer.clone() for buffer in module.buffers()]
    unused = _unused_parameters(module, *example)
    shared = wrap(module, example[0].device, unused=unused)
    _sum_of(shared(*example)).backward()
    for buffer, before in zip(module.buffers(), buffers, strict=True):
        buffer.copy_(before)
    module.zero_grad()
    return shared


def wrap(
    module: nn.Module, device: torch.device, *, unused: bool = False
) -> DistributedDataParallel:
    """Torch's own wrapper; `unused`: not every parameter has a gradient at each step."""
    device_ids = [device.index] if device.type == "cuda" else None
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of torch 2.15's name
        return DistributedDataParallel(
            module,
            device_ids,
            broadcast_buffers=False,
            find_unused_parameters=unused,
            process_group=group_for(device),
        )


@contextmanager
def no_sync(modules: Iterable[nn.Module], more_follow: bool = True) -> Iterator[None]:
    """Within, gradients stay this rank's own: those of a part of a batch, to be added up."""
    with ExitStack() as stack:
        for module in modules:
            if more_follow and isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield


def share_state(module: nn.Module) -> None:
    """Rank 0's weights, statistics and other state on every rank."""
    for tensor in module.state_dict().values():
        broadcast(tensor)


@torch.no_grad()
def gather_batch(
    parts: int, *columns: Shaped[Tensor, "rows ..."]
) -> tuple[Shaped[Tensor, "all_rows ..."], ...]:
    """Every rank's rows in the order of the global batch, of which each rank has part by part.

    All columns, whatever their types, travel as bytes in one call.
    """
    if world_size() == 1:
        return columns
    as_bytes = [each.contiguous().view(len(each), -1).view(torch.uint8) for each in columns]
    everyone = gather(torch.cat(as_bytes, dim=1))
    ordered = everyone.view(world_size(), parts, -1, everyone.shape[1]).transpose(0, 1)
    split = ordered.flatten(0, 2).split([each.shape[1] for each in as_bytes], dim=1)
    return tuple(
        each.contiguous().view(column.dtype).view(-1, *column.shape[1:])
        for each, column in zip(split, columns, strict=True)
    )


def _sum_of(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """All that a network returns, as one number with a gradient."""
    parts = (output,) if isinstance(output, Tensor) else output
    return torch.stack([part.sum() for part in parts]).sum()


def _unused_parameters(module: nn.Module, *example: Tensor) -> bool:
    _sum_of(module(*example)).backward()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    unused = any(parameter.grad is None for parameter in trained)
    module.zero_grad()
    return unused


def _running() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
