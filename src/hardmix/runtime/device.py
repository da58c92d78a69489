"""Which device and number format a run uses, and why: said at its start.

What travels between host and device does so from pinned memory, and nobody waits for it: `send`
there, `Late` back.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

from hardmix.errors import InputError
from hardmix.settings.named_choices import Precision


class Compute(NamedTuple):
    """Where and how to compute."""

    device: torch.device
    """Where tensors are."""
    bf16: bool
    """Whether forward passes are in bfloat16."""
    reason: str
    """Why, in words."""
    fp16: bool = False
    """Whether they are in float16, for which the loss has to be scaled."""

    @property
    def precision(self) -> str:
        """As `train.precision` names it."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Forward passes in half precision where that was chosen; losses stay in float32."""
        half = torch.float16 if self.fp16 else torch.bfloat16
        return torch.autocast(self.device.type, dtype=half, enabled=self.bf16 or self.fp16)


def choose_compute(device: str = "auto", precision: Precision = "auto") -> Compute:
    """The device asked for, and bfloat16 where the processor has units for it."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        if chosen.type == "cuda":
            if chosen.index is not None:  # else that of this process, which `joined` has set
                torch.cuda.set_device(chosen)  # kernels of others' libraries go there too
            chosen = torch.device("cuda", torch.cuda.current_device())
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"train.device={device} cannot be used here: {reason}") from error
    if precision != "auto":
        half = precision == "bf16", precision == "fp16"
        return Compute(chosen, half[0], f"{precision}: asked for", half[1])
    if chosen.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        name = torch.cuda.get_device_name(chosen)
        hint = "" if fast else ", which has no bf16; --train.precision fp16 may be faster"
        return Compute(chosen, fast, f"{'bf16' if fast else 'fp32'}: {name}{hint}")
    if torch.cpu._is_amx_tile_supported():
        return Compute(chosen, True, "bf16: this CPU has AMX")
    if torch.cpu._is_avx512_bf16_supported():
        return Compute(chosen, True, "bf16: this CPU has AVX512_BF16")
    return Compute(chosen, False, "fp32: this CPU has no units for bfloat16")


def send(tensor: Shaped[Tensor, "..."], device: torch.device) -> Shaped[Tensor, "..."]:
    """To a device, without waiting: a GPU copies from pinned memory while the program goes on."""
    if tensor.device.type == device.type or device.type == "cpu":
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


class Late:
    """Numbers on their way to the host: to be read later, when the GPU has long made them."""

    def __init__(self, tensor: Shaped[Tensor, "..."]) -> None:
        self._host, self._event = tensor.detach(), None
        if tensor.device.type != "cpu":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Shaped[Tensor, "..."]:
        """On the host; waits where the device is not so far."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def read_together(numbers: dict[str, Shaped[Tensor, ""]]) -> dict[str, float]:
    """Numbers by name, all read from the device at once: it is waited for one time."""
    values = torch.stack([each.float() for each in numbers.values()]).tolist()
    return dict(zip(numbers, values, strict=True))


@contextlib.contextmanager
def algorithms_chosen(device: torch.device, deterministic: bool) -> Iterator[None]:
    """Within, convolutions by the fastest algorithm, or all by those that repeat their bits.

    What has no such algorithm warns when it runs. Afterwards all is as it was.
    """
    if device.type == "cpu" and not deterministic:
        yield
        return
    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = (
        cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        memory.fill_uninitialized_memory,
    )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats with this alone
    cudnn.benchmark = not deterministic
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False  # nothing here reads memory before it is written
    try:
        yield
    finally:
        cudnn.benchmark, memory.fill_uninitialized_memory = before[0], before[3]
        torch.use_deterministic_algorithms(before[1], warn_only=before[2])


def describe_device(device: torch.device, deterministic: bool) -> str:
    """Where a run computes, and what is left to the GPU's libraries."""
    repeats = "deterministic algorithms where there are any" if deterministic else ""
    if device.type == "cpu":
        return ", ".join(filter(None, [f"cpu, {torch.get_num_threads()} threads", repeats]))
    rounded = {
        "convolutions": torch.backends.cudnn.allow_tf32,
        "matrix products": torch.backends.cuda.matmul.allow_tf32,
    }
    tf32 = " and ".join(name for name, used in rounded.items() if used) or "nothing"
    return f"{device}, {repeats or 'cudnn.benchmark'}, TF32 in {tf32} of float32"
