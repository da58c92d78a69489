"""The checks and measurements of `python -m benchmarks gpu`: `CHECKS`, one function each.

A check returns what it found, in words, with numbers for the JSON file, or raises `Failed`. Each
runs in a fresh process, in an empty folder. Everything also runs on a CPU that stands in for the
GPU, with small sizes, and most of it on the pretended GPU of the tests.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks import growth, suite
from benchmarks.images import listed, photographs, repeated
from benchmarks.jobs import ROOT, SEED, BenchJob, Row, Setup, Tell, run_job
from benchmarks.limits import Limit, at_most, faster, judge
from benchmarks.loss import LARGE, SMALL, label as loss_label
from benchmarks.rounds import milliseconds, synchronize
from benchmarks.steps import (
    ON_GPUS,
    TINY,
    StepSize,
    build_training,
    label,
    random_batch,
    step_config,
)
from hardmix.data.gpu_decoding import check_decoder
from hardmix.data.image_set import ImageSet
from hardmix.data.views import make_views
from hardmix.methods.mixing_schedule import RowsGenerator
from hardmix.mixing.family import DENOMINATORS, FILTERS, WEIGHTS
from hardmix.mixing.loss import MochiLoss
from hardmix.mixing.queue import MemoryQueue
from hardmix.mixing.strategies import STRATEGIES
from hardmix.runs.folder import Run
from hardmix.runtime.console import silent
from hardmix.runtime.signals import StopRequest
from hardmix.settings.config import DataConfig, PretrainConfig
from hardmix.settings.methods import METHOD_FACTS, MethodName
from hardmix.settings.named_choices import Compiled, Precision
from hardmix.settings.recipes import RECIPES
from hardmix.settings.saved import to_json
from hardmix.training.setup import Own, prepare
from hardmix.training.state import Training, settle
from hardmix.training.step import take_step


class Failed(Exception):  # noqa: N818  (a finding, not a mistake of this program)
    """A claim does not hold; the message says what was found instead."""


@dataclass(frozen=True)
class Found:
    """The findings of a check whose claim holds."""

    words: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    parts: dict[str, list[Row]] = field(default_factory=dict, kw_only=True)
    """Rows of the benchmark's parts, by name."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine, and how much of it is checked."""

    device: str
    """cuda, or cpu as a stand-in."""
    gpus: int
    """Number of GPUs, or of processes that stand in for them."""
    small: bool
    """Whether sizes are small, to see that the check works."""
    setup: Setup
    voc: str | None = None
    """Folder VOCdevkit."""

    @classmethod
    def restored(cls, values: dict[str, Any]) -> "Machine":
        """Return the machine that was described to this process."""
        setup = values["setup"]
        setup = Setup(**{**setup, "precisions": tuple(setup["precisions"])})
        return cls(**{**values, "setup": setup})


@dataclass(frozen=True, kw_only=True)
class Check:
    """A claim, and the function that looks whether it holds."""

    name: str
    claim: str
    look: Callable[[Machine, Path, Tell], Found]
    seconds: float
    """Expected duration on a GPU, for the remaining time; nobody has measured it yet."""
    needs: int = 1
    """Number of GPUs."""
    needs_voc: bool = False

    @property
    def limit(self) -> float:
        """Seconds after which the check is ended: it hangs, or the machine is too slow for it."""
        return max(600.0, 10 * self.seconds)

    def skipped(self, machine: Machine) -> str:
        """Return why it cannot be done on this machine; an empty string if it can."""
        if machine.gpus < self.needs:
            return "there is only one GPU"
        if self.needs_voc and machine.voc is None:
            return "no --voc: the folder VOCdevkit"
        return ""

    def attempt(self, machine: Machine, folder: Path, tell: Tell) -> dict[str, Any]:
        """Return the result in words and numbers, whatever happens."""
        try:
            found = self.look(machine, folder, tell)
        except Failed as failure:
            return {"result": "failed", "words": str(failure)}
        except Exception as error:
            words = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            return {"result": "failed", "words": words, "traceback": traceback.format_exc()}
        missed = missed_limits(found.parts, machine)
        result = {"result": "failed" if missed else "passed", "words": missed or found.words}
        return {**result, "numbers": found.numbers, "parts": found.parts}


# -- the loss and the views against the CPU


