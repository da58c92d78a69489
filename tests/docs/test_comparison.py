"""The numbers in docs/comparison.md and docs/scaling-background.md are those of our code."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hardmix.mixing.queue import MemoryQueue
from hardmix.models.encoders import Encoder, build_encoder
from hardmix.settings.recipes import RECIPES
from places import ROOT

COMPARISON = (ROOT / "docs" / "comparison.md").read_text()
SCALING = (ROOT / "docs" / "scaling-background.md").read_text()
CASES = [("imagenet100", 1), ("imagenet1k", 1), ("imagenet100", 8), ("imagenet1k", 8)]
RATES = (5e12, 20e12, 60e12)
IMAGES = {"imagenet100": 128_000, "imagenet1k": 1_281_167}
IMAGE_BYTES = 3 * 224 * 224 * 4
MAP_BYTES = 256 * 56 * 56 * 4


def test_every_test_that_the_comparison_names_exists():
    named = re.findall(r"`(tests/\w+/test_\w+\.py)::(test_\w+)`", COMPARISON)
    assert len(named) > 20
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / file).read_text(), (file, name)


@pytest.mark.parametrize("page", [COMPARISON, SCALING], ids=["comparison", "scaling"])
def test_every_file_that_is_linked_to_exists(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page)
    assert links
    for link in links:
        assert (ROOT / "docs" / link).exists(), link


def encoder(dtype: torch.dtype = torch.float32) -> Encoder:
    """Return the recipes' encoder on the meta device, where only shapes are computed."""
    with torch.device("meta"):
        return build_encoder(RECIPES["imagenet1k"].build("mochi", False).model).to(dtype)


