"""A program: the colours of a batch by Inductor; prints the kernels it made and the difference.

A program of its own, because the tests' type checks cannot be compiled.
"""

import json
import sys

import torch
from torch._inductor import metrics

from hardmix.data.colours import compiled_colours
from hardmix.data.views import _colour_draws, _for_graph, colour_views
from hardmix.settings.config import DataConfig


def main() -> None:
    torch.manual_seed(0)
    config = DataConfig(image_size=64)
    crops = torch.randint(0, 256, (2, 8, 3, 64, 64), dtype=torch.uint8)
    ids = torch.arange(8) * 7
    metrics.reset()
    draws = _colour_draws(ids, config, 3, 4, 2, 0)
    parameters = _for_graph(draws, config)
    made = compiled_colours()(crops.flatten(0, 1), parameters, config.augmentation)
    expected = torch.cat(colour_views(crops, ids, config, 3, 4))
    apart = float((made - expected).abs().max())
    sys.stdout.write(json.dumps({"kernels": metrics.generated_kernel_count, "apart": apart}))


if __name__ == "__main__":
    main()
