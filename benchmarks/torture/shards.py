"""Archives that change while they are read; damaged and foreign indexes; damaged caches.

Whatever happens: the right image, or an error that names the archive; never another image.
"""

import os
import shutil
import threading
import time
import traceback
from pathlib import Path

from benchmarks.torture.commands import make_folder, make_shards, packed
from benchmarks.torture.damage import damaged
from hardmix.data import shards as shard_sets
from hardmix.data.image_files import UnreadableImage
from hardmix.data.shards import index_file, open_shard_set
from hardmix.data.sources import open_images
from hardmix.errors import InputError
from hardmix.runtime import console
from hardmix.settings.config import DataConfig
from hardmix.training.pretrain import pretrain
from ranks import start, state_of, tiny

SHARDS, EACH = 3, 32
OTHER = 128
"""Images of other archives begin at this number."""


def data_of(root: str, **more: object) -> DataConfig:
    """Number of workers: the images are read in this process."""
    return DataConfig(**({"root": root, "image_size": 8, "workers": 0, "cache": "off"} | more))


def number_of(image) -> int:
    """Return the number that an image tells by its colour (commands.coloured)."""
    return int(image[0, 0, 0]) // 16 + int(image[1, 0, 0]) // 16 * 16


def forget() -> None:
    """Close archives, as in a process that has just started."""
    for file in shard_sets._open.values():
        os.close(file)
    shard_sets._open.clear()


# -- archives that change


def truncate(file: Path, generator) -> None:
    """Cut an archive at any byte."""
    os.truncate(file, generator.randrange(file.stat().st_size))


def replace(file: Path, generator) -> None:
    """Put another archive in its place, by renaming."""
    new = file.with_suffix(".new")
    new.write_bytes(packed(range(OTHER, OTHER + generator.choice([EACH, EACH + 3]))))
    new.replace(file)


def repack(file: Path, generator) -> None:
    """Write other images into the same file; often of the same size to the byte."""
    file.write_bytes(packed(range(OTHER, OTHER + generator.choice([EACH, EACH, EACH - 5]))))


def remove(file: Path, _) -> None:
    """Delete it."""
    file.unlink()


CHANGES = {"truncated": truncate, "replaced": replace, "re-packed": repack, "removed": remove}


def change_shards(folder, number, generator, findings):
    """Change archives after they were indexed: every image is right, or named as unreadable."""
    folder.mkdir()
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    counts = dict.fromkeys(CHANGES, 0) | {"right": 0, "refused": 0}
    root = make_shards(folder, SHARDS, EACH)
    good = {each: Path(each).read_bytes() for each in shard_sets.expand(root)}
    for _ in range(number):
        for name, content in good.items():
            Path(name).write_bytes(content)
        forget()
        images = open_shard_set(root, data_of(root))
        if generator.random() < 0.5:
            images.image(generator.randrange(len(images)))  # so that an archive is open
        kind, victim = generator.choice(list(CHANGES)), Path(generator.choice(list(good)))
        CHANGES[kind](victim, generator)
        counts[kind] += 1
        for row in generator.sample(range(len(images)), 24):
            check_image(images, row, victim, counts, findings, kind)
        check_opening(root, victim, findings, kind)
    forget()
    return {"changes": number, **counts}


def check_image(images, row, victim, counts, findings, kind):
    """Check that the image is the right one, or named as unreadable."""
    try:
        found = number_of(images.image(row))
        counts["right"] += 1
        if found != row:
            findings.append(f"{kind}: image {row} was read as {found}")
    except UnreadableImage as error:
        counts["refused"] += 1
        if victim.name not in str(error):
            findings.append(f"{kind}: the error does not name {victim.name}: {error}")
    except Exception:
        findings.append(f"{kind}: {traceback.format_exc()[-600:]}")


def check_opening(root, victim, findings, kind):
    """Check that a new start indexes the current archives, or reports what is wrong with them."""
    forget()
    try:
        again = open_shard_set(root, data_of(root))
        names = [int(name.partition("!")[2][:5]) for name in again.files or ()]
        if [number_of(again.image(row)) for row in range(len(again))] != names:
            findings.append(f"{kind}: a new index names other images than it reads")
    except (InputError, UnreadableImage) as error:
        if victim.name not in str(error):
            findings.append(f"{kind}: the error does not name {victim.name}: {error}")
    except Exception:
        findings.append(f"{kind}: {traceback.format_exc()[-600:]}")


def rewrite_while_reading(folder, seconds, generator, findings):
    """Write other images into an archive, again and again in a thread, while others are read."""
    folder.mkdir()
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    root = make_shards(folder, 1, EACH)
    (name,) = shard_sets.expand(root)
    contents = [packed(range(EACH)), packed(range(OTHER, OTHER + EACH))]
    assert len(contents[0]) == len(contents[1])
    done = threading.Event()
    counts = {"right": 0, "refused": 0}

    def write():
        turn = 0
        while not done.is_set():
            turn += 1
            with open(name, "r+b") as file:
                file.write(contents[turn % 2])
            time.sleep(generator.uniform(0.02, 0.3))

    writer = threading.Thread(target=write)
    writer.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            images = open_shard_set(root, data_of(root))
        except InputError:
            continue
        named = [int(each.partition("!")[2][:5]) for each in images.files or ()]
        for row in range(len(images)):
            try:
                found = number_of(images.image(row))
                counts["right"] += 1
                if found != named[row]:
                    findings.append(f"rewritten: image {named[row]} was read as {found}")
            except UnreadableImage:
                counts["refused"] += 1
                break
    done.set()
    writer.join()
    forget()
    return {"reads": sum(counts.values()), **counts}


