"""Odd files in every place of a run: pipes, devices, bombs, other kinds of values, names of code.

A command on such a run ends soon, with a status and a sentence, in little memory; it executes
nothing that a file asks for, and changes no checkpoint.
"""

import contextlib
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import tarfile
import threading
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from benchmarks.torture.commands import coloured, make_folder
from hardmix.commands import main as cli
from hardmix.runs.folder import Run
from hardmix.runs.weight_files import pack_safetensors, read_safetensors
from hardmix.training.pretrain import pretrain
from ranks import start, tiny

MOST_SECONDS = 90
MOST_BYTES = 2 * 2**30
"""Limit on a command with its children; on whole files it takes about a third of it."""
CHECKPOINTS = "checkpoints"
VALUES = [None, -1, 2**31, 2**63, 10**400, float("inf"), float("nan"), "x", "\ud800", [], {}, True]


# -- what is put in the place of a file


def fifo(file, _, __):
    """Make a pipe that nobody writes to."""
    os.mkfifo(file)


def zero(file, _, __):
    """Make a link to a device without end."""
    file.symlink_to("/dev/zero")


def loop(file, _, __):
    """Make a link to itself."""
    file.symlink_to(file.name)


def subfolder(file, _, __):
    """Make a folder of the same name."""
    file.mkdir()


def empty(file, _, __):
    """Write an empty file."""
    file.write_bytes(b"")


def sparse(file, _, __):
    """Write many gigabytes that take no room."""
    with file.open("wb") as out:
        out.truncate(2**36)


def no_text(file, _, generator):
    """Write bytes that are not UTF-8."""
    file.write_bytes(b"\xff\xfe\x80" + generator.randbytes(3000))


def nested(file, _, __):
    """Write brackets without end."""
    file.write_text("[" * 300_000)


def bomb(file, _, __):
    """Write two gigabytes of zeros in two megabytes."""
    file.write_bytes(gzip.compress(bytes(2**26)) * 32)


