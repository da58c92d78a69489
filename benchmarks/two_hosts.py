"""Two hosts on one machine: cut cables, lost hosts and restarts. `python benchmarks/two_hosts.py`.

Each host is a network namespace with its own name and its own /etc/hosts; a bridge in a third one
is the switch between them. Torchrun starts one process on each. Writes results/two-hosts.json
after every case; a case that does not end as docs/scaling.md promises makes the exit status 1.
Needs root and Linux; about ten minutes. No packet leaves the namespaces.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "two-hosts.json"
sys.path.insert(0, str(HERE.parent / "tests" / "support"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hardmix.runs.folder import versions  # noqa: E402
from ranks import state_of  # noqa: E402

TIMEOUT = 10
"""train.timeout, in seconds."""
ADDRESSES = {"a": "10.83.25.1", "b": "10.83.25.2"}
"""Host a has rank 0, and torchrun's meeting point."""
CABLE = "cable0"
SETTINGS = (
    "--data.num-images 96 --data.image-size 32 --train.batch-size 16 --train.queue-size 64"
    " --mix.num-hardest 16 --mix.num-pairs 8 --mix.num-with-query 4 --train.epochs 15"
    " --train.knn-every 0 --train.no-verdict --train.device cpu --train.log-every 3"
    f" --train.timeout {TIMEOUT} --resume auto"
)


class Outcome(NamedTuple):
    """The outcome of a case."""

    ok: bool
    seen: str
    seconds: float
    """Time from the fault to the end of the processes that had to notice it."""


