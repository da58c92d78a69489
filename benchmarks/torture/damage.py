"""Files with flipped, cut or other bytes are used if they are right; otherwise they are named."""

import contextlib
import io
import shutil
import traceback

import torch
from PIL import Image

from hardmix.commands import main as cli
from hardmix.data.image_files import UnreadableImage, read_image
from hardmix.errors import InputError
from hardmix.runs.checkpoints import load_newest
from hardmix.runs.folder import Run, read_config
from hardmix.runtime import console
from hardmix.training.pretrain import pretrain
from ranks import tiny


def damaged(data, generator):
    """Return bytes with bits flipped, cut off, overwritten, inserted, or all gone."""
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
    """Check that damaged images give pixels, or one kind of error that names the file."""
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
    """Check that a whole older checkpoint is read, bit for bit, or an error names the file."""
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
    """Check that settings pass every check, or an error names the file or the setting."""
    folder.mkdir()
    run = Run.create(folder / "run", tiny())
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


def manifest_of(tensors):
    """Return the manifest of a checkpoint's tensors, which are named by step and content."""
    return tensors.with_name(f"{tensors.stem.rpartition('-')[0]}.json")


def damage_folders(folder, number, generator, findings):
    """Check that a command on a run with damaged or missing files ends without a traceback."""
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
        whole = [f for f in whole if f not in hurt and manifest_of(f) not in hurt]
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
