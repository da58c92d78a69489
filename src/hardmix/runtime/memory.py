"""How much memory a device has."""

import os

import torch


def memory_of(device: torch.device) -> int:
    """Bytes in all, in use or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
