"""Communication between processes; a no-op when there is only one.

Every function may be called without torch.distributed, so that code for one process and for many
reads the same. Rows are in the order of the ranks everywhere. Tensors on GPUs travel by NCCL,
others by gloo: in the default group if it takes both, otherwise, as in a program that called
`init_process_group("nccl")`, in a gloo group of our own. rendezvous.py connects the processes.
"""

import socket
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed
from jaxtyping import Int64, Shaped
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hardmix.runtime.device import send

Part = TypeVar("Part")

_gloo: WeakKeyDictionary[Any, ReferenceType[Any]] = WeakKeyDictionary()
"""Our own group for tensors on CPUs beside each default group that does not take them. torch keeps
both until they are destroyed; holding them longer could make Python abort when it shuts down.
"""


def group_for(device: torch.device) -> Any:
    """Return the process group for tensors on this device; None is torch's default group.

    All ranks must make the first call together, because it may create a group.
    """
    default = torch.distributed.distributed_c10d._get_default_group()
    if device.type != "cpu" or torch.device("cpu") in default._device_types:
        return None
    reference = _gloo.get(default)
    group = None if reference is None else reference()
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
    """Return whether this process is the one that prints and writes files."""
    return rank() == 0


def gather(
    tensor: Shaped[Tensor, "rows ..."], with_gradient: bool = False
) -> Shaped[Tensor, "all_rows ..."]:
    """Return the rows of all ranks, in rank order: official MoCo's `concat_all_gather`.

    Shapes must be equal on all ranks. The result has no gradient unless `with_gradient` is set: a
    row then receives the sum of the gradients that all ranks have for it. If losses and gradients
    are averaged over the ranks, as DistributedDataParallel does, the result equals that of one
    process with the whole batch. With one process, the tensor itself is returned.
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
        own = gradient.new_empty(ctx.rows, *gradient.shape[1:])
        group = group_for(gradient.device)
        torch.distributed.reduce_scatter_tensor(own, gradient.contiguous(), group=group)
        return own


@torch.no_grad()
def gather_uneven(tensor: Shaped[Tensor, "rows ..."]) -> Shaped[Tensor, "all_rows ..."]:
    """Return the rows of all ranks, which may have different numbers of rows, or none."""
    if world_size() == 1:
        return tensor
    counts = gather(torch.tensor([len(tensor)])).tolist()
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = gather(padded).split(max(counts)) if max(counts) else [tensor]
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=False)])


@torch.no_grad()
def broadcast(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Overwrite a tensor with rank 0's values, in place, and return it."""
    if world_size() > 1 and tensor.numel():
        values = tensor.contiguous()  # gloo sends only contiguous memory
        torch.distributed.broadcast(values, src=0, group=group_for(values.device))
        if values is not tensor:
            tensor.copy_(values)
    return tensor


def broadcast_object(value: Part) -> Part:
    """Return rank 0's object, which must be picklable, on every rank; sent between CPUs."""
    if world_size() == 1:
        return value
    objects = [value]
    torch.distributed.broadcast_object_list(objects, src=0, group=group_for(torch.device("cpu")))
    return objects[0]


@torch.no_grad()
def mean_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Return the mean of each number over all ranks, which must have the same names."""
    if world_size() == 1 or not values:
        return values
    rows = gather(torch.tensor([list(values.values())], dtype=torch.float64))
    return dict(zip(values, rows.mean(dim=0).tolist(), strict=True))


def agree_on_max(value: int) -> int:
    """Return the highest of all ranks' numbers, by which they agree on what to do next.

    This is sent between CPUs: it waits for no GPU, and notices at once if a process has died.
    """
    if world_size() == 1:
        return value
    agreed = torch.tensor([value])
    highest = torch.distributed.ReduceOp.MAX
    torch.distributed.all_reduce(agreed, highest, group=group_for(agreed.device))
    return int(agreed)


class Agreement:
    """The highest of all ranks' numbers, which they agree on in the background.

    All ranks must make theirs at the same place, and read all of them.
    """

    def __init__(self, value: int) -> None:
        self._value, self._work = torch.tensor([value]), None
        if world_size() > 1:
            highest, group = torch.distributed.ReduceOp.MAX, group_for(self._value.device)
            self._work = torch.distributed.all_reduce(self._value, highest, group, async_op=True)

    def read(self) -> int:
        """Return the number; wait until all ranks have sent theirs."""
        if self._work is not None:
            self._work.wait()
        return int(self._value)


def meet() -> None:
    """Wait for all ranks, before a call between GPUs that would wait forever for a lost one.

    This is sent between CPUs, which notice at once if a process has died or failed.
    """
    agree_on_max(0)


def together(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield each part, such as a batch, once all ranks have theirs; all have equally many.

    A process whose disk has failed is thus noticed before the others wait for it on their GPUs.
    """
    for part in parts:
        meet()
        yield part