class LossSize(NamedTuple):
    """Sizes of the losses that are compared with the CPU's."""

    batch: int
    queue: int
    dim: int
    num_hardest: int
    num_pairs: int
    num_with_query: int


AGREE: dict[Precision, float] = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""Largest relative difference of a query's gradient: of rounding in fp32, and of the rounding of
the gradient itself, which has the type of the query, in the others."""
LOSS_AGREES = 1e-4
MOST_OTHERS = 0.1
"""Share of the queries that may differ more: of two negatives that are equally hard to the last
bit, one is among the N hardest here and the other there."""


def losses(machine: Machine, _: Path, tell: Tell) -> Found:
    """Compare every strategy and member of the family, in every precision."""
    size = LossSize(*((6, 100, 16, 20, 30, 10) if machine.small else (32, 4096, 128, 256, 256, 64)))
    found: dict[str, dict[str, float]] = {}
    wrong = []
    for name, options in loss_cases().items():
        tell(name)
        for precision in AGREE:
            loss, gradient = loss_disagreement(machine.device, size, options, precision)
            found[f"{name}, {precision}"] = {"loss": loss, "gradient": gradient}
            if not (loss <= LOSS_AGREES and gradient <= AGREE[precision]):
                wrong.append(f"{name}, {precision} (loss {loss:.1e}, gradient {gradient:.1e})")
    if wrong:
        raise Failed(f"{len(wrong)} of {len(found)} differ: {'; '.join(wrong)}")
    worst = {
        precision: max(each["gradient"] for name, each in found.items() if name.endswith(precision))
        for precision in AGREE
    }
    words = ", ".join(f"{worst[precision]:.1e} in {precision}" for precision in AGREE)
    return Found(f"{len(found)} losses; gradients differ by at most {words}", found)


def loss_cases() -> dict[str, dict[str, Any]]:
    """Return the options of the losses by name."""
    cases: dict[str, dict[str, Any]] = {name: {"strategy": name} for name in STRATEGIES}
    cases |= {f"weights {name}": {"weights": name} for name in WEIGHTS if name != "given"}
    cases |= {f"denominator {name}": {"denominator": name} for name in DENOMINATORS}
    cases |= {f"filter {name}": {"filter_negatives": name} for name in FILTERS}
    cases["drop_hardest, through_query"] = {
        "real_negatives": "drop_hardest",
        "through_query": True,
    }
    return cases


def loss_disagreement(
    device: str, size: LossSize, options: dict[str, Any], precision: Precision
) -> tuple[float, float]:
    """Return by how much loss and gradient of the device differ, relative to the CPU's.

    Both get the same numbers, rounded to the precision; the CPU computes in float32. The worst of
    the queries is taken, without the `MOST_OTHERS` of them that differ most.
    """
    generator = torch.Generator().manual_seed(SEED)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    query, key = (
        torch.randn(size.batch, size.dim, generator=generator).to(dtype) for _ in range(2)
    )
    keys = normalize(torch.randn(size.queue, size.dim, generator=generator), dim=1)
    results = []
    for there, kind in (("cpu", torch.float32), (device, dtype)):
        loss = MochiLoss(*size[3:], **options)
        rows = RowsGenerator()
        rows.manual_seed(SEED)
        own = query.to(kind).to(there).requires_grad_()
        queue = MemoryQueue.prefilled(keys.to(there))
        with torch.autocast(there, dtype=dtype, enabled=kind != torch.float32):
            value = loss(own, key.to(kind).to(there), queue, generator=rows, reduction="none")
        (gradient,) = torch.autograd.grad(value.sum(), own)
        results.append((value.detach().float().cpu()[:, None], gradient.float().cpu()))
    (ours, slope), (theirs, their_slope) = results
    return _typical(ours, theirs), _typical(slope, their_slope)


def _typical(expected: Tensor, found: Tensor) -> float:
    """Return the relative difference of all rows but the few that differ most."""
    apart = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-12)
    kept = apart.sort().values[: max(1, int((1 - MOST_OTHERS) * len(apart)))]
    return float(kept.max()) if bool(apart.isfinite().all()) else float("inf")


def views(machine: Machine, _: Path, tell: Tell) -> Found:
    """Compare crops and colours of every augmentation that a GPU makes."""
    images = torch.randint(0, 256, (32, 3, 60, 50), dtype=torch.uint8)
    ids, apart = torch.arange(32), {}
    for augmentation in ("moco-v1", "moco-v2", "simclr", "plain"):
        tell(augmentation)
        config = DataConfig(augmentation=augmentation, image_size=48)
        here = make_views(images, ids, config, SEED, 1)
        there = make_views(images.to(machine.device), ids, config, SEED, 1)
        pairs = zip(here, there, strict=True)
        apart[augmentation] = max(float((a - b.cpu()).abs().max()) for a, b in pairs)
    if max(apart.values()) > 1e-3:
        raise Failed(f"normalised pixels differ by {apart}")
    return Found(f"normalised pixels differ by at most {max(apart.values()):.1e}", apart)


# -- the step


def own_images(number: int = 96) -> ImageSet:
    """Return random images in memory, with labels."""
    pixels = torch.randint(0, 256, (number, 3, 40, 36), dtype=torch.uint8)
    return ImageSet("noise", torch.randint(0, 5, (number,)), tuple("abcde"), tensor=pixels)


def small_config(machine: Machine, method: MethodName = "mochi", **train: Any) -> PretrainConfig:
    """Return the demo recipe, at a size of seconds if the CPU stands in."""
    config = RECIPES["demo"].build(method, False)
    train = {"device": machine.device, "epochs": 3, "knn_every": 0, "verdict": False} | train
    mix = replace(config.mix, warm_up_epochs=0)
    if machine.small:
        train = {"batch_size": 16, "queue_size": 64, "log_every": 4, "timeout": 60.0} | train
        mix = replace(mix, num_hardest=16)
    if config.mixes and machine.small:
        mix = replace(mix, num_pairs=8, num_with_query=4)
        config = replace(config, data=replace(config.data, num_images=96))
    return replace(config, mix=mix, train=replace(config.train, **train))


def small_training(machine: Machine, folder: Path, method: MethodName, **more: Any) -> Training:
    """Return a run of a few small images in memory, ready for its first step."""
    small = replace(machine, small=True)
    config = small_config(small, method, log_every=1000, precision="fp32", **more)
    config = replace(config, data=replace(config.data, name="own"))
    with silent():
        return prepare(config, Run(folder / "run"), Own(images=own_images()), StopRequest())


WAITING: dict[str, tuple[MethodName, dict[str, Any]]] = {
    **{name: (name, {}) for name in METHOD_FACTS},
    "mochi, without other views of the image": ("mochi", {"exclude_same_image": True}),
    "moco-v2, in two parts": ("moco-v2", {"accumulate": 2}),
}
"""Runs whose steps must not wait: every method."""


def waits(machine: Machine, folder: Path, tell: Tell) -> Found:
    """Take steps while PyTorch raises an error at every operation that waits for the GPU."""
    wrong = {}
    for name, (method, train) in WAITING.items():
        tell(name)
        training = small_training(machine, folder, method, **train)
        training.method.prepare(training.loader)
        training.method.begin_epoch(0)
        with closing(training.loader):
            batches = training.loader.epoch(0)
            take_steps(training, batches, 2)
            try:
                with waiting_refused(machine.device):
                    take_steps(training, batches, 2)
            except RuntimeError as error:
                wrong[name] = _first_place(error)
    if wrong:
        raise Failed(f"{len(wrong)} of {len(WAITING)} wait: {wrong}")
    return Found(f"{len(WAITING)} runs take steps without waiting")


def take_steps(training: Training, batches: Iterator[Any], number: int) -> None:
    """Take some steps with the loader's next batches."""
    for _ in range(number):
        take_step(training, next(batches), 0)
        training.step, training.position = training.step + 1, training.position + 1