# -- while training


def watched(config, run, cache, wrong):
    """Train, and note every image that does not match its name."""
    os.environ["XDG_CACHE_HOME"] = cache
    read = shard_sets.read_member

    def checked(shards, name, *rest, **more):
        image = read(shards, name, *rest, **more)
        if number_of(image) != int(name.partition("!")[2][:5]):
            with open(wrong, "a") as out:
                out.write(f"{name} was read as {number_of(image)}\n")
        return image

    shard_sets.read_member = checked
    pretrain(config, run, resume="auto")


def train_on_shards(folder, number, generator, findings):
    """Change an archive during training: other images are never trained on.

    With the archive back in its place, the same command ends like an undisturbed run.
    """
    folder.mkdir()
    root = make_shards(folder, SHARDS, EACH)
    good = {each: (Path(each).read_bytes(), os.stat(each)) for each in shard_sets.expand(root)}
    config = tiny(
        data={"name": None, "root": root, "num_images": None, "workers": 0, "cache": "off"},
        train={"epochs": 8, "knn_every": 0, "verdict": False},
    )
    job = (config, folder / "whole", str(folder / "cache"), folder / "wrong")
    (process,) = start(watched, *job, ranks=1, output=folder / "whole.log")
    process.join(120)
    whole = state_of(folder / "whole")
    counts = {"changes": 0, **dict.fromkeys(CHANGES, 0), "trained_on": 0, "refused": 0}
    for turn in range(number):
        run, kind = folder / f"run-{turn}", list(CHANGES)[turn % len(CHANGES)]
        status, shown = train_once(run, job, kind, good, generator)
        counts["changes"] += 1
        counts[kind] += 1
        counts["trained_on" if status == 0 else "refused"] += 1
        named = any(Path(each).name in shown for each in good)
        if status not in (0, 2) or "Traceback" in shown or (status == 2 and not named):
            findings.append(f"{kind} while training: {status}: {shown[-900:]}")
        restore(good)
        job_again = (config, run, *job[2:])
        (process,) = start(watched, *job_again, ranks=1, output=f"{run}.again")
        process.join(120)
        if process.exitcode != 0 or state_of(run) != whole:
            words = Path(f"{run}.again-0").read_text()[-900:]
            findings.append(f"{kind}: restored, but ends with {process.exitcode}: {words}")
        shutil.rmtree(run)
    if (folder / "wrong").exists():
        findings.append(f"other images were read: {(folder / 'wrong').read_text()[:600]}")
    return counts


def train_once(run, job, kind, good, generator):
    """Train until the first checkpoints, change an archive, wait for the end."""
    config, _, cache, wrong = job
    (process,) = start(watched, config, run, cache, wrong, ranks=1, output=f"{run}.log")
    while process.is_alive() and not list(run.glob("checkpoints/step-*.json")):
        time.sleep(0.005)
    CHANGES[kind](Path(generator.choice(list(good))), generator)
    process.join(120)
    return process.exitcode, Path(f"{run}.log-0").read_text()


def restore(good):
    """Put the archives back, with their times."""
    for name, (content, state) in good.items():
        Path(name).write_bytes(content)
        os.utime(name, ns=(state.st_atime_ns, state.st_mtime_ns))


# -- damaged and foreign indexes, damaged caches


def damage_indexes(folder, number, generator, findings):
    """Damage an index, or take that of other archives: it is made anew, and members are right."""
    folder.mkdir()
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    (folder / "other").mkdir()
    other = make_shards(folder / "other", SHARDS, EACH, first=OTHER)
    root = make_shards(folder, SHARDS, EACH)
    shards = shard_sets._states(shard_sets.expand(root))
    right = shard_sets.make_index(shards)
    foreign = index_file(shard_sets._states(shard_sets.expand(other)))
    open_shard_set(other, data_of(other))
    file, kept, used = index_file(shards), 0, 0
    good = file.read_bytes()
    for turn in range(number):
        strange = foreign.read_bytes() if turn % 20 == 0 else damaged(good, generator)
        file.write_bytes(strange)
        try:
            found = shard_sets.read_index(shards)
            used += found is not None
            found = found or shard_sets.make_index(shards)
            same = list(found.names) == list(right.names)
            if not same or found.labels.tolist() != right.labels.tolist():
                findings.append(f"index {turn}: other members were taken")
            kept += file.read_bytes() != strange
        except Exception:
            findings.append(f"index {turn}: {traceback.format_exc()[-600:]}")
    return {"indexes": number, "made_anew": kept, "still_right": used}


def damage_caches(folder, number, generator, findings):
    """Damage a file of decoded images: this is noticed, and the pixels are always right."""
    folder.mkdir()
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    make_folder(folder / "photos", 24)
    console.speak_as(1)  # silent
    config = data_of(str(folder / "photos"), cache="file", image_size=64)
    right = [open_images(config).image(row) for row in range(24)]
    open_images(config).decode_once(epochs=True)
    (file,) = (folder / "cache" / "hardmix").glob("images-*.pixels")
    good = file.read_bytes()
    for turn in range(number):
        file.write_bytes(damaged(good, generator))
        try:
            images = open_images(config)
            images.decode_once(epochs=True)
            if any(not images.image(row).equal(each) for row, each in enumerate(right)):
                findings.append(f"cache {turn}: other pixels were taken")
        except Exception:
            findings.append(f"cache {turn}: {traceback.format_exc()[-600:]}")
    console.speak_as(0)
    return {"caches": number}
