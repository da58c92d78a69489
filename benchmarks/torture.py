"""Kills, damage and full disks: nothing good may be lost. `make torture`, about ten minutes.

Writes torture.json beside this file: what was done, and what was found. Any finding ends it with
status 1. Needs the tests' folder, whose processes (ranks.py) it uses.
"""

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

import torch  # noqa: E402
from PIL import Image  # noqa: E402

from hardmix.commands import main as cli  # noqa: E402
from hardmix.data.image_files import UnreadableImage, read_image  # noqa: E402
from hardmix.errors import InputError  # noqa: E402
from hardmix.runs.checkpoints import load_newest  # noqa: E402
from hardmix.runs.folder import Run, versions  # noqa: E402
from hardmix.runtime import console  # noqa: E402
from hardmix.settings.saved import read_config  # noqa: E402
from hardmix.training.pretrain import pretrain  # noqa: E402
from ranks import start, state_of, tiny  # noqa: E402

KILLS = {
    "SIGKILL rank 0": (signal.SIGKILL, (0,)),
    "SIGKILL rank 1": (signal.SIGKILL, (1,)),
    "SIGKILL both": (signal.SIGKILL, (0, 1)),
    "SIGTERM rank 0": (signal.SIGTERM, (0,)),
    "SIGTERM rank 1": (signal.SIGTERM, (1,)),
    "SIGTERM both": (signal.SIGTERM, (0, 1)),
    "SIGUSR1 both": (signal.SIGUSR1, (0, 1)),
}
TIMEOUT = 5.0
CHAIN = 6
"""Kills of one run, which is then trained to its end and compared."""


def config():
    """Five epochs of six steps, saved about three times a second besides."""
    return tiny(train={"epochs": 5, "log_every": 2, "save_minutes": 0.005, "timeout": TIMEOUT})


def go_on(run):
    """Start or go on; what every process of a chain does."""
    pretrain(config(), run, resume="auto")