@contextmanager
def waiting_refused(device: str) -> Iterator[None]:
    """Let PyTorch raise an error where the host would wait for the GPU, within the context."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _first_place(error: BaseException) -> str:
    """Return the nearest line of hardmix in an error's traceback."""
    places = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "hardmix" in Path(frame.filename).parts
    ]
    return places[-1] if places else str(error)


MOST_KERNELS = 2.0
"""Kernels of a step, at most, for each operation that the simulated GPU counts: some operations
launch more than one."""


def launches(machine: Machine, folder: Path, tell: Tell) -> Found:
    """Count kernels with the profiler, beside the operations that the simulated GPU counts."""
    numbers: dict[str, int] = {}
    sizes = [TINY] if machine.small else [TINY, ON_GPUS[0]]
    for size in sizes:
        for precision in machine.setup.precisions:
            tell(f"{label(size)}, {precision}")
            training = noise_training(f"mochi_{precision}", size, machine.device, folder)
            batch = random_batch(size, machine.device)
            for _ in range(3):
                take_step(training, batch, 0)
                training.step += 1
            numbers[f"{label(size)}, {precision}"] = kernels_of(
                partial(take_step, training, batch, 0), machine.device
            )
    counted = simulated_launches()
    kernels = numbers[f"{label(TINY)}, fp32"]
    if kernels > MOST_KERNELS * counted:
        raise Failed(f"{kernels} kernels in a step that is counted as {counted} launches")
    words = ", ".join(f"{kernels} ({name})" for name, kernels in numbers.items())
    numbers["simulated"] = counted
    return Found(f"kernels of a step: {words}; {counted} simulated for the first", numbers)


