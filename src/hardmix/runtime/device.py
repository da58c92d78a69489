"""Which device and number format a run uses, and why: said at its start."""

import contextlib
from typing import NamedTuple

import torch

from hardmix.errors import InputError
from hardmix.settings.config import Precision


class Compute(NamedTuple):
    """Where and how to compute."""

    device: torch.device
    """Where tensors are."""
    bf16: bool
    """Whether forward passes are in bfloat16."""
    reason: str
    """Why, in words."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Forward passes in bfloat16 where that was chosen; losses stay in float32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)


def choose_compute(device: str = "auto", precision: Precision = "auto") -> Compute:
    """The device asked for, and bfloat16 where the processor has units for it."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"train.device={device} cannot be used here: {reason}") from error
    if precision != "auto":
        return Compute(chosen, precision == "bf16", f"{precision}: asked for")
    if chosen.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        name = torch.cuda.get_device_name(chosen)
        return Compute(chosen, fast, f"{'bf16' if fast else 'fp32'}: {name}")
    if torch.cpu._is_amx_tile_supported():
        return Compute(chosen, True, "bf16: this CPU has AMX")
    if torch.cpu._is_avx512_bf16_supported():
        return Compute(chosen, True, "bf16: this CPU has AVX512_BF16")
    return Compute(chosen, False, "fp32: this CPU has no units for bfloat16")
