"""Kills and full disks while decoded images, an index, a classifier or a detector are written.

Each job is a command as a user gives it, small: it is killed at random moments, given again until
it ends, and must then have the result of one that was never disturbed.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from safetensors.torch import load_file

from hardmix.commands import main as cli
from hardmix.data.shards import expand, open_shard_set
from hardmix.data.sources import open_images
from hardmix.models.backbones import build_backbone
from hardmix.runs.folder import Run
from hardmix.settings.config import DataConfig
from ranks import start, tiny

CHAIN = 4
"""Kills of one job, which is then given again until it ends."""
IMAGES, SHARDS, SHARD_IMAGES = 1000, 12, 250
LINEAR = ["--preset", "imagenet100", "--epochs", "6", "--batch-size", "16", "--lr", "1"]
DETECT = [
    *("--schedule", "short", "--iterations", "6", "--milestones", "4", "--warm-up", "2"),
    *("--batch-size", "2", "--lr", "0.01", "--sides", "48", "64", "--test-side", "64"),
    *("--regions", "8", "--proposals", "10", "--precise-bn", "2", "--save-every", "1"),
    *("--test-every", "3", "--log-every", "1", "--data.workers", "0", "--device", "cpu"),
    *("--trials", "1"),
]


class Task(NamedTuple):
    """A command that writes into `place`, which is made from `source`."""

    do: Callable[[Path, Path], None]
    result: Callable[[Path], object]
    """Returns what must be equal at the end."""
    run: str
    """The run that it evaluates; empty if none."""
    room: int
    """Most bytes that it writes."""
    full: tuple[int, str]
    """Exit status on a full disk, and a part of the message."""


def tasks(source: Path) -> dict[str, Task]:
    """Make what the jobs read, and list them."""
    source.mkdir()
    make_folder(source / "photos", IMAGES)
    make_shards(source, SHARDS, SHARD_IMAGES)
    make_cells(source / "cells")
    make_run(source / "linear-run", "small")
    make_run(source / "detect-run", "resnet18-narrow")
    return {
        "cache": Task(decode, pixels, "", IMAGES * 64 * 64 * 3, (0, "images are not cached")),
        "index": Task(index, members, "", 150_000, (0, "index of the shards is not kept")),
        "linear": Task(linear, classifier, "linear-run", 12_000, (74, "could not be")),
        "detect": Task(detect, detections, "detect-run", 0, (74, "could not be written")),
    }


# -- what is read


def coloured(number: int, side: int = 64) -> Image.Image:
    """Return an image whose colour gives its number, in 16 times 16 shades."""
    return Image.new("RGB", (side, side), (number % 16 * 16, number // 16 % 16 * 16, 128))


def make_folder(folder: Path, number: int) -> None:
    """Write photographs in two classes."""
    for each in range(number):
        file = folder / "ab"[each % 2] / f"{each:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        coloured(each).save(file)


def make_shards(folder: Path, shards: int, each: int, first: int = 0) -> str:
    """Write archives of images by number, from `first`; return the root that names them."""
    for shard in range(shards):
        numbers = range(first + shard * each, first + (shard + 1) * each)
        (folder / f"s-{shard:02}.tar").write_bytes(packed(numbers))
    return f"{folder}/s-{{00..{shards - 1:02}}}.tar"


def packed(numbers: range, side: int = 8) -> bytes:
    """Write an archive of these images, with their classes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in numbers:
            file = io.BytesIO()
            coloured(number, side).save(file, "PNG")
            for ending, data in (("png", file.getvalue()), ("cls", str(number % 3).encode())):
                info = tarfile.TarInfo(f"{number:05}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def make_cells(root: Path) -> None:
    """Write six images in VOC's layout with a coloured square each; two are for the test."""
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    for number in range(6):
        left, name = 5 + 3 * number, ("red", "blue")[number % 2]
        corners = {"xmin": left, "ymin": 6, "xmax": left + 14, "ymax": 24}
        box = "".join(f"<{key}>{value}</{key}>" for key, value in corners.items())
        (root / "Annotations" / f"cell{number}.xml").write_text(
            "<annotation><size><width>60</width><height>40</height></size><object>"
            f"<name>{name}</name><difficult>0</difficult><bndbox>{box}</bndbox></object></annotation>"
        )
        picture = Image.new("RGB", (60, 40), "white")
        picture.paste(name, tuple(corners.values()))
        picture.save(root / "JPEGImages" / f"cell{number}.jpg")
    names = [f"cell{number}\n" for number in range(6)]
    for split, part in (("train", names[:4]), ("test", names[4:])):
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text("".join(part))


def make_run(path: Path, backbone: str) -> None:
    """Write a run whose encoder was made without training."""
    config = tiny("moco-v2")
    config = replace(config, model=replace(config.model, backbone=backbone))
    torch.manual_seed(3)
    run = Run.create(path, config)
    run.write_encoder(build_backbone(backbone, config.data.channels).trunk, config)


# -- what is done, and what comes of it


def in_place(source: Path, place: Path, run: str) -> Path:
    """Return a copy of a run, made when it is first requested."""
    if not (place / run).exists():
        shutil.copytree(source / run, place / f".{run}")
        (place / f".{run}").rename(place / run)
    return place / run


def decode(source: Path, place: Path) -> None:
    """Decode a folder into a file of the cache, then read all images."""
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    config = DataConfig(root=str(source / "photos"), image_size=64, workers=0, cache="file")
    images = open_images(config).decode_once(epochs=True)
    note(source, place, [hash_of(images.image(row)) for row in range(len(images))])


def pixels(place: Path) -> object:
    """Return all images, and the file that has them."""
    files = sorted((place / "cache" / "hardmix").glob("images-*.pixels"))
    return answer(place), [hash_of_file(file) for file in files]


def index(source: Path, place: Path) -> None:
    """Index archives and list their images."""
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    root = f"{source}/s-{{00..{SHARDS - 1:02}}}.tar"
    assert len(expand(root)) == SHARDS
    images = open_shard_set(root, DataConfig(root=root, image_size=8, workers=0))
    assert images.labels is not None
    note(source, place, [list(images.files or ()), images.labels.tolist()])


def members(place: Path) -> object:
    """Return names and labels, and the file that has them."""
    files = sorted((place / "cache" / "hardmix").glob("shards-*"))
    return answer(place), [hash_of_file(each) for each in files if each.suffix != ".lock"]


def linear(source: Path, place: Path) -> None:
    """Train a classifier by a preset."""
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    cli.main(["linear", str(in_place(source, place, "linear-run")), *LINEAR])


def classifier(place: Path) -> object:
    """Return the result without times; the saved epochs are gone."""
    run = place / "linear-run"
    result = json.loads((run / "results" / "linear.json").read_text())
    return without_times(result), (run / "linear").exists()


def detect(source: Path, place: Path) -> None:
    """Train a detector."""
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    run = in_place(source, place, "detect-run")
    cli.main(["detect", str(run), "--task", "voc", "--data.root", str(source / "cells"), *DETECT])


def detections(place: Path) -> object:
    """Return the result without times, the detectors, and the lines of their training."""
    run = place / "detect-run"
    (file,) = (run / "results").glob("detection-*.json")
    found: list[object] = [without_times(json.loads(file.read_text()))]
    for trial in sorted((run / "detection").glob("*/trial-*")):
        newest = load_file(sorted((trial / "checkpoints").glob("step-*.safetensors"))[-1])
        found.append({name: hash_of(newest[name]) for name in sorted(newest)})
        found.append([without_times(line) for line in Run(trial).metrics()])
    return found


def without_times(value: object) -> object:
    """Return the values without those that differ between any two runs."""
    if isinstance(value, list):
        return [without_times(each) for each in value]
    if not isinstance(value, dict):
        return value
    left_out = ("seconds", "written", "command", "run", "versions")
    return {k: without_times(v) for k, v in value.items() if k not in left_out}


def hash_of(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's numbers and shape."""
    data = tensor.contiguous().numpy().tobytes() + repr(tuple(tensor.shape)).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def hash_of_file(file: Path) -> str:
    """Return a hash of a file's bytes."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def note(source: Path, place: Path, value: object) -> None:
    """Keep the answer of a job that writes none of its own, outside its disk."""
    (source / f"{place.name}.json").write_text(json.dumps(value))


def answer(place: Path) -> str:
    """Return a hash of the answer that `note` kept."""
    return hash_of_file(place.parent / "source" / f"{place.name}.json")


# -- kills


def marked(do, source, place):
    """Report that the task begins, and do it."""
    (source / "begun").write_text("")
    do(source, place)


def once(task, source, place, kill_after=None):
    """Do a task in a process, kill it some seconds after its start, and return (status, output)."""
    place.mkdir(exist_ok=True)
    begun, log = source / "begun", source / "log"
    begun.unlink(missing_ok=True)
    Path(f"{log}-0").unlink(missing_ok=True)
    (process,) = start(marked, task.do, source, place, ranks=1, output=log)
    while kill_after is not None and not begun.exists() and process.is_alive():
        time.sleep(0.002)
    process.join(120 if kill_after is None else kill_after)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, Path(f"{log}-0").read_text()


def kill_command(name, folder, number, generator, findings):
    """Kill a task in chains, and compare it with the undisturbed one."""
    folder.mkdir()
    source = folder / "source"
    task, killed, late, chains = tasks(source)[name], 0, 0, 0
    once(task, source, folder / "first")  # with all that is slow the first time
    status, shown = once(task, source, folder / "whole")
    takes = time.time() - (source / "begun").stat().st_mtime
    if status != 0:
        findings.append(f"the undisturbed one ends with {status}: {shown[-900:]}")
        return {"kills": 0}
    whole = task.result(folder / "whole")
    while killed < number and chains < 3 * number:
        place, chains, here, status = folder / f"{name}-{chains}", chains + 1, 0, None
        while status != 0 and here < min(CHAIN, number - killed):
            status, shown = once(task, source, place, generator.uniform(0, takes))
            here, late = here + (status == -9), late + (status == 0)
            if status not in (0, -9):
                findings.append(f"{status} after {here} kills: {shown[-900:]}")
        killed += here
        if status != 0:
            status, shown = once(task, source, place)
        if status != 0:
            findings.append(f"cannot be resumed, {status}: {shown[-900:]}")
        elif task.result(place) != whole:
            findings.append(f"ends unlike the undisturbed one after {here} kills")
        shutil.rmtree(place)
    return {"kills": killed, "chains": chains, "ended_before_the_kill": late}


# -- full disks


def mount(place: Path, size: str, again: str = "") -> None:
    """Mount a disk of this many bytes; `again` changes the size of a mounted one."""
    place.mkdir(exist_ok=True)
    options = f"{again}size={size}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)


def bytes_in(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def fill_command(name, folder, number, generator, findings):
    """Run a task on a disk that is full at a random byte of its writes; then let the disk grow."""
    folder.mkdir()
    if os.geteuid() != 0:
        return {"full_disks": 0, "skipped": "to mount a small disk needs root"}
    source = folder / "source"
    task, full = tasks(source)[name], 0
    once(task, source, folder / "whole")
    whole = task.result(folder / "whole")
    room = task.room or bytes_in(folder / "whole") - bytes_in(source / task.run)
    for turn in range(number):
        place = folder / f"disk-{turn}"
        mount(place, "1g")
        try:
            if task.run:
                in_place(source, place, task.run)
            disk = os.statvfs(place)
            taken = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            mount(place, str(taken + generator.randrange(4096, room)), "remount,")
            full += fill_once(task, source, place, findings, f"disk {turn}", whole)
        finally:
            subprocess.run(["umount", str(place)], check=True)
    return {"full_disks": full, "runs": number}


def fill_once(task, source, place, findings, title, whole):
    """Run a task on a small disk, then on one with room; return whether it was too small."""
    status, shown = once(task, source, place)
    words = " ".join(shown.split())
    expected, said = task.full
    refused = status == 2 and "cannot be written: No space left" in words  # before any work
    if not (status in (0, expected) or refused) or "Traceback" in shown:
        findings.append(f"{title}: full disk ends with {status}: {shown[-1500:]}")
    if status == expected != 0 and said not in words:
        findings.append(f"{title}: full disk is not said: {shown[-900:]}")
    if list(place.rglob(".*.tmp")):
        findings.append(f"{title}: half a file was left: {list(place.rglob('.*.tmp'))}")
    mount(place, "1g", "remount,")
    status, again = once(task, source, place)
    if status != 0:
        findings.append(f"{title}: {status} when there is room again: {again[-900:]}")
    elif task.result(place) != whole:
        findings.append(f"{title}: ends unlike the undisturbed one when there is room again")
    return refused or said in words