def simulated_launches() -> int:
    """Return the launches of the smallest step on the simulated GPU, in a process without one."""
    program = (
        "from benchmarks.gpu_counts import counted_step; from benchmarks.steps import TINY;"
        " print(len(counted_step('mochi_fp32', TINY).launches))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": source_path(), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1])


def noise_training(variant: str, size: StepSize, device: str, folder: Path) -> Training:
    """Return the training of a step that gets batches of noise."""
    home = folder / f"{variant}-{size.backbone}-{size.batch}"
    home.mkdir(exist_ok=True)
    root = listed(home, size.queue + 2 * size.batch)
    data = DataConfig(name="list", root=root, image_size=size.image_size)
    return build_training(variant, size, device, data, home / "run")


def kernels_of(work: Callable[[], object], device: str) -> int:
    """Return how many kernels and copies a call launches on the GPU."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] * (device == "cuda")
    with torch.profiler.profile(activities=kinds) as profile:
        work()
        synchronize(device)
    events = profile.events() or []
    return sum("CUDA" in str(each.device_type) for each in events)


def precisions(machine: Machine, folder: Path, tell: Tell) -> Found:
    """Train in float32, bfloat16 and float16."""
    found: dict[str, float] = {}
    for precision in ("fp32", "bf16", "fp16"):
        tell(precision)
        run = folder / precision
        said = pretrain(machine, run, precision=precision)
        if "is not applied" in said:
            raise Failed(f"{precision}: a step was not applied: {said.strip()[-300:]}")
        found[precision] = last_loss(run)
    apart = max(abs(each / found["fp32"] - 1) for each in found.values())
    if apart > 0.02:
        raise Failed(f"the last losses differ by {apart:.1%}: {found}")
    return Found(f"the last losses differ by at most {apart:.1%}", found)


COMPILED: tuple[Compiled, ...] = ("no", "encoders", "all", "graphs")
STEPS_COMPILED = 12


def compiled(machine: Machine, folder: Path, tell: Tell) -> Found:
    """Take the same steps with and without torch.compile and CUDA graphs, and time them."""
    size = TINY if machine.small else StepSize("resnet50", 16, 224)
    numbers: dict[str, Any] = {}
    batch = random_batch(size, machine.device)
    precision: Precision = "bf16" if "bf16" in machine.setup.precisions else "fp32"
    data = DataConfig(name="list", root=listed(folder, size.queue + 2 * size.batch))
    data = replace(data, image_size=size.image_size)
    for kind in COMPILED:
        if kind == "graphs" and machine.device != "cuda":
            continue  # refused on a CPU, in one sentence
        tell(kind)
        config = step_config(size, "mochi", precision, machine.device, data)
        config = replace(config, train=replace(config.train, compile=kind))
        with silent():
            training = prepare(config, Run(folder / kind), Own(), StopRequest())
        began, losses = time.perf_counter(), []
        for _ in range(STEPS_COMPILED):
            loss = take_step(training, batch, 0)
            training.step += 1
            losses.append(float("nan") if loss is None else float(loss))
        settle(training)
        first = time.perf_counter() - began
        times = milliseconds(partial(_steps, training, [batch] * 10), machine.device) / 10
        numbers[kind] = {"losses": losses, "ms": times, "first_steps_s": first}
    reference = numbers["no"]["losses"]
    for name, each in numbers.items():
        pairs = zip(each["losses"], reference, strict=True)
        apart = max(abs(a / b - 1) for a, b in pairs)
        if not apart <= 0.02:
            raise Failed(f"{name}: losses differ by {apart:.1%} from those without compiling")
    words = ", ".join(f"{name} {each['ms']:.1f} ms" for name, each in numbers.items())
    return Found(f"{label(size)}, {precision}: {words} a step; the losses agree", numbers)


def _steps(training: Training, batches: Sequence[Any]) -> None:
    for batch in batches:
        take_step(training, batch, 0)
        training.step += 1


MOST_APART = 3.0
"""Mean difference of the pixels of the two decoders, out of 255."""


def decoding(machine: Machine, folder: Path, tell: Tell) -> Found:
    """Decode photographs on the GPU (data.decoder=cuda) and on the CPU."""
    pictures = photographs(machine.setup.jpeg, folder, 8 if machine.small else 64)
    names = list(pictures.files or ())[:64]
    check_decoder(DataConfig(decoder="cuda"), torch.device("cuda"))  # torchcodec is installed
    decode = import_module("torchcodec.decoders").decode_jpeg
    contents = [torch.frombuffer(bytearray(Path(n).read_bytes()), dtype=torch.uint8) for n in names]
    tell("decoding")
    times: dict[str, float] = {}
    pixels: dict[str, list[Tensor]] = {}
    for device in dict.fromkeys(("cpu", machine.device)):
        work = partial(decode, contents, device=device)
        pixels[device] = work()
        times[device] = milliseconds(work, device) / len(names)
    apart = max(
        float((a.float() - b.cpu().float()).abs().mean())
        for a, b in zip(pixels["cpu"], pixels[machine.device], strict=True)
    )
    if apart > MOST_APART:
        raise Failed(f"the pixels of an image differ by {apart:.1f} of 255 on average")
    words = ", ".join(f"{ms:.2f} ms an image on {device}" for device, ms in times.items())
    return Found(f"{words}; pixels differ by at most {apart:.2f} on average", times)


# -- whole runs

NOTHING: Mapping[str, str] = MappingProxyType({})


def command(
    machine: Machine, *words: str, processes: int = 1, variables: Mapping[str, str] = NOTHING
) -> str:
    """Run a command of hardmix to its end, and return what it printed; raise Failed if it fails."""
    done = subprocess.run(
        [*launcher(processes), *words],
        env={**environment(machine), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failed(
            f"`hardmix {words[0]}` in {processes} processes ended with {done.returncode}:"
            f" {done.stderr.strip()[-500:]}"
        )
    return done.stdout + done.stderr


def launcher(processes: int) -> list[str]:
    """Return the words before those of the command."""
    if processes == 1:
        return [sys.executable, "-P", "-m", "hardmix"]
    distributed = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return [sys.executable, "-P", *distributed, str(processes), "-m", "hardmix", "--"]


def environment(machine: Machine) -> dict[str, str]:
    """Return the environment of commands; processes on a CPU have one thread each."""
    threads = {"OMP_NUM_THREADS": "1"} if machine.small else {}
    return {**os.environ, "PYTHONSAFEPATH": "1", **threads}


def pretrain(machine: Machine, run: Path, *more: str, processes: int = 1, **train: Any) -> str:
    """Train by the command line, with settings from a file; return what it printed."""
    words = pretrain_words(machine, run, **train)
    said = command(machine, *words, *more, processes=processes)
    if state_of(run) != "done":
        raise Failed(f"status.json says {state_of(run)} after a run that ended with 0")
    return said


def pretrain_words(machine: Machine, run: Path, **train: Any) -> list[str]:
    """Write a config, and return the words of its command."""
    file = run.with_suffix(".json")
    file.write_bytes(to_json(small_config(machine, **train)))
    return ["pretrain", "--config", str(file), "--out", str(run)]


def state_of(run: Path) -> str:
    """Return the state in status.json."""
    return str(json.loads((run / "status.json").read_text())["state"])


def last_loss(run: Path) -> float:
    """Return the last loss in metrics.jsonl."""
    return float([line["loss"] for line in Run(run).metrics() if "loss" in line][-1])


def same(first: Path, second: Path) -> list[str]:
    """Return what differs between two runs, bit for bit; speeds are not compared."""
    ours, theirs = (load_file(each / "encoder.safetensors") for each in (first, second))
    found = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    logs = [
        [{k: v for k, v in line.items() if "second" not in k} for line in Run(each).metrics()]
        for each in (first, second)
    ]
    return found + ["metrics.jsonl"] * (logs[0] != logs[1])


def same_bits(machine: Machine, folder: Path, tell: Tell, processes: int = 1) -> Found:
    """Train twice with --train.deterministic."""
    warnings = ""
    for name in ("first", "second"):
        tell(name)
        warnings = pretrain(machine, folder / name, processes=processes, deterministic=True)
    if different := same(folder / "first", folder / "second"):
        named = [line for line in warnings.splitlines() if "deterministic" in line]
        raise Failed(f"{len(different)} differ: {different[:5]}; PyTorch says: {named[:3]}")
    return Found("encoder and metrics are the same bit for bit")


def resumes(machine: Machine, folder: Path, tell: Tell, processes: int = 1) -> Found:
    """Kill a run by SIGKILL after its first checkpoint, resume it, and compare."""
    train = {"deterministic": True, "epochs": 6, "save_every": 1}
    tell("unbroken")
    pretrain(machine, folder / "unbroken", processes=processes, **train)
    tell("killed")
    run = folder / "killed"
    words = pretrain_words(machine, run, **train)
    with subprocess.Popen(
        [*launcher(processes), *words],
        env=environment(machine),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while process.poll() is None and not list(run.glob("checkpoints/step-*.json")):
            time.sleep(0.02)
        if process.poll() is not None:
            raise Failed(f"the run ended with {process.returncode} before its first checkpoint")
        os.kill(process.pid if processes == 1 else last_child(process.pid), signal.SIGKILL)
        process.wait()
    state = state_of(run)
    if processes > 1 and state not in ("stopped", "failed"):
        raise Failed(f"after the loss of a process, status.json says {state}")
    tell("resumed")
    pretrain(machine, run, "--resume", processes=processes, **train)
    if different := same(folder / "unbroken", run):
        raise Failed(f"the resumed run differs: {different[:5]}")
    return Found("the resumed run has the bits of the unbroken one")


def last_child(parent: int) -> int:
    """Return the number of the process that was started last by this one."""
    tasks = Path(f"/proc/{parent}/task").glob("*/children")  # any of its threads may start one
    return max(int(child) for task in tasks for child in task.read_text().split())


def evaluations(machine: Machine, folder: Path, tell: Tell) -> Found:
    """Compare k-NN of the GPU with that of the CPU, and of two processes if there are two GPUs."""
    run = folder / "run"
    pretrain(machine, run, device="auto")
    numbers = {}
    for name, processes, hidden in [
        ("the CPU", 1, {"CUDA_VISIBLE_DEVICES": ""}),
        ("the GPU", 1, {}),
        *([("two GPUs", 2, {})] if machine.gpus > 1 else []),
    ]:
        tell(name)
        command(machine, "knn", str(run), processes=processes, variables=hidden)
        result = json.loads((run / "results" / "knn.json").read_text())
        numbers[name] = result["top1"]
    if max(numbers.values()) - min(numbers.values()) > 0.01:
        raise Failed(f"the accuracies differ: {numbers}")
    tell("linear")
    linear = ["linear", str(run), "--preset", "imagenet100", "--epochs", "2"]
    command(machine, *linear, processes=min(2, machine.gpus))
    words = ", ".join(f"{top1:.3f} on {name}" for name, top1 in numbers.items())
    return Found(f"top 1 of k-NN: {words}; linear ended well", numbers)


def profiled(machine: Machine, folder: Path, tell: Tell) -> Found:
    """Train on photographs with train.profile, and say which share of a step is waiting."""
    import hardmix

    size = TINY if machine.small else ON_GPUS[0]._replace(batch=128)
    (folder / "images").mkdir()
    pictures = photographs(machine.setup.jpeg, folder / "images", 8 if machine.small else 100)
    images = repeated(pictures, size.batch * (8 if machine.small else 60))
    precision: Precision = "bf16" if "bf16" in machine.setup.precisions else "fp32"
    config = step_config(size, "mochi", precision, machine.device, DataConfig())
    data = replace(config.data, image_size=size.image_size)
    train = replace(config.train, epochs=1, profile=True, knn_every=0, verdict=False)
    tell("training")
    with silent():
        hardmix.pretrain(replace(config, data=data, train=train), folder / "run", images=images)
    profile = json.loads((folder / "run" / "profile.json").read_text())
    speeds = [line["images_per_second"] for line in Run(folder / "run").metrics()]
    shares = {name: each["share"] for name, each in profile["parts"].items()}
    words = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    return Found(f"{speeds[-1]:.0f} images/s; of a step: {words}", {**profile, "speeds": speeds})


# -- several GPUs


def second_gpu(machine: Machine, folder: Path, tell: Tell) -> Found:
    """Train on the second GPU alone."""
    tell("training")
    device = "cuda:1" if machine.device == "cuda" else machine.device
    said = pretrain(replace(machine, device=device), folder / "run")
    if device not in said:
        raise Failed(f"the run does not say that it uses {device}")
    return Found(f"trained on {device}")


PROGRAM = """
import os, sys
import torch
import hardmix
from hardmix.settings.saved import build_config
import json