class Job:
    """Torchrun on one host; its output goes to a file."""

    def __init__(self, hosts: "Hosts", host: str, run: Path, restarts: int, more: dict[str, str]):
        self.hosts, self.host, self.rank = hosts, host, 0
        self.output = run.with_name(f"{run.name}-{host}-{time.monotonic_ns()}.log")
        inside = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        inside += ["--nproc-per-node", "1", "--max-restarts", str(restarts)]
        inside += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.name('a')}:29500"]
        inside += ["-m", "hardmix", "--", "pretrain", "demo", "--out", str(run), *SETTINGS.split()]
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', hosts.name(host)]
        command = ["ip", "netns", "exec", hosts.name(host), *named, *inside]
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | more
            )

    def wait(self, seconds: float = 400.0) -> int | None:
        """Return torchrun's exit status; None if it is still running after so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    @property
    def text(self) -> str:
        """Its output so far, in one line."""
        shown = self.output.read_text(errors="replace").replace(sys.executable, "python")
        return " ".join(shown.split())

    @property
    def told(self) -> str:
        """The end of hardmix's output, without torchrun's own traceback."""
        return self.text.partition("Traceback (most recent call last)")[0][-1200:]

    def find_rank(self) -> None:
        """Remember the process that trains."""
        for process in self.hosts.processes(self.host):
            with suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes()
                if b"hardmix" in words and b"torch.distributed.run" not in words:
                    self.rank = process

    def wait_for_rank(self, seconds: float = 400.0) -> int | None:
        """Return the exit status of the rank, also where torchrun is too busy to look at it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                state = Path(f"/proc/{self.rank}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # torchrun has looked, and says it in the end
                self.wait(end - time.monotonic())
                return self.statuses[0] if self.statuses else None
            if state[0] == "Z":
                return int(state[-1]) >> 8
            time.sleep(0.05)
        return None

    @property
    def statuses(self) -> list[int]:
        """Return the exit statuses of its rank, as torchrun lists them."""
        return [int(found) for found in re.findall(r"exitcode\s*: (-?\d+)", self.text)]


class Hosts:
    """Namespaces a and b, and the switch between them."""

    def __init__(self) -> None:
        self.names = {part: f"hm{os.getpid()}-{part}" for part in ("a", "b", "switch")}

    def name(self, host: str) -> str:
        """Return the name of a host and of its namespace."""
        return self.names[host]

    def build(self) -> None:
        """Make the namespaces and plug in the cables."""
        for name in self.names.values():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        switch = self.name("switch")
        ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge0", "up")
        for host, address in ADDRESSES.items():
            peer = ("peer", "name", f"port-{host}", "netns", switch)
            ip("-n", self.name(host), "link", "add", CABLE, "type", "veth", *peer)
            ip("-n", self.name(host), "address", "add", f"{address}/24", "dev", CABLE)
            ip("-n", self.name(host), "link", "set", CABLE, "up")
            ip("-n", switch, "link", "set", f"port-{host}", "master", "bridge0", "up")
            self.resolve(host, own=address)

    def resolve(self, host: str, own: str) -> None:
        """Write the /etc/hosts of a host, in which its own name has this address."""
        lines = ["127.0.0.1 localhost"]
        for other, address in ADDRESSES.items():
            lines.append(f"{own if other == host else address} {self.name(other)}")
        file = Path("/etc/netns") / self.name(host) / "hosts"  # `ip netns exec` mounts it
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n")
        # Nobody answers questions about names here; without this, each takes 20 s.
        file.with_name("nsswitch.conf").write_text("hosts: files\n")

    def plug(self, into: str) -> None:
        """Plug host b's cable in ("up") or out ("down"); both hosts keep their addresses."""
        ip("-n", self.name("switch"), "link", "set", "port-b", into)

    def processes(self, host: str) -> list[int]:
        """Return the processes of a host."""
        command = ["ip", "netns", "pids", self.name(host)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return [int(process) for process in found.stdout.split()]

    def kill(self, host: str) -> None:
        """End every process of a host."""
        for process in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def remove(self) -> None:
        """End all processes in the namespaces and delete these."""
        for name in self.names.values():
            if (Path("/run/netns") / name).exists():
                self.kill(next(host for host, each in self.names.items() if each == name))
                ip("netns", "delete", name)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        with suppress(OSError):
            Path("/etc/netns").rmdir()


def ip(*words: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Yield hosts, which are gone afterwards, whatever happens."""
    hosts = Hosts()
    try:
        hosts.build()
        yield hosts
    finally:
        hosts.remove()


class Bench:
    """State that all cases share: the hosts, a folder, and the end of an unbroken run."""

    def __init__(self, hosts: Hosts, folder: Path, whole: str) -> None:
        self.hosts, self.folder, self.whole = hosts, folder, whole

    def start(self, run: Path, hosts: str = "ab", restarts: int = 0, **more: str) -> list[Job]:
        """Start torchrun on these hosts."""
        return [Job(self.hosts, host, run, restarts, more) for host in hosts]

    def train_some(self, run: Path, restarts: int = 0) -> list[Job]:
        """Start on both hosts, and wait for a few checkpoints."""
        jobs = self.start(run, restarts=restarts)
        until(run / "checkpoints" / "step-00000018.json", jobs)
        for job in jobs:
            job.find_rank()
        return jobs

    def resumed(self, run: Path) -> str:
        """Give the same command again, and compare the end with the unbroken run's."""
        jobs = self.start(run)
        ended = [job.wait() for job in jobs]
        self.hosts.kill("a")
        self.hosts.kill("b")
        if ended != [0, 0]:
            return f"could not be resumed: {ended} {jobs[0].told}"
        if "Resuming from step" not in jobs[0].text:
            return "was started anew, not resumed"
        return self.same(run)

    def same(self, run: Path) -> str:
        """Compare a finished run with the unbroken one; empty if they are equal."""
        return "" if state_of(run) == self.whole else "ends with other bits"


def until(file: Path, jobs: list[Job], seconds: float = 400.0) -> None:
    """Wait for a file that the jobs will write."""
    end = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > end or any(job.process.poll() is not None for job in jobs):
            raise RuntimeError(f"{file.name} was not written: {[job.told for job in jobs]}")
        time.sleep(0.05)


def status_of(run: Path) -> dict[str, str]:
    """Read status.json."""
    return dict(json.loads((run / "status.json").read_text()))


def noticed(bench: Bench, run: Path, jobs: dict[str, Job], since: float) -> Outcome:
    """Check that the remaining hosts end with 75 and name what was lost; then resume the run."""
    faults, seen = [], []
    for host, job in jobs.items():
        other = bench.hosts.name("b" if host == "a" else "a")
        rank = "1" if host == "a" else "0"
        status = job.wait_for_rank()
        if status != 75:
            faults.append(f"rank {1 - int(rank)} ended with {status}: {job.told}")
        if f"rank {rank} on {other}" not in job.text:
            faults.append(f"{host} does not name rank {rank} on {other}: {job.told}")
        seen.append(f"rank {1 - int(rank)} ends with {status} and names rank {rank}")
    seconds = time.monotonic() - since
    written = status_of(run)
    if "a" in jobs and written["state"] != "stopped":
        faults.append(f"status.json: {written}")
    if "a" in jobs:
        seen.append(f"status.json: {written['state']}")
    bench.hosts.kill("a")
    bench.hosts.kill("b")
    bench.hosts.plug("up")
    faults += filter(None, [bench.resumed(run)])
    seen.append("resumed, same bits")
    return Outcome(not faults, "; ".join(faults or seen), round(seconds, 1))


# -- cases


def start_between_hosts(bench: Bench, run: Path) -> Outcome:
    """Start on two hosts: the bits are those of two processes on one."""
    began = time.monotonic()
    ended = [job.wait() for job in bench.start(run)]
    seconds = time.monotonic() - began
    bench.whole = state_of(run)
    one = run.with_name("one-host")
    words = ["--standalone", "--nproc-per-node", "2", "-m", "hardmix", "--", "pretrain", "demo"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, "--out", str(one)]
    inside = ["ip", "netns", "exec", bench.hosts.name("a")]
    # Torchrun's agents go by the host's name, which is not in this namespace's /etc/hosts.
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', bench.hosts.name("a")]
    subprocess.run([*inside, *named, *command, *SETTINGS.split()], check=True, capture_output=True)
    same = bench.same(one)
    seen = same or "ends with the bits of two processes on one host"
    return Outcome(ended == [0, 0] and not same, seen, round(seconds, 1))


def loopback_name(bench: Bench, run: Path) -> Outcome:
    """Use Debian's 127.0.1.1 for the host's own name, without the advice of the warning."""
    for host in ADDRESSES:
        bench.hosts.resolve(host, own="127.0.1.1")
    began = time.monotonic()
    jobs = bench.start(run)
    ended = [job.wait() for job in jobs]
    seconds = time.monotonic() - began
    names = f"{bench.hosts.name('a')}, {bench.hosts.name('b')} resolves to a loopback address"
    warned = "GLOO_SOCKET_IFNAME" in jobs[0].text and names in jobs[0].text
    statuses = [job.statuses[0] for job in jobs if job.statuses]
    seen = f"warned: {warned}; ranks end with {statuses}"
    ok = warned and 0 not in ended and None not in ended and set(statuses) <= {75}
    if not ok:
        seen += "".join(f"; torchrun {job.told}" for job in jobs)
    return Outcome(ok, seen, round(seconds, 1))


def interface_named(bench: Bench, run: Path) -> Outcome:
    """Do the same with GLOO_SOCKET_IFNAME set, as docs/scaling.md advises."""
    began = time.monotonic()
    jobs = bench.start(run, GLOO_SOCKET_IFNAME=CABLE)
    ended = [job.wait() for job in jobs]
    for host, address in ADDRESSES.items():
        bench.hosts.resolve(host, own=address)
    seconds = time.monotonic() - began
    if ended != [0, 0]:
        return Outcome(False, f"{ended} {jobs[0].told}", round(seconds, 1))
    warned = "loopback" in jobs[0].text
    seen = bench.same(run) or f"done, same bits{', but warned' * warned}"
    return Outcome(not bench.same(run) and not warned, seen, round(seconds, 1))


def cut_cable(bench: Bench, run: Path) -> Outcome:
    """Pull the cable during training: no packet arrives, and no connection is closed."""
    a, b = bench.train_some(run)
    bench.hosts.plug("down")
    return noticed(bench, run, {"a": a, "b": b}, time.monotonic())


def processes_killed(bench: Bench, run: Path) -> Outcome:
    """Kill every process of host b; its kernel closes the connections."""
    a, _ = bench.train_some(run)
    bench.hosts.kill("b")
    return noticed(bench, run, {"a": a}, time.monotonic())


def power_off(bench: Bench, run: Path) -> Outcome:
    """Remove host b without closing its connections."""
    a, _ = bench.train_some(run)
    bench.hosts.plug("down")
    bench.hosts.kill("b")
    return noticed(bench, run, {"a": a}, time.monotonic())


def power_off_first(bench: Bench, run: Path) -> Outcome:
    """Remove host a, with rank 0, the store and the run's folder, in the same way."""
    _, b = bench.train_some(run)
    bench.hosts.plug("down")
    bench.hosts.kill("a")
    return noticed(bench, run, {"b": b}, time.monotonic())


def restarted(bench: Bench, run: Path, victim: str) -> Outcome:
    """Kill the rank of a host with --max-restarts 3: the job recovers by itself."""
    jobs = bench.train_some(run, restarts=3)
    os.kill(jobs["ab".index(victim)].rank, signal.SIGKILL)
    since = time.monotonic()
    ended = [job.wait() for job in jobs]
    seconds = time.monotonic() - since
    bench.hosts.kill("a")
    bench.hosts.kill("b")
    if ended != [0, 0]:
        words = "; ".join(f"torchrun {job.told}" for job in jobs)
        return Outcome(False, f"{ended} {words}", round(seconds, 1))
    same = bench.same(run)
    return Outcome(not same, same or "recovered by itself, same bits", round(seconds, 1))


def restart_after_b(bench: Bench, run: Path) -> Outcome:
    """Kill rank 1 with --max-restarts 3."""
    return restarted(bench, run, "b")


def restart_after_a(bench: Bench, run: Path) -> Outcome:
    """Kill rank 0 with --max-restarts 3."""
    return restarted(bench, run, "a")


def host_returns(bench: Bench, run: Path) -> Outcome:
    """Lose host b with --max-restarts 3, and start its torchrun again later."""
    a, _ = bench.train_some(run, restarts=3)
    bench.hosts.plug("down")
    bench.hosts.kill("b")
    since = time.monotonic()
    time.sleep(2.5 * TIMEOUT)
    bench.hosts.plug("up")
    (b,) = bench.start(run, hosts="b", restarts=3)
    ended = [a.wait(), b.wait()]
    seconds = time.monotonic() - since
    bench.hosts.kill("a")
    bench.hosts.kill("b")
    if ended != [0, 0]:
        words = f"a: {a.told}; b: {b.told}"
        return Outcome(False, f"{ended} {words}", round(seconds, 1))
    same = bench.same(run)
    return Outcome(not same, same or "recovered by itself, same bits", round(seconds, 1))


CASES: dict[str, Callable[[Bench, Path], Outcome]] = {
    "start": start_between_hosts,
    "own name is 127.0.1.1": loopback_name,
    "the same, GLOO_SOCKET_IFNAME set": interface_named,
    "cable cut": cut_cable,
    "all processes of b killed": processes_killed,
    "b without power": power_off,
    "a (rank 0) without power": power_off_first,
    "rank 1 killed, --max-restarts 3": restart_after_b,
    "rank 0 killed, --max-restarts 3": restart_after_a,
    "b without power, back after 25 s, --max-restarts 3": host_returns,
}


def main() -> None:
    """Run all cases, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="words that a case's name contains")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("Skipped: network namespaces need root and the command ip (iproute2).")
        return
    result: dict[str, Any] = {"cases": {}, "state": ""}
    if options.only and OUT.exists():  # the other cases stay as they were
        result = json.loads(OUT.read_text())
    result |= {"versions": versions(), "train.timeout": TIMEOUT}
    cases: dict[str, Any] = result["cases"]
    with tempfile.TemporaryDirectory(prefix="two-hosts-") as folder, two_hosts() as hosts:
        bench = Bench(hosts, Path(folder), result["state"])
        for number, (name, case) in enumerate(CASES.items()):
            if not any(word in name for word in options.only or [""]):
                continue
            try:
                outcome = case(bench, Path(folder) / f"run-{number}")
            except Exception as error:
                outcome = Outcome(False, f"{type(error).__name__}: {error}", 0.0)
            cases[name] = outcome._asdict()
            result["state"] = bench.whole
            print(
                f"{'ok ' if outcome.ok else 'BAD'} {outcome.seconds:6.1f} s "
                f" {name}: {outcome.seen}",
                flush=True,
            )
            OUT.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(any(not case["ok"] for case in cases.values()))


if __name__ == "__main__":
    main()