def while_main_works(parts: Iterable[Part]) -> list[Part]:
    """Return a list of `parts` on rank 0, and an empty one on the others.

    Rank 0 sends a sign of life after each part, so that the others do not time out.
    """
    finished: list[Part] = []
    for part in parts if is_main() else ():
        finished.append(part)
        agree_on_max(1)
    while agree_on_max(0):
        pass
    return finished


@torch.no_grad()
def add_up(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Replace a tensor by its sum over all ranks, in place, and return it."""
    if world_size() > 1:
        torch.distributed.all_reduce(tensor, group=group_for(tensor.device))
    return tensor


def gather_objects(mine: Part) -> list[Part]:
    """Return the objects of all ranks, in rank order; sent between CPUs, so they are pickled."""
    if world_size() == 1:
        return [mine]
    everyone: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(everyone, mine, group=group_for(torch.device("cpu")))
    return everyone


def data_parallel(module: nn.Module, *example: Shaped[Tensor, "batch ..."]) -> nn.Module:
    """Return `module` with gradients averaged over all ranks; on one process, the module itself.

    Each rank keeps its own buffers: DistributedDataParallel would send all of them at every step. A
    first pass with `example`, which leaves no trace, fixes the order in which gradients are summed.
    Otherwise a resumed run would differ from an unbroken one in its last bits.
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
    """Wrap a module by torch; `unused` if some parameters may have no gradient in a step."""
    device_ids = [device.index] if device.type == "cuda" else None
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.15 renames
        return DistributedDataParallel(
            module,
            device_ids,
            broadcast_buffers=False,
            find_unused_parameters=unused,
            gradient_as_bucket_view=True,  # gradients are summed where they are, without a copy
            process_group=group_for(device),
        )


@contextmanager
def no_sync(modules: Iterable[nn.Module], more_follow: bool = True) -> Iterator[None]:
    """Do not average gradients over ranks within the context, as long as `more_follow`."""
    with ExitStack() as stack:
        for module in modules:
            if more_follow and isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield


def share_state(module: nn.Module) -> None:
    """Overwrite the weights and other state of a module with rank 0's."""
    for tensor in module.state_dict().values():
        broadcast(tensor)


@torch.no_grad()
def gather_batch(
    parts: int, *columns: Shaped[Tensor, "rows ..."]
) -> tuple[Shaped[Tensor, "all_rows ..."], ...]:
    """Return the rows of all ranks in the order of the global batch.

    Each rank has its share of every part of the batch. Columns of all types are sent as bytes, in
    one call.
    """
    if world_size() == 1:
        return columns
    as_bytes = [each.contiguous().view(len(each), -1).view(torch.uint8) for each in columns]
    everyone = gather(torch.cat(as_bytes, dim=1))
    ordered = everyone.view(world_size(), parts, -1, everyone.shape[1]).transpose(0, 1)
    split = ordered.flatten(0, 2).split([each.shape[1] for each in as_bytes], dim=1)
    return tuple(
        data.contiguous().view(column.dtype).view(-1, *column.shape[1:])
        for data, column in zip(split, columns, strict=True)
    )


def _sum_of(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the sum of a network's outputs, a number with a gradient."""
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


def ranks_by_host() -> list[list[int]]:
    """Return the ranks of every node, by the names of the hosts; sent between CPUs."""
    hosts = gather_objects(socket.gethostname())
    return [[i for i, each in enumerate(hosts) if each == host] for host in dict.fromkeys(hosts)]


class Exchange:
    """Rows of all ranks being permuted: each rank receives its part of the new order.

    This is how images are shuffled for batch norm, and keys sent back. A rank sends every row only
    to the rank that needs it: with n ranks, n times fewer bytes than if all rows were gathered.
    """

    def __init__(
        self, rows: Shaped[Tensor, "batch ..."], permutation: Int64[Tensor, " all"]
    ) -> None:
        batch, number = len(rows), world_size()
        self._work = None
        if number == 1:
            self._rows, self._place = rows, send(permutation, rows.device)
            return
        wanted = permutation.cpu().view(number, batch)
        owner = wanted // batch
        leaving = wanted[owner == rank()] - rank() * batch
        place = owner[rank()].argsort(stable=True).argsort()
        leaving, self._place = send(torch.stack([leaving, place]), rows.device)
        self._sent = rows.detach().contiguous().index_select(0, leaving)
        self._rows = torch.empty_like(self._sent)
        self._work = torch.distributed.all_to_all_single(
            self._rows,
            self._sent,
            owner[rank()].bincount(minlength=number).tolist(),
            (owner == rank()).sum(dim=1).tolist(),
            group=group_for(rows.device),
            async_op=True,
        )

    def arrived(self) -> Shaped[Tensor, "batch ..."]:
        """Wait for this rank's rows and return them; with many ranks they have no gradient."""
        if self._work is not None:
            self._work.wait()
        return self._rows.index_select(0, self._place)