if sys.argv[1] == "nccl":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group(sys.argv[1])
config = build_config(json.load(open(sys.argv[2])), sys.argv[2])
hardmix.pretrain(config, sys.argv[3])
torch.distributed.destroy_process_group()
"""


def own_program(machine: Machine, folder: Path, tell: Tell) -> Found:
    """Train in a program's own process group, which on GPUs is NCCL's."""
    program, config = folder / "program.py", folder / "config.json"
    program.write_text(PROGRAM)
    config.write_bytes(to_json(small_config(machine)))
    backend = "nccl" if machine.device == "cuda" else "gloo"
    words = launcher(2)[: -len(["-m", "hardmix", "--"])]
    tell(backend)
    done = subprocess.run(
        [*words, str(program), backend, str(config), str(folder / "run")],
        env=environment(machine) | {"PYTHONPATH": source_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or state_of(folder / "run") != "done":
        raise Failed(f"ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return Found(f"trained within a group of {backend}")


def source_path() -> str:
    """Return a PYTHONPATH by which a program elsewhere finds this checkout."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")]
    return os.pathsep.join(filter(None, paths))


def rates(machine: Machine, _: Path, tell: Tell) -> Found:
    """Measure images per second of one and more processes."""
    rows = []
    for job in growth.processes_jobs(machine.setup, machine.setup.rounds):
        rows += run_job(job, tell)
    return Found(f"measured {len(rows)} settings", parts={"growth": rows} if rows else {})


