"""How much memory a device has, and how much of it a run has used."""

import os
from pathlib import Path

import torch


def memory_of(device: torch.device) -> int:
    """Bytes in all, in use or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def forget_peak(device: torch.device) -> None:
    """Measure the peak from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is used now
    except OSError:
        return


def peak_mb(device: torch.device) -> float | None:
    """MB at the peak: of tensors on a GPU, else of this process; None where it is not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), None)
