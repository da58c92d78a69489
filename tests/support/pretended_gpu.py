"""A GPU that is not there: tensors that say cuda:0, compute on the CPU, and are watched.

    with pretended_gpu() as log:
        query = torch.randn(32, 128, device="cuda", requires_grad=True)
        log.clear()
        loss(query).backward()
    assert log.synchronisations == [] and len(log.launches) <= 70

Every entry knows its place, the nearest line of hardmix: `log.by_place(log.launches)`. One
operation of PyTorch counts as one launch; views and uninitialised memory are free. A copy from
memory that is not pinned counts as blocking, whatever it asks for.

How: a wrapper subclass holds a CPU tensor and says cuda:0 to Python; a function mode turns
device="cuda" into such tensors, and sees copies; dispatch sees every operation, backward's too.
Where the device is asked for in C++ the answer is the CPU. Not pretended: generators, streams,
`torch.compile`, torch.set_default_device.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

import hardmix

GPU = torch.device("cuda", 0)

PACKAGE = f"{Path(hardmix.__file__).parent}/"
TESTS = f"{Path(__file__).parents[1]}/"
"""Folders of hardmix's code and of the tests, whatever the checkout is called."""

READ_BACK = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
"""Operations whose result, or its size, the host must wait for."""

FREE = {
    *("alias", "detach", "view", "_unsafe_view", "_reshape_alias", "as_strided", "view_as_real"),
    *("t", "transpose", "permute", "expand", "slice", "select", "narrow", "diagonal", "unfold"),
    *("squeeze", "unsqueeze", "squeeze_", "unsqueeze_", "split", "split_with_sizes", "chunk"),
    *("unbind", "lift", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty"),
    *("new_empty_strided", "resize_", "set_", "is_same_size", "_has_same_storage_numel"),
}
"""Operations that launch nothing."""

ADDS_ATOMICALLY = {
    *("scatter_add", "index_add", "scatter_reduce", "index_reduce", "index_put", "put"),
    *("_index_put_impl", "embedding_dense_backward", "_embedding_bag_dense_backward"),
    *("_embedding_bag_backward", "grid_sampler_2d_backward"),
}
"""Operations that add in random order, on which a sum of floats depends."""

TAKES_BOTH = {
    *("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_"),
    "_foreach_copy_",
}
"""Operations that take tensors of host and device together."""


class Entry(NamedTuple):
    """An operation that was done."""

    what: str
    place: str
    bytes: int = 0


@dataclass
class DeviceLog:
    """Operations on the pretended GPU, in order."""

    launches: list[Entry] = field(default_factory=list)
    synchronisations: list[Entry] = field(default_factory=list)
    """Waits of the host for a number, or for one that decides a size."""
    blocking_copies: list[Entry] = field(default_factory=list)
    """Copies between host and device, either way, while the host waits."""
    other_copies: list[Entry] = field(default_factory=list)
    """Copies from or to pinned memory, without waiting."""
    mixed_devices: list[Entry] = field(default_factory=list)
    """Operations that would fail on a GPU: tensors of both devices, or the host's generator."""
    float_atomics: list[Entry] = field(default_factory=list)

    def clear(self) -> None:
        """Forget all entries."""
        for entries in vars(self).values():
            entries.clear()

    @staticmethod
    def by_place(entries: Sequence[Entry]) -> list[tuple[str, int]]:
        """Return how many there are at each line, most first, for messages."""
        return Counter(f"{entry.place} {entry.what}" for entry in entries).most_common()


@contextmanager
def pretended_gpu() -> Iterator[DeviceLog]:
    """Make device="cuda" work within the context, and log what it does."""
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # Module.to replaces parameters
    watch = _Watch(DeviceLog())
    try:
        with (
            patch("torch.cuda.manual_seed", lambda _: None),
            patch("torch.cuda.synchronize", lambda *_: watch.note_sync("torch.cuda.synchronize")),
            _Devices(watch),
            watch,
        ):
            yield watch.log
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped)