# -- measurements


def part(name: str) -> Callable[[Machine, Path, Tell], Found]:
    """Return the check that measures a part of the benchmark and judges `GPU_LIMITS`."""

    def look(machine: Machine, _: Path, tell: Tell) -> Found:
        def run_and_tell(job: BenchJob, advance: Tell) -> list[Row]:
            def both(words: str) -> None:
                advance(words)
                tell(words)

            return run_job(job, both)

        rows = suite.measure_part(name, machine.setup, run_and_tell)
        return Found(f"measured {len(rows)} settings; see the tables", parts={name: rows})

    return look


_STEPS = tuple(label(size) for size in ON_GPUS)
GPU_LIMITS: tuple[Limit, ...] = (
    *(
        faster("step", setting, peer, f"mochi_{precision}_together", 1.0)
        for setting in _STEPS
        for precision in ("fp32", "bf16")
        for peer in ("official", "lightly")
    ),
    *(
        at_most("step", setting, f"mochi_{precision}", f"moco_{precision}", 1.05)
        for setting in _STEPS
        for precision in ("fp32", "bf16")
    ),
    *(
        faster("loss", loss_label(shape), "materialised", "hardmix", 1.0)
        for shape in (SMALL, LARGE)
    ),
    *(
        at_most("memory", f"loss {loss_label(shape)}", "hardmix", "materialised", 1.0)
        for shape in (SMALL, LARGE)
    ),
)
"""Limits on a GPU; those of CPUs are in limits.py."""