def main() -> None:
    """Everything, within bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=54)
    parser.add_argument("--images", type=int, default=1600)
    parser.add_argument("--files", type=int, default=500, help="checkpoints, and as many configs")
    parser.add_argument("--folders", type=int, default=80)
    parser.add_argument("--disks", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = random.Random(options.seed)
    findings: list[str] = []
    result: dict[str, object] = {"versions": versions(), "seed": options.seed}
    with tempfile.TemporaryDirectory(prefix="torture-") as name:
        folder = Path(name)
        for part, number in (
            (kill_processes, options.kills),
            (damage_images, options.images),
            (damage_checkpoints, options.files),
            (damage_configs, options.files),
            (damage_folders, options.folders),
            (fill_disks, options.disks),
        ):
            started, before = time.monotonic(), len(findings)
            counts = part(folder / part.__name__, number, generator, findings)
            result[part.__name__] = {
                **counts,
                "findings": len(findings) - before,
                "seconds": round(time.monotonic() - started, 1),
            }
            print(part.__name__, json.dumps(result[part.__name__]), flush=True)
    result["findings"] = findings
    (HERE / "torture.json").write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(findings) or "Nothing good was lost.")
    sys.exit(bool(findings))


def kill_processes(folder, number, generator, findings):
    """Two processes, killed at random moments from their start on, resumed, compared at the end."""
    folder.mkdir()
    finish(folder / "whole", findings)
    whole, counts = state_of(folder / "whole"), dict.fromkeys(KILLS, 0)
    slowest = done = chains = 0
    while done < number:
        run = folder / f"chain-{chains}"
        for _ in range(min(CHAIN, number - done)):
            kind = generator.choice(list(KILLS))
            slowest = max(slowest, kill_once(run, kind, generator.uniform(0, 2.5), findings))
            counts[kind] += 1
            done += 1
        finish(run, findings)
        if state_of(run) != whole:
            findings.append(f"{run.name}: ends unlike the unbroken run")
        shutil.rmtree(run)
        chains += 1
    return {"kills": done, **counts, "chains": chains, "slowest_end": round(slowest, 1)}


def kill_once(run, kind, after, findings):
    """Returns how long the processes took to end after the signal."""
    signal_number, victims = KILLS[kind]
    processes = start(go_on, run, timeout=TIMEOUT, output=f"{run}.log")
    time.sleep(after)
    struck = time.monotonic()
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[victim].pid, signal_number)
    for process in processes:
        process.join(10 * TIMEOUT)
        if process.is_alive():
            findings.append(f"{run.name}: {kind} after {after:.2f} s left a process hanging")
            process.kill()
            process.join()
    statuses = [process.exitcode for process in processes]
    if not set(statuses) <= {0, 75, -signal_number}:
        shown = Path(f"{run}.log-0").read_text()[-2000:]
        findings.append(f"{run.name}: {kind} after {after:.2f} s ends with {statuses}: {shown}")
    return time.monotonic() - struck


def finish(run, findings):
    """Train to the end without being disturbed."""
    processes = start(go_on, run, timeout=60.0, output=f"{run}.log")
    for process in processes:
        process.join(300)
    statuses = [process.exitcode for process in processes]
    if statuses != [0, 0]:
        shown = Path(f"{run}.log-0").read_text()[-2000:]
        findings.append(f"{run.name}: could not be finished {statuses}: {shown}")


def damaged(data, generator):
    """Bytes with bits flipped, cut off, overwritten, put in, or all gone."""
    data = bytearray(data)
    match generator.randrange(5):
        case 0:
            for _ in range(generator.randint(1, 8)):
                data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        case 1:
            del data[generator.randrange(len(data)) :]
        case 2:
            first = generator.randrange(len(data))
            data[first : first + 40] = generator.randbytes(min(40, len(data) - first))
        case 3:
            data[generator.randrange(len(data)) : 0] = generator.randbytes(generator.randint(1, 60))
        case 4:
            data = bytearray(generator.randbytes(generator.randint(0, 200)))
    return bytes(data)


def damage_images(folder, number, generator, findings):
    """Either pixels or one kind of error that names the file."""
    folder.mkdir()
    sources = []
    for ending, mode in (
        ("png", "RGB"),
        ("jpg", "RGB"),
        ("png", "P"),
        ("gif", "P"),
        ("bmp", "RGB"),
    ):
        buffer = io.BytesIO()
        image = Image.frombytes("RGB", (40, 30), generator.randbytes(40 * 30 * 3)).convert(mode)
        image.save(buffer, {"jpg": "JPEG"}.get(ending, ending.upper()))
        sources.append((ending, buffer.getvalue()))
    refused = 0
    for index in range(number):
        ending, data = sources[index % len(sources)]
        file = folder / f"{index}.{ending}"
        file.write_bytes(damaged(data, generator))
        try:
            read_image(file, 3)
        except UnreadableImage as error:
            refused += 1
            if file.name not in str(error):
                findings.append(f"the error of {file.name} does not name it: {error}")
        except Exception:
            findings.append(f"{file.name}: {traceback.format_exc()[-600:]}")
        file.unlink()
    return {"images": number, "refused": refused}


def damage_checkpoints(folder, number, generator, findings):
    """A whole older one, bit for bit, or words; never a wrong one."""
    run = Run(folder)
    folder.mkdir()
    weights = {step: torch.randn(200) for step in (10, 20)}
    for step, values in weights.items():
        run.save_checkpoint(step, {"weights": values}, {"note": step})
    good = {file.name: file.read_bytes() for file in run.checkpoints.iterdir()}
    older = 0
    for _ in range(number):
        for name in generator.sample(sorted(good), generator.choice([1, 1, 1, 2])):
            (run.checkpoints / name).write_bytes(damaged(good[name], generator))
        try:
            found = load_newest(run.checkpoints)
            older += found.manifest["step"] == 10
            if not torch.equal(found.tensors["weights"], weights[found.manifest["step"]]):
                findings.append(f"a damaged checkpoint was taken: {found.manifest}")
        except InputError:
            pass
        except Exception:
            findings.append(f"checkpoint: {traceback.format_exc()[-600:]}")
        shutil.rmtree(run.checkpoints)
        run.checkpoints.mkdir()
        for name, data in good.items():
            (run.checkpoints / name).write_bytes(data)
    return {"checkpoints": number, "older_used": older}


def damage_configs(folder, number, generator, findings):
    """Settings that pass every check, or words that name the file or the setting."""
    folder.mkdir()
    run = Run.create(folder / "run", config())
    good = run.config_file.read_bytes()
    words = ["null", "-1", "1e999", "NaN", "[]", "{}", '"x"', "true", "0", "99999999999"]
    refused = 0
    for index in range(number):
        text = damaged(good, generator)
        if index % 2:
            lines = good.decode().splitlines()
            where = generator.randrange(1, len(lines) - 1)
            name, colon, _ = lines[where].partition(":")
            lines[where] = (
                f"{name}{colon} {generator.choice(words)}{',' * lines[where].endswith(',')}"
            )
            text = "\n".join(lines).encode()
        run.config_file.write_bytes(text)
        try:
            read_config(run.config_file)
        except InputError:
            refused += 1
        except Exception:
            findings.append(f"config: {traceback.format_exc()[-600:]}")
    return {"configs": number, "refused": refused}


def damage_folders(folder, number, generator, findings):
    """The command on a run of which any files are damaged or gone: a status, and no traceback."""
    folder.mkdir()
    small = tiny("moco-v2", train={"epochs": 2, "knn_every": 0})
    console.speak_as(1)  # silent
    pretrain(small, folder / "good")
    statuses: dict[int, int] = {}
    for index in range(number):
        run = folder / f"{index}"
        shutil.copytree(folder / "good", run)
        files = sorted(file for file in run.rglob("*") if file.is_file())
        hurt = generator.sample(files, generator.randint(1, 3))
        for file in hurt:
            if generator.random() < 0.3:
                file.unlink()
            else:
                file.write_bytes(damaged(file.read_bytes() or b" ", generator))
        # Weights that are whole, and whose manifest is: these must never go.
        whole = [f for f in files if f.suffix == ".safetensors" and f.parent.name == "checkpoints"]
        whole = [f for f in whole if f not in hurt and f.with_suffix(".json") not in hurt]
        others = {file: file.read_bytes() for file in whole}
        shown = io.StringIO()
        command = ["pretrain", "--out", str(run), "--resume", "--train.epochs", "2"]
        with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
            try:
                cli.main(command)
            except SystemExit as end:
                status = end.code or 0
        statuses[status] = statuses.get(status, 0) + 1
        if status not in (0, 2) or "Traceback" in shown.getvalue():
            findings.append(f"folder {[f.name for f in hurt]}: {status} {shown.getvalue()[-900:]}")
        for file, data in others.items():
            if not file.exists() or file.read_bytes() != data:
                findings.append(f"folder {[f.name for f in hurt]}: the good {file.name} is lost")
        shutil.rmtree(run)
    console.speak_as(0)
    return {"folders": number, **{f"status_{name}": n for name, n in sorted(statuses.items())}}


def fill_disk(run, which, limit):
    """The disk is full at `limit` bytes of the save number `which`, and has room again after."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    save, count = Run.save_checkpoint, [0]

    def limited(self, *arguments):
        count[0] += 1
        if count[0] == which:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            return save(self, *arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    Run.save_checkpoint = limited  # type: ignore[method-assign]
    go_on(run)


def fill_disks(folder, number, generator, findings):
    """Each run goes on, ends as the unbroken one, and has only whole checkpoints."""
    folder.mkdir()
    console.speak_as(1)
    pretrain(config(), folder / "whole")
    whole, warned, tried = state_of(folder / "whole"), 0, 0
    while warned < number and tried < 3 * number:  # a save of the same step writes no weights
        index, tried = tried, tried + 1
        run, limit = folder / f"{index}", generator.randrange(6_400_000)
        which = generator.randint(1, 5)
        (process,) = start(fill_disk, run, which, limit, ranks=1, output=f"{run}.log")
        process.join(120)
        shown = Path(f"{run}.log-0").read_text()
        warned += "no checkpoint at step" in shown
        if process.exitcode != 0:
            findings.append(f"full disk: ended with {process.exitcode}: {shown[-900:]}")
        elif load_newest(Run(run).checkpoints).broken or state_of(run) != whole:
            findings.append(f"full disk at {limit} bytes of save {which}: not as the unbroken run")
        if list(run.rglob(".*.tmp")):
            findings.append("full disk: half a file was left")
        shutil.rmtree(run)
    console.speak_as(0)
    return {"full_disks": warned, "runs": tried}


if __name__ == "__main__":
    main()