def long(file, data, _):
    """Repeat the same lines for some hundred megabytes."""
    part = (data or b"x") * max(1, 2**20 // max(1, len(data)))
    with file.open("wb") as out:
        for _ in range(max(1, 2**28 // len(part))):
            out.write(part)


def other_value(file, data, generator):
    """Change the type of one value of JSON, or of each line of it; otherwise change a byte."""
    value = generator.choice(VALUES)
    lines = data.decode("utf-8", "replace").splitlines() if file.suffix == ".jsonl" else [data]
    try:
        changed = [json.dumps(_changed(json.loads(line), value, generator)) for line in lines]
        file.write_text("\n".join(changed) + "\n")
    except ValueError:
        place = generator.randrange(max(1, len(data)))
        file.write_bytes(data[:place] + b"\xff" + data[place + 1 :])


def _changed(content, value, generator):
    """Return the content with one value replaced, at any depth."""
    places = []
    if isinstance(content, dict | list):
        places = list(content) if isinstance(content, dict) else list(range(len(content)))
    if not places or generator.random() < 0.1:
        return value
    place = generator.choice(places)
    content[place] = _changed(content[place], value, generator)
    return content


KINDS = {
    each.__name__: each
    for each in (
        *(fifo, zero, loop, subfolder, empty, sparse, no_text, nested, bomb, long, other_value),
    )
}
COMMANDS = {
    "report": ["report", "{run}", "--out", "{out}/report.html"],
    "knn": ["knn", "{run}"],
    "pretrain": ["pretrain", "--out", "{run}", "--resume", "--train.epochs", "2"],
    "analyze": ["analyze", "{run}"],
    "explore": ["explore", "{run}", "--out", "{out}/explore.html"],
    "import": ["import", "{run}/encoder.safetensors", "--out", "{out}/imported"],
    "watch": ["watch", "{run}", "--port", "0"],
}


def make_run(folder):
    """Make a finished run on a folder of images, evaluated and drawn."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    make_folder(folder / "photos", 96)
    data = {"name": None, "root": str(folder / "photos"), "num_images": None, "workers": 0}
    run = folder / "good"
    pretrain(tiny("moco-v2", data=data), run)
    for command in (["knn", str(run)], ["analyze", str(run)]):
        with contextlib.suppress(SystemExit):
            cli.main(command)
    (run / "fitting.json").write_text('{"chosen": {}}\n')
    (run / "profile.json").write_text('{"steps": 1, "parts": {}}\n')


def odd_files(folder, number, generator, findings):
    """Put odd things into places of a run, and call a command on it: `number` such pairs."""
    folder.mkdir()
    (process,) = start(make_run, folder, ranks=1, output=folder / "make.log")
    process.join(300)
    if process.exitcode != 0:
        findings.append(f"no run to begin with: {(folder / 'make.log-0').read_text()[-900:]}")
        return {"odd_files": 0}
    good, words = folder / "good", itertools.cycle(COMMANDS)
    places = sorted(str(file.relative_to(good)) for file in good.rglob("*") if file.is_file())
    pairs = list(itertools.product(places, KINDS))
    generator.shuffle(pairs)
    counts, peak, slowest = {"odd_files": 0, "places": len(places), "kinds": len(KINDS)}, 0, 0.0
    for index, (place, kind) in enumerate(pairs[:number]):
        run, name = folder / f"run-{index}", next(words)
        shutil.copytree(good, run)
        data = (run / place).read_bytes()
        (run / place).unlink()
        KINDS[kind](run / place, data, generator)
        title = f"{name}, {kind} as {place}"
        status, used, seconds = watch_command(folder, run, name, title, findings)
        key = f"status_{status}"
        counts[key], counts["odd_files"] = counts.get(key, 0) + 1, index + 1
        peak, slowest = max(peak, used), max(slowest, seconds)
        shutil.rmtree(run)
    bounds = {"peak_mb": round(peak / 1e6), "slowest_seconds": round(slowest, 1)}
    return {**dict(sorted(counts.items())), **bounds}


def watch_command(folder, run, name, title, findings):
    """Return status, most memory and seconds of a command on a run, and note findings."""
    kept = intact(run)
    words = [word.format(run=run, out=folder / "out") for word in COMMANDS[name]]
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    status, _, peak, seconds = watched(folder, words, title, findings)
    lost = [file.name for file, digest in kept.items() if hashed(file) != digest]
    if lost and name != "pretrain":  # which saves others
        findings.append(f"{title}: {lost} changed")
    return status, peak, seconds


def watched(folder, words, title, findings):
    """Return status, output, most memory and seconds of a command, ended beyond the bounds."""
    log = folder / "command.log"
    Path(f"{log}-0").unlink(missing_ok=True)
    (process,) = start(command, folder, words, ranks=1, output=log)
    started, peak = time.monotonic(), 0
    while process.is_alive():
        process.join(0.05)
        peak = max(peak, memory_of(process.pid))
        late = time.monotonic() - started > MOST_SECONDS
        if late or peak > MOST_BYTES:
            findings.append(f"{title}: {'hangs' if late else f'takes {peak / 1e9:.1f} GB'}")
            process.kill()
            process.join()
    shown = Path(f"{log}-0").read_text(errors="replace")
    if process.exitcode not in (0, 2, 74, -9) or "Traceback" in shown:
        findings.append(f"{title}: {process.exitcode}: {shown[-1200:]}")
    if (folder / "executed").exists():
        findings.append(f"{title}: something was executed")
        (folder / "executed").unlink()
    return process.exitcode, shown, peak, time.monotonic() - started


def command(folder, words):
    """Start the command from the folder above the run."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.chdir(folder)
    if words[0] == "watch":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
        threading.Thread(target=ask_for_page, args=[folder / "command.log-0"], daemon=True).start()
    cli.main(words)


def ask_for_page(log):
    """Ask for the page at the printed address, as a browser does; then stop watching."""
    while not (address := re.search(r"http://\S+/", log.read_text(errors="replace"))):
        time.sleep(0.05)
    try:
        with urlopen(address[0], timeout=MOST_SECONDS) as answer:
            print(f"The page has {len(answer.read())} bytes.", flush=True)
    except HTTPError as error:
        print(f"{error.code}: {error.read().decode()}", flush=True)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def memory_of(process):
    """Return the bytes of a process and those of its children that still exist."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(memory_of(int(child)) for child in children)


def intact(run):
    """Return the checkpoints that are regular files of a usual size, by their digests."""
    files = (run / CHECKPOINTS).iterdir()
    usual = (f for f in files if f.is_file() and not f.is_symlink() and f.stat().st_size < 2**28)
    return {file: hashed(file) for file in usual}


def hashed(file):
    """Return a hash of a file's bytes; None if it is gone."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


# -- names of code and commands in files


PAYLOAD = """import pathlib
pathlib.Path({mark!r}).touch()
def make(*_, **__):
    raise RuntimeError
"""
NAMES = {
    "model.backbone": ["downloaded.code:make", "code:make", "run.code:make", "pathlib:Path"],
    "data.views": ["downloaded.code:make", "code:make"],
    "mix.strategy": ["downloaded.code:make", "code:make"],
    "data.root": ["pipe:touch {mark}", "pipe:touch {mark}; cat x.tar"],
    "data.test": ["pipe:touch {mark}"],
    "model.init": ["{run}/code.py", "pipe:touch {mark}"],
}


def names_of_code(folder, number, generator, findings):
    """Check that nothing is executed if a run names code or a command that lies beside it."""
    folder.mkdir()
    (process,) = start(make_run, folder, ranks=1, output=folder / "make.log")
    process.join(300)
    mark, counts = folder / "executed", {"runs_with_names_of_code": 0}
    pairs = [(name, text) for name, texts in NAMES.items() for text in texts]
    cases = list(itertools.product(pairs, COMMANDS))
    for (name, text), words in generator.sample(cases, min(number, len(cases))):
        run = folder / "downloaded"
        shutil.copytree(folder / "good", run)
        for place in (run, run / "results", folder):
            for module in ("code.py", "hardmix.py"):
                (place / module).write_text(PAYLOAD.format(mark=str(mark)))
        put_name(Run(run), name, text.format(mark=mark, run=run))
        title = f"{words}, {name}={text}"
        status, _, _ = watch_command(folder, run, words, title, findings)
        counts["runs_with_names_of_code"] += 1
        counts[f"status_{status}"] = counts.get(f"status_{status}", 0) + 1
        shutil.rmtree(run)
    return {"cases": len(cases), **dict(sorted(counts.items()))}


def put_name(run, name, text):
    """Write the name into config.json, and a backbone's into the encoder too."""
    content, (group, field) = json.loads(run.config_file.read_text()), name.split(".")
    content[group][field] = text
    run.config_file.write_text(json.dumps(content))
    if field == "backbone":
        read = read_safetensors(run.encoder_file)
        run.encoder_file.write_bytes(pack_safetensors(read.tensors, {**read.facts, field: text}))


# -- shards from elsewhere


def tar_of(members):
    """Write an archive of these files; a number is a size without the bytes."""
    out = io.BytesIO()
    for name, content in members.items():
        info = tarfile.TarInfo(name)
        info.size = content if isinstance(content, int) else len(content)
        data = b"" if isinstance(content, int) else content + bytes(-len(content) % 512)
        out.write(info.tobuf(tarfile.GNU_FORMAT) + data)
    return out.getvalue() + bytes(10240)


def bomb_of(size):
    """Write a compressed archive with an image of this many zeros."""
    out = gzip.compress(tar_of({"x.png": size})[:512])
    return out + gzip.compress(bytes(2**26)) * (size // 2**26) + gzip.compress(bytes(10240))


def hostile_shards(folder, number, generator, findings):
    """Check that archives and roots that would take all memory end in a sentence, in little."""
    folder.mkdir()
    image = io.BytesIO()
    coloured(7).save(image, "PNG")
    png = image.getvalue()
    long_name = tarfile.TarInfo("x")
    long_name.size, long_name.type = 2**33, tarfile.GNUTYPE_LONGNAME
    files = {
        "label-20.tar": tar_of({"x.png": png, "x.cls": b"9" * 20}),
        "label-2e9.tar": tar_of({"x.png": png, "x.cls": b"2000000000"}),
        "label-long.tar": tar_of({"x.png": png, "x.cls": b"7" * 100_000}),
        "size.tar": tar_of({"x.png": 2**60}),
        "negative.tar": tar_of({"x.png": -512}),
        "header.tar": long_name.tobuf(tarfile.GNU_FORMAT) + bytes(10240),
        "bomb.tar.gz": bomb_of(2**33),
    }
    roots = ["s-{000000000..999999999}.tar", "{a,b}" * 60 + ".tar", "{0..9}" * 60 + ".tar.gz"]
    roots += ["{" * 5000 + "}" * 5000 + ".tar", "{{0..9999},{0..9999}}{0..9999}.tar.gz"]
    for name, content in files.items():
        (folder / name).write_bytes(content)
    cases = [*(str(folder / name) for name in files), *(f"{folder}/{root}" for root in roots)]
    cases += [f"pipe:cat {folder / name}" for name in files]
    cases, peak = generator.sample(cases, min(number, len(cases))), 0
    for index, root in enumerate(cases):
        words = ["pretrain", "demo", "--data.name", "shards", "--data.root", root, *SHARD_SETTINGS]
        words += ["--out", str(folder / f"run-{index}")]
        title = f"shards {root[-60:]}"
        status, shown, used, _ = watched(folder, words, title, findings)
        peak = max(peak, used)
        if status != 2:
            findings.append(f"{title}: ends with {status}: {shown[-600:]}")
    return {"hostile_shards": len(cases), "peak_mb": round(peak / 1e6)}


SHARD_SETTINGS = [
    *("--data.num-images", "48", "--data.workers", "0", "--train.batch-size", "16"),
    *("--train.queue-size", "32", "--mix.num-hardest", "16", "--train.epochs", "1"),
]