class GpuTensor(Tensor):
    """Holds a CPU tensor and says that it is on cuda:0."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, watch: "_Watch") -> "GpuTensor":
        made: GpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device="cpu",
        )
        made.held, made.watch = held, watch
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # the mode alone looks at functions

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run operations outside the modes too, in a thread of autograd's."""
        watch = next(each.watch for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        return watch.run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        return GPU

    @property
    def is_cuda(self) -> bool:
        return True

    def get_device(self) -> int:
        return 0

    def tolist(self) -> Any:
        self.watch.note_sync("tolist")
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert cuda:0 device type tensor to numpy: {_place()}")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({tuple(self.shape)}, {self.dtype})"


class _Watch(TorchDispatchMode):
    """Runs every operation on the CPU, and notes those of the pretended GPU."""

    def __init__(self, log: DeviceLog) -> None:
        super().__init__()
        self.log = log
        self.pinned: dict[int, Tensor] = {}
        """Pinned tensors by address; kept alive, so that no other tensor gets it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves = tree_leaves((args, kwargs))
        ours = {id(each.held): each for each in leaves if isinstance(each, GpuTensor)}
        if ours:
            self.note(func._schema.name.split("::")[1], args, kwargs, leaves)
        held_args, held_kwargs = tree_map_only(GpuTensor, lambda x: x.held, (args, kwargs))
        result = func(*held_args, **held_kwargs)
        if not ours:
            return result

        def wrapped(tensor: Tensor) -> Tensor:
            known = ours.get(id(tensor))
            return GpuTensor(tensor, self) if known is None else known

        answer = tree_map_only(Tensor, wrapped, result)
        schema = func._schema
        if not schema.is_mutable and any(each.alias_info is not None for each in schema.returns):
            return return_and_correct_aliasing(func, args, kwargs, answer)
        return answer

    def note(self, name: str, args: Any, kwargs: dict[str, Any], leaves: list[Any]) -> None:
        on_host = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, GpuTensor)]
        # A number of the host's, a tensor without axes, travels with the launch.
        if name not in TAKES_BOTH and any(x.dim() > 0 for x in on_host):
            self.log.mixed_devices.append(Entry(name, _place()))
        if any(isinstance(x, torch.Generator) for x in leaves):
            self.log.mixed_devices.append(Entry(f"{name} with a generator of the host", _place()))
        sizes_known = name != "repeat_interleave" or kwargs.get("output_size") is not None
        if name in READ_BACK or not sizes_known:
            self.note_sync(name)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            self.note_index(name, args)
        if name == "copy_" and isinstance(args[0], GpuTensor) != isinstance(args[1], GpuTensor):
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            self.note_copy(name, args[1], args[0], waits)
        elif name not in FREE:
            self.log.launches.append(Entry(name, _place()))
        if _adds_atomically(name, args, kwargs):
            self.log.float_atomics.append(Entry(name, _place()))

    def note_index(self, name: str, args: Any) -> None:
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        one_value = name != "index" and len(args[1]) == 1 and args[2].numel() == 1
        if masks and not one_value:  # which would be a masked_fill
            self.note_sync(f"{name} with a mask")
        for index in args[1]:
            if index is not None and not isinstance(index, GpuTensor):
                self.note_copy(f"{name} with an index of the host", index, index, waits=True)

    def note_sync(self, what: str) -> None:
        self.log.synchronisations.append(Entry(what, _place()))

    def note_copy(self, what: str, source: Tensor, target: Tensor, waits: bool) -> None:
        host = target if isinstance(source, GpuTensor) else source
        waits = waits or not self.is_pinned(host)
        entries = self.log.blocking_copies if waits else self.log.other_copies
        entries.append(Entry(what, _place(), source.numel() * source.element_size()))

    def pin(self, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        self.pinned[copy.untyped_storage().data_ptr()] = copy
        return copy

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned


class _Devices(TorchFunctionMode):
    """Makes device="cuda" mean the pretended GPU, and notes what is copied there and back."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch
        self.own: dict[str, Callable[..., Any]] = {
            "to": self.to,
            "type_as": lambda tensor, other: self.to(tensor, other),
            "cuda": lambda tensor, _=None, non_blocking=False: self.to(
                tensor, GPU, non_blocking=non_blocking
            ),
            "cpu": lambda tensor, **_: self.to(tensor, "cpu"),
            "tolist": lambda tensor: tensor.tolist(),
            "numpy": lambda tensor, **_: tensor.numpy(),
            "__array__": lambda tensor, *_: tensor.numpy(),
            "pin_memory": lambda tensor, *_: watch.pin(tensor),
            "is_pinned": lambda tensor, *_: watch.is_pinned(tensor),
            "new_tensor": self.new_tensor,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        of_tensor = bool(args) and isinstance(args[0], Tensor)
        ours = of_tensor and isinstance(args[0], GpuTensor)
        anywhere = ("to", "type_as", "cuda", "pin_memory", "is_pinned")
        if name in self.own and of_tensor and (ours or name in anywhere):
            return self.own[name](*args, **kwargs)
        if pin := kwargs.pop("pin_memory", False):
            return self.watch.pin(func(*args, **kwargs))
        device = kwargs.get("device")
        if device is None or pin:
            return func(*args, **kwargs)
        if torch.device(device).type == "cuda":
            return self.make(func, name, args, kwargs | {"device": "cpu"})
        if ours:
            self.watch.note_copy(f"{name}(device=cpu)", args[0], torch.empty(0), waits=True)
        return func(*args, **kwargs)

    def make(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the tensor that a factory makes, on the GPU."""
        made = func(*args, **kwargs)
        if isinstance(made, GpuTensor) or not isinstance(made, Tensor):
            return made
        if name in ("tensor", "as_tensor", "asarray"):
            self.watch.note_copy(name, made, made, waits=True)
        elif not name.startswith(("empty", "new_empty")):
            self.watch.log.launches.append(Entry(name, _place()))
        needs_grad = kwargs.get("requires_grad", False)
        return GpuTensor(made.detach(), self.watch).requires_grad_(needs_grad)

    def new_tensor(self, tensor: GpuTensor, data: Any, **kwargs: Any) -> Tensor:
        made = tensor.held.new_tensor(data, **{**kwargs, "device": "cpu"})
        self.watch.note_copy("new_tensor", made, made, waits=True)
        return GpuTensor(made, self.watch)

    def to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Handle Tensor.to in all its forms: (device, dtype), (dtype), (other), and by name."""
        device: Any = kwargs.pop("device", None)
        waits = not kwargs.pop("non_blocking", False)
        other = kwargs.pop("other", None)
        rest = []
        for value in args if other is None else (other, *args):
            if isinstance(value, Tensor):
                device, kwargs["dtype"] = value.device, value.dtype
            elif isinstance(value, torch.device | str | int) and not isinstance(value, bool):
                device = value
            elif isinstance(value, torch.dtype):
                kwargs["dtype"] = value
            elif isinstance(value, bool) and not rest:
                waits = not value
                rest.append(value)  # the next bool would be `copy`
        return self.cast(self.move(tensor, device, waits), kwargs)

    def move(self, tensor: Tensor, device: Any, waits: bool) -> Tensor:
        if device is None:
            return tensor
        there = torch.device(device).type == "cuda"
        if there == isinstance(tensor, GpuTensor):
            return tensor
        moved: Tensor = (_ToGpu if there else _ToHost).apply(tensor, self.watch)
        # A copy that does not wait makes its own pinned memory on the way back.
        host = tensor if there else self.watch.pin(moved.detach()) if not waits else moved
        self.watch.note_copy("to", tensor, moved if there else host, waits)
        return moved

    @staticmethod
    def cast(tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        return torch.Tensor.to(tensor, **kwargs) if kwargs else tensor


class _ToGpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, watch: _Watch) -> Tensor:
        return GpuTensor(tensor.detach().clone(), watch)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient.held if isinstance(gradient, GpuTensor) else gradient), None


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: GpuTensor, watch: _Watch) -> Tensor:
        ctx.watch = watch
        return tensor.held.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return GpuTensor(gradient, ctx.watch), None


def _adds_atomically(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    plain = name.rstrip("_")
    floats = any(isinstance(each, Tensor) and each.is_floating_point() for each in args)
    if plain not in ADDS_ATOMICALLY or not floats:
        return False
    if plain in ("index_put", "_index_put_impl", "put"):
        return bool(kwargs.get("accumulate", args[3] if len(args) > 3 else False))
    return not {"amax", "amin"} & {each for each in args if isinstance(each, str)}


def _place() -> str:
    """Return the nearest line of hardmix, otherwise of a test."""
    frame, test = sys._getframe(1), "(torch)"
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file.removeprefix(PACKAGE)}:{frame.f_lineno}"
        if file.startswith(TESTS) and file != __file__ and test == "(torch)":
            test = f"{file.removeprefix(TESTS)}:{frame.f_lineno}"
        frame = frame.f_back
    return test
