"""Kills and failures at chosen file calls, by a preloaded library (calls.c), with every method.

Calls are those that change files of the run: open for writing, write, fsync, rename, unlink, mkdir,
truncate. Processes of tests/support/ranks.py have the library once `preload` was called.
"""

import ctypes
import errno
import json
import os
import shutil
import subprocess
import traceback
from pathlib import Path

from hardmix.commands.exits import ending_of
from hardmix.runs.folder import Run
from hardmix.training.pretrain import pretrain
from killed_saves import kill_everywhere, saves_of
from ranks import start, state_of
from small_methods import EVERY, small

KILL = -1
"""Stands for a kill in place of the number of an error."""
ERRORS = [errno.EIO, errno.ESTALE, errno.EDQUOT, errno.ENOSPC]
CHAIN = 4
"""Kills of one run, which is then trained to its end and compared."""


def preload(folder: Path) -> bool:
    """Have processes that are started from now on count file calls; False without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return False
    library, source = folder / "calls.so", Path(__file__).with_suffix(".c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    os.environ["LD_PRELOAD"] = str(library)
    return True


def arm(folder: Path, call: int, fault: int) -> None:
    """Count calls below a folder from now on; the chosen one kills, or fails with an error."""
    ctypes.CDLL(None).torture_arm(os.fsencode(folder), call, fault)


# -- one save


def kill_saves(folder, number, generator, findings):
    """Kill every save of `number` methods at each of its file calls."""
    folder.mkdir()
    counts, chosen = {}, set(generator.sample(EVERY, min(number, len(EVERY))))
    for place, name in enumerate(each for each in EVERY if each in chosen):
        out = folder / f"{place}.json"
        (process,) = start(
            kill_saves_of, name, folder / f"{place}", out, ranks=1, output=f"{out}.log"
        )
        process.join(600)
        if process.exitcode != 0 or not out.exists():
            shown = Path(f"{out}.log-0").read_text()[-900:]
            findings.append(f"{name}: a save that was killed: {shown}")
            continue
        counts[name] = json.loads(out.read_text())
        shutil.rmtree(folder / f"{place}")
    return {"kills": sum(counts.values()), "methods": len(counts), "by_method": counts}


def kill_saves_of(name, folder, out):
    """Kill the first two saves of a run, and those of its two epochs' last steps.

    It saves before every step, and again after a measurement, an epoch, and new clusters.
    """
    folder.mkdir()
    train = {"save_minutes": 1e-9, "knn_every": 1, "verdict": False}
    saves = saves_of(small(name, mixed=name == "mochi", train=train), folder / "run")
    before, kills = Run(folder / "before"), 0
    before.path.mkdir()
    ends = {saves[-1][0] // 2, saves[-1][0]}  # of epochs, where a step is saved several times
    for index, save in enumerate(saves):
        if index < 2 or save[0] in ends:
            kills += kill_everywhere(before, save, folder, killed_at)
        before.save_checkpoint(*save)
    out.write_text(json.dumps(kills))


def killed_at(call, run, save):
    """Save in a process of its own, and return whether it was killed at that call."""
    child = os.fork()
    if child == 0:
        try:
            arm(run.path, call, KILL)
            run.save_checkpoint(*save)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -9), f"call {call}: ended with {status}"
    return status == -9


# -- whole runs


def config_of(name):
    """Return two epochs of three steps, saved before every step, with k-NN; MoCHi has a verdict."""
    train = {"save_minutes": 1e-9, "knn_every": 1, "verdict": name == "mochi"}
    return small(name, mixed=name == "mochi", train=train)


def go_on(name, run, call, fault, counted):
    """Start or resume, and end as the command does; note the number of file calls."""
    arm(run, call, fault)
    try:
        pretrain(config_of(name), run, resume="auto")
    except Exception as error:
        ending = ending_of(error)
        if ending is None:
            raise
        print(f"hardmix: {ending.message}", flush=True)
        raise SystemExit(ending.status) from error
    finally:
        calls = ctypes.CDLL(None).torture_count()
        arm(Path(), 0, 0)
        counted.write_text(str(calls))


def once(name, run, call=0, fault=0):
    """Return exit status and output of a run."""
    log = Path(f"{run}.log-0")
    log.unlink(missing_ok=True)
    job = (go_on, name, run, call, fault, Path(f"{run}.calls"))
    (process,) = start(*job, ranks=1, output=f"{run}.log")
    process.join(300)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, log.read_text()


def whole_run(name, folder, findings):
    """Return the state of an undisturbed run, and how many file calls it made."""
    run = folder / "whole"
    status, shown = once(name, run)
    if status != 0:
        findings.append(f"{name}: the undisturbed run ends with {status}: {shown[-900:]}")
    return end_of(run), int(Path(f"{run}.calls").read_text())


def end_of(run):
    """Return what must be equal at the end: the state, and the names of the files."""
    return state_of(run), {str(file.relative_to(run)) for file in run.rglob("*") if file.is_file()}


def finish(name, run, whole, findings, title, *, all_saved=True):
    """Resume undisturbed; the end must be that of the undisturbed run.

    Without `all_saved`, a checkpoint may be missing: an older one was then kept in its place.
    """
    status, shown = once(name, run)
    if status != 0:
        findings.append(f"{title}: cannot be finished, {status}: {shown[-900:]}")
        return
    (state, files), (whole_state, whole_files) = end_of(run), whole
    if state != whole_state:
        findings.append(f"{title}: ends unlike the undisturbed run")
    apart = {each for each in files ^ whole_files if all_saved or "checkpoints/step-" not in each}
    if apart or any(each.endswith(".tmp") for each in files):
        findings.append(f"{title}: ends with other files: {sorted(apart)}")


def kill_runs(folder, number, generator, findings):
    """Kill a run of every method at file calls, resume it, kill it again, compare the end."""
    folder.mkdir()
    kills, calls_of = 0, {}
    for index, name in enumerate(EVERY):
        place = folder / f"{index}"
        place.mkdir()
        whole, calls = whole_run(name, place, findings)
        calls_of[name] = calls
        wanted = number * (index + 1) // len(EVERY) - number * index // len(EVERY)
        run, chain = place / "run-0", 0
        for turn in range(wanted):
            call = generator.randint(1, calls if chain == 0 else calls // 2)
            status, shown = once(name, run, call, KILL)
            kills, chain = kills + (status == -9), chain + 1
            if status not in (0, -9):
                findings.append(f"{name}: killed at call {call}, then {status}: {shown[-900:]}")
            if chain == CHAIN or turn + 1 == wanted:
                finish(name, run, whole, findings, f"{name}, {chain} kills")
                run, chain = place / f"run-{turn + 1}", 0
        shutil.rmtree(place)
    return {"kills": kills, "methods": len(EVERY), "file_calls_of_a_run": calls_of}


def fail_runs(folder, number, generator, findings):
    """Fail a file call once with an error of a disk; then finish the run and compare."""
    folder.mkdir()
    statuses, failed = {}, 0
    for index, name in enumerate(EVERY):
        place = folder / f"{index}"
        place.mkdir()
        whole, calls = whole_run(name, place, findings)
        for turn in range(index, number, len(EVERY)):
            fault, call = ERRORS[turn // len(EVERY) % len(ERRORS)], generator.randint(1, calls)
            run = place / f"run-{turn}"
            status, shown = once(name, run, call, fault)
            word = f"{errno.errorcode[fault]}: status {status}"
            statuses[word] = statuses.get(word, 0) + 1
            failed += 1
            title = f"{name}, {errno.errorcode[fault]} at call {call} of {calls}"
            if status not in (0, 2, 74) or "Traceback" in shown:
                findings.append(f"{title}: {status}: {shown[-1500:]}")
            finish(name, run, whole, findings, title, all_saved=False)
            shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(place)
    return {"failed_calls": failed, "methods": len(EVERY), **dict(sorted(statuses.items()))}
