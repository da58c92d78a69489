"""Devices: which one a run uses, in which number format and why, and how much memory it has.

Data is copied between host and device through pinned memory, without waiting: `send` to the
device, `Late` back.
"""

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

from hardmix.errors import InputError
from hardmix.settings.named_choices import Precision


class Compute(NamedTuple):
    """The device and number format to compute with."""

    device: torch.device
    """Device of all tensors."""
    bf16: bool
    """Whether forward passes run in bfloat16."""
    reason: str
    """Why this precision was chosen, as text."""
    fp16: bool = False
    """Whether forward passes run in float16, which needs loss scaling."""

    @property
    def precision(self) -> str:
        """The precision by its name in `train.precision`."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for forward passes in the chosen precision; losses stay in float32."""
        half = torch.float16 if self.fp16 else torch.bfloat16
        return torch.autocast(self.device.type, dtype=half, enabled=self.bf16 or self.fp16)


def choose_compute(device: str = "auto", precision: Precision = "auto") -> Compute:
    """Return the requested device, and bfloat16 if its hardware supports it ("auto")."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        if chosen.type == "cuda":
            if chosen.index is not None:  # otherwise `joined` has set the device of this process
                torch.cuda.set_device(chosen)  # for kernels of other libraries too
            chosen = torch.device("cuda", torch.cuda.current_device())
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"train.device={device} cannot be used here: {reason}") from error
    if precision != "auto":
        reason = f"{precision}: requested"
        return Compute(chosen, precision == "bf16", reason, fp16=precision == "fp16")
    if chosen.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        name = torch.cuda.get_device_name(chosen)
        hint = "" if fast else ", which has no bf16; train.precision=fp16 may be faster"
        return Compute(chosen, fast, f"{'bf16' if fast else 'fp32'}: {name}{hint}")
    if torch.cpu._is_amx_tile_supported():
        return Compute(chosen, True, "bf16: this CPU has AMX")
    if torch.cpu._is_avx512_bf16_supported():
        return Compute(chosen, True, "bf16: this CPU has AVX512_BF16")
    return Compute(chosen, False, "fp32: this CPU has no bfloat16 instructions")


def send(tensor: Shaped[Tensor, "..."], device: torch.device) -> Shaped[Tensor, "..."]:
    """Copy to a device without waiting: a GPU copies from pinned memory in the background."""
    if tensor.device.type == device.type or device.type == "cpu":
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


def one_launch(device: torch.device) -> bool | None:
    """Return `fused` of an optimizer of an evaluation: one launch on a GPU, as before on a CPU.

    On a CPU it would round differently.
    """
    return True if device.type == "cuda" else None


class Late:
    """Numbers being copied to the host, to be read later without stalling the GPU."""

    def __init__(self, tensor: Shaped[Tensor, "..."]) -> None:
        self._host, self._event = tensor.detach(), None
        if tensor.device.type != "cpu":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Shaped[Tensor, "..."]:
        """Return the numbers on the host; wait if the copy has not finished."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def read_together(numbers: dict[str, Shaped[Tensor, ""]]) -> dict[str, float]:
    """Return numbers by name, read from the device in one transfer."""
    values = torch.stack([each.float() for each in numbers.values()]).tolist()
    return dict(zip(numbers, values, strict=True))


@contextlib.contextmanager
def algorithms_chosen(deterministic: bool) -> Iterator[None]:
    """Use a GPU's fastest convolution algorithms, or only deterministic ones, within the context.

    Operations without a deterministic algorithm warn when they run. Settings are restored after.
    """
    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = (
        cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        memory.fill_uninitialized_memory,
    )
    cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats only with this
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False  # no code here reads memory before writing it
    try:
        yield
    finally:
        cudnn.benchmark, memory.fill_uninitialized_memory = before[0], before[3]
        torch.use_deterministic_algorithms(before[1], warn_only=before[2])


@contextlib.contextmanager
def threads_kept() -> Iterator[None]:
    """Restore the number of threads at the end, for the program around."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_device(device: torch.device, deterministic: bool) -> str:
    """Describe the device of a run, its determinism and its use of TF32."""
    repeats = "deterministic algorithms where available" if deterministic else ""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return ", ".join(filter(None, [f"cpu, {threads} thread{'s' * (threads != 1)}", repeats]))
    rounded = {
        "convolutions": torch.backends.cudnn.allow_tf32,
        "matrix products": torch.backends.cuda.matmul.allow_tf32,
    }
    tf32 = " and ".join(name for name, used in rounded.items() if used) or "nothing"
    return f"{device}, {repeats or 'cudnn.benchmark'}, TF32 in {tf32} of float32"


def memory_of(device: torch.device) -> int:
    """Return the bytes of memory of a device, used and free."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def forget_peak(device: torch.device) -> None:
    """Start measuring the peak of memory use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is used now
    except OSError:
        return


def peak_mb(device: torch.device) -> float | None:
    """Return the peak in MB: of tensors on a GPU, otherwise of this process; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), None)


def cpu_name() -> str:
    """Return the CPU's name, family and model number, since a virtual machine may hide some."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    pairs = [line.split(":", 1) for line in info.read_text().splitlines() if ":" in line]
    first = {name.strip(): value.strip() for name, value in reversed(pairs)}
    words = [first.get("model name", platform.machine())]
    words += [f"{name} {first[name]}" for name in ("cpu family", "model") if name in first]
    return ", ".join(words)
