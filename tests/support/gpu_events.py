"""The pretended GPU for whole programs: with events, fused optimizers and autocast."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch

from hardmix.runtime.device import Compute
from pretended_gpu import GPU, Entry, pretended_gpu

MEMORY = SimpleNamespace(total_memory=16 << 30)
FP32 = Compute(GPU, False, "fp32")


@contextmanager
def gpu():
    """Pretend a GPU with events, whose waiting counts as a read, and with fused optimizers.

    Autocast is the CPU's, which casts the same matrix products and convolutions.
    """
    grouped = torch.optim.Optimizer._group_tensors_by_device_and_dtype
    autocast = torch.autocast

    def there(*arguments, **options):
        found = grouped(*arguments, **options)
        return {(GPU, dtype): tensors for (_, dtype), tensors in found.items()}

    with pretended_gpu() as log:

        class Event:
            def record(self):
                """Do nothing, as recording joins the queue of work."""

            def synchronize(self):
                log.synchronisations.append(Entry("Event.synchronize", "runtime/device.py"))

        with (
            patch("torch.cuda.Event", Event),
            patch("torch.autocast", lambda _, **options: autocast("cpu", **options)),
            patch("torch.cuda.set_device", lambda _: None),
            patch("torch.cuda.current_device", lambda: 0),
            patch("torch.cuda.get_device_properties", lambda _: MEMORY),
            patch.object(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", there),
        ):
            yield log