def black(images: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(images, 3, 224, 224, device="meta", dtype=dtype)


@pytest.fixture(scope="module")
def parameters() -> int:
    return sum(each.numel() for each in encoder().parameters())


@pytest.fixture(scope="module")
def flop() -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder()(black(1))
    return counter.get_total_flops()


def kept_bytes(images: int, dtype: torch.dtype) -> int:
    """Return the bytes that autograd keeps for the backward pass, without weights."""
    network = encoder(dtype)
    weights = {each.untyped_storage()._cdata for each in network.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in weights:
            kept[memory._cdata] = memory
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        network(black(images, dtype))
    return sum(memory.nbytes() for memory in kept.values())


@pytest.fixture(scope="module")
def activations() -> dict[str, int]:
    """Return the bytes of one more image, so that what does not grow with the batch drops out."""
    return {
        name: kept_bytes(2, dtype) - kept_bytes(1, dtype)
        for name, dtype in [("fp32", torch.float32), ("bf16", torch.bfloat16)]
    }


def cells(start: str) -> list[str]:
    """Return the cells of the one row of scaling-background.md that begins with this text."""
    rows = [line for line in SCALING.splitlines() if line.startswith(f"| {start}")]
    assert len(rows) == 1, (start, rows)
    return [cell.strip(" *") for cell in rows[0].strip("|").split("|")]


def sizes(recipe: str, processes: int) -> tuple[int, int, int]:
    train = RECIPES[recipe].build("mochi", False).train
    return train.batch_size, train.batch_size // processes, train.queue_size


def num_points(recipe: str) -> int:
    mix = RECIPES[recipe].build("mochi", False).mix
    return mix.num_pairs + mix.num_with_query


def test_the_counts_of_the_network_are_the_real_ones(parameters, flop, activations):
    assert cells("P ")[2] == f"{parameters:,}"
    assert cells("F ")[2] == f"{flop:,}"
    assert cells("I ")[2] == f"{IMAGE_BYTES:,}"
    fp32, bf16 = (f"{activations[name] / 1e6:.1f} MB" for name in ("fp32", "bf16"))
    assert cells("A ")[2] == f"{fp32} in fp32, {bf16} in bf16"


def test_the_memory_table_is_its_formulas(parameters, activations):
    for column, (recipe, n) in enumerate(CASES, start=2):
        _, b, k = sizes(recipe, n)
        held = MemoryQueue(k, 128).state_dict()
        queue = sum(held[name].nbytes for name in ("keys", "labels", "ids"))
        fixed = 16 * parameters
        kept = 2 * (4 * parameters + queue)
        similarities = 3 * 4 * b * k
        points = 4 * 128 * (b * num_points(recipe) + k)
        views = IMAGE_BYTES * (5 * b + 2 * b * (n > 1))
        passes = 4 * b * MAP_BYTES
        common = fixed + queue + kept + similarities + points + views
        fp32 = common + b * activations["fp32"] + passes
        bf16 = common + b * activations["bf16"] + passes / 2 + 2 * parameters
        for start, text in [
            ("weights, gradients", f"{fixed / 1e6:.0f} MB"),
            ("queue, labels", f"{queue / 1e6:.1f} MB"),
            ("key encoder and queue", f"{kept / 1e6:.0f} MB"),
            ("similarities", f"{similarities / 1e6:.1f} MB"),
            ("MoCHi's points", f"{points / 1e6:.1f} MB"),
            ("views", f"{views / 1e6:.0f} MB"),
            ("activations, fp32", f"{b * activations['fp32'] / 1e9:.2f} GB"),
            ("activations, bf16", f"{b * activations['bf16'] / 1e9:.2f} GB"),
            ("key pass", f"{passes / 1e9:.2f} GB"),
            ("**all, fp32", f"{fp32 / 1e9:.1f} GB"),
            ("**all, bf16", f"{bf16 / 1e9:.1f} GB"),
        ]:
            assert cells(start)[column] == text, (start, recipe, n)


def test_the_time_table_is_its_formulas(flop):
    assert cells("images/s of each")[2:] == [f"{rate / (4 * flop):.0f}" for rate in RATES]
    for recipe, n in CASES:
        b = sizes(recipe, n)[1]
        row = cells(f"step of `{recipe}`, n = {n}")[2:]
        assert row == [f"{4 * flop * b / rate * 1e3:.0f} ms" for rate in RATES]
    for recipe, n in [case for case in CASES if case != ("imagenet100", 8)]:
        size = " (128,000 images)" * (recipe == "imagenet100")
        row = cells(f"200 epochs of `{recipe}`{size}, n = {n}")[2:]
        seconds = [IMAGES[recipe] * 200 * 4 * flop / (n * rate) for rate in RATES]
        assert row == [f"{each / 3600:.1f} h" for each in seconds]
    total = IMAGES["imagenet1k"] * 200 * 4 * flop
    assert f"{total:.2e}".replace("e+", "e") in SCALING
    for start, days in [("the paper (Broader", 24), ("official MoCo's README", 8 * 53 / 24)]:
        assert cells(start)[2] == f"{total / (days * 86400) / 1e12:.1f} TFLOP/s"


def test_the_traffic_table_is_its_formulas(parameters):
    for column, recipe in enumerate(("imagenet100", "imagenet1k"), start=2):
        whole, b, _ = sizes(recipe, 8)
        gradients = 2 * 7 / 8 * 4 * parameters
        images = 7 / 8 * b * IMAGE_BYTES
        keys = 7 / 8 * (4 * b * 128 + whole * (4 * 128 + 16))
        every = gradients + images + keys
        for start, text in [
            ("gradients (DDP", f"{gradients / 1e6:.1f} MB"),
            ("keys' images", f"{images / 1e6:.1f} MB"),
            ("keys back", f"{keys / 1e6:.1f} MB"),
            ("**all** | | **2", f"{every / 1e6:.0f} MB"),
            ("at 100 GB/s", f"{every / 100e9 * 1e3:.0f} ms"),
            ("at 10 GB/s", f"{every / 10e9 * 1e3:.0f} ms"),
            ("at 1 GB/s", f"{every / 1e9 * 1e3:.0f} ms"),
        ]:
            assert cells(start)[column] == text, (start, recipe)


def test_the_table_of_cores_is_its_formula(flop):
    for start in ("decode the JPEG", "hardmix's workers", "official MoCo's pipeline"):
        _, milliseconds, *cores = cells(start)
        expected = [rate / (4 * flop) * float(milliseconds) / 1e3 for rate in RATES]
        assert cores == [f"{each:.1f}" for each in expected]