def missed_limits(parts: dict[str, list[Row]], machine: Machine) -> str:
    """Return the limits that these parts miss, in words; an empty string if there are none."""
    missed = [each for each in judge(parts, machine.setup, GPU_LIMITS) if each["met"] is False]
    return "; ".join(
        f"{each['setting']}: {each['variant']} / {each['against']} is {each['measured']:.2f}, not"
        f" {'at least' if each['at_least'] else 'at most'} {each['must']:.2f}"
        for each in missed
    )


def detector(machine: Machine, folder: Path, tell: Tell) -> Found:
    """Fine-tune a detector for a short time, on all GPUs."""
    assert machine.voc is not None
    run = folder / "run"
    size = "resnet18-narrow" if machine.small else "resnet50"
    tell("pre-training")
    config = small_config(machine, epochs=1)
    file = folder / "run.json"
    file.write_bytes(to_json(replace(config, model=replace(config.model, backbone=size))))
    command(machine, "pretrain", "--config", str(file), "--out", str(run))
    tell("detection")
    words = ["detect", str(run), "--task", "voc", "--data.root", machine.voc, "--schedule", "short"]
    said = command(machine, *words, processes=min(2, machine.gpus))
    lines = [line for line in said.splitlines() if "AP50" in line]
    return Found(lines[-1].strip() if lines else "ended well")


CHECKS: tuple[Check, ...] = (
    Check(
        name="losses",
        claim="losses and gradients of every strategy and member of the family are the CPU's, in"
        " fp32, bf16 and fp16",
        look=losses,
        seconds=40,
    ),
    Check(name="views", claim="crops and colours are the CPU's", look=views, seconds=15),
    Check(
        name="waiting",
        claim="no step of any method waits for the GPU",
        look=waits,
        seconds=40,
    ),
    Check(
        name="launches",
        claim="a step launches about as many kernels as the simulated GPU counts",
        look=launches,
        seconds=40,
    ),
    Check(
        name="precisions",
        claim="runs in fp32, bf16 and fp16 end with the same loss to two digits",
        look=precisions,
        seconds=60,
    ),
    Check(
        name="same bits",
        claim="--train.deterministic gives the same bits twice",
        look=same_bits,
        seconds=40,
    ),
    Check(
        name="resume",
        claim="a run that is killed and resumed has the bits of an unbroken one",
        look=resumes,
        seconds=60,
    ),
    Check(
        name="compile",
        claim="compiling and CUDA graphs change no loss by more than 2 %",
        look=compiled,
        seconds=180,
    ),
    Check(
        name="evaluations",
        claim="k-NN gives the CPU's accuracy; linear ends well",
        look=evaluations,
        seconds=60,
    ),
    Check(
        name="step",
        claim="a step is as fast as official MoCo's and lightly's; MoCHi's takes at most 1.05"
        " times as long as MoCo's",
        look=part("step"),
        seconds=150,
    ),
    Check(
        name="loss",
        claim="the loss is as fast as one that creates the vectors",
        look=part("loss"),
        seconds=30,
    ),
    Check(
        name="memory",
        claim="the loss takes no more memory than one that creates the vectors",
        look=part("memory"),
        seconds=60,
    ),
    Check(
        name="decoding",
        claim="JPEGs that the GPU decodes have the CPU's pixels to rounding; both are timed",
        look=decoding,
        seconds=20,
    ),
    Check(name="loader", claim="images per second are measured", look=part("loader"), seconds=60),
    Check(
        name="end-to-end",
        claim="images per second with training are measured",
        look=part("end-to-end"),
        seconds=60,
    ),
    Check(
        name="profile",
        claim="the parts of a step on photographs are measured",
        look=profiled,
        seconds=60,
    ),
    Check(
        name="second GPU",
        claim="--train.device cuda:1 uses the second GPU",
        look=second_gpu,
        seconds=20,
        needs=2,
    ),
    Check(
        name="two GPUs, same bits",
        claim="two processes over NCCL give the same bits twice",
        look=partial(same_bits, processes=2),
        seconds=50,
        needs=2,
    ),
    Check(
        name="two GPUs, resume",
        claim="after kill -9 of a process the other stops, and the resumed run has the same bits",
        look=partial(resumes, processes=2),
        seconds=90,
        needs=2,
    ),
    Check(
        name="two GPUs, own program",
        claim="hardmix.pretrain works within a program's own group of NCCL",
        look=own_program,
        seconds=30,
        needs=2,
    ),
    Check(
        name="two GPUs, speed",
        claim="images per second of one and more GPUs are measured",
        look=rates,
        seconds=90,
        needs=2,
    ),
    Check(
        name="detector",
        claim="a detector is fine-tuned on VOC",
        look=detector,
        seconds=600,
        needs_voc=True,
    ),
)
"""All checks, in order: what may be wrong first, what takes long last."""
