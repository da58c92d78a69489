"""The table of docs/reliability.md, from results.json: `python -m benchmarks.torture.table`."""

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- from torture: begin -->", "<!-- from torture: end -->"

ROWS = {
    "kill saves at every file call": (
        "SIGKILL at every file call (open, write, fsync, rename, unlink, mkdir, truncate) of saves,"
        " of every method ({methods}, with PCL and `loss.filter=same-cluster`)",
        "{kills:,} kills",
        "the checkpoint before the save or the one after it is loaded, bit for bit; the next save"
        " leaves the same files",
    ),
    "kill runs at file calls": (
        "runs of every method ({methods}) killed at a random file call, resumed, killed again",
        "{kills} kills",
        "all end with the uninterrupted run's checkpoint, encoder, logs and names of files, bit for"
        " bit",
    ),
    "fail file calls of runs": (
        "a file call of a run of every method fails once: EIO, ESTALE, EDQUOT or ENOSPC",
        "{failed_calls} failures",
        "{statuses}; no traceback; resumed, they end like the uninterrupted run",
    ),
    "odd files": (
        "{kinds} kinds of odd files (pipes, devices, links to themselves, folders, sparse files of"
        " 64 GB, gzip bombs, brackets without end, logs of 256 MB, other kinds of values, ...) in"
        " the {places} places of a run, then a command",
        "{odd_files}",
        "{statuses}; no traceback, no checkpoint changed, at most {peak_mb:,} MB and"
        " {slowest_seconds} s",
    ),
    "names of code": (
        "runs whose config or encoder names code or a command, with that code beside them",
        "{runs_with_names_of_code}",
        "{statuses}; nothing was executed",
    ),
    "hostile shards": (
        "hostile shards: impossible labels, false sizes, names without end, a bomb of 8 GB",
        "{hostile_shards}",
        "status 2 and a sentence, at most {peak_mb:,} MB",
    ),
    "kill pre-training": (
        "two processes killed 0 to 2.5 s after their start (SIGKILL of one or both {sigkill} times,"
        " SIGTERM {sigterm}, SIGUSR1 {sigusr1}), resumed six times, then trained to their end",
        "{kills} kills, {chains} runs",
        "all end with the uninterrupted run's checkpoint, encoder, metrics and hardness, bit for"
        " bit; with `train.timeout` 5 s the last process had ended after at most {slowest_end} s",
    ),
    "kill cache": (
        "SIGKILL while decoded images are written to a file (`data.cache`)",
        "{kills} kills",
        "the next start has the same pixels and writes the same file",
    ),
    "kill index": (
        "SIGKILL while shards are indexed",
        "{kills} kills",
        "the next start has the same members and writes the same index",
    ),
    "kill linear": (
        "SIGKILL during `linear` with a preset",
        "{kills} kills",
        "the same command ends with the uninterrupted one's result, every epoch of it",
    ),
    "kill detect": (
        "SIGKILL during `detect`",
        "{kills} kills",
        "the same command ends with the uninterrupted one's detector, bit for bit, log and result",
    ),
    "damage images": (
        "damaged images (bits, cuts, other bytes)",
        "{images:,}",
        "{refused:,} rejected by name, the others read; no other error",
    ),
    "damage checkpoints": (
        "damaged checkpoints",
        "{checkpoints}",
        "none accepted; the older one was used {older_used} times, when one or both files of the"
        " newest were damaged",
    ),
    "damage configs": (
        "damaged config.json",
        "{configs}",
        "{refused} rejected with a message, the others still valid",
    ),
    "damage folders": (
        "damaged run folders, then `hardmix pretrain --resume`",
        "{folders}",
        "{statuses}; no traceback, no intact checkpoint lost",
    ),
    "damage indexes": (
        "indexes of shards, damaged or of other shards",
        "{indexes}",
        "{made_anew} made anew, {still_right} still right",
    ),
    "damage caches": (
        "damaged files of decoded images",
        "{caches}",
        "the right pixels every time",
    ),
    "change shards": (
        "shards truncated ({truncated}), replaced ({replaced}), re-packed ({re-packed}) or deleted"
        " ({removed}) after they were indexed, often while open",
        "{changes}",
        "{right:,} images right, {refused:,} refused by the shard's name, none wrong; a new start"
        " indexes what is there, or names the shard",
    ),
    "rewrite a shard while reading": (
        "a shard overwritten with other images of the same size, again and again, while it is read",
        "20 s, {reads:,} reads",
        "{right:,} right, {refused:,} refused, none wrong",
    ),
    "change shards while training": (
        "the same four changes during training, without a cache",
        "{changes}",
        "read to the end as they were ({trained_on}), or status 2, naming the shard ({refused});"
        " with the shards restored, the same command ends like the uninterrupted run",
    ),
    "fill disk, pre-training": (
        "disk full at a random byte of a random checkpoint",
        "{full_disks}",
        "a warning each, no partial file, every run ends like the uninterrupted one",
    ),
    "fill disk, cache": (
        "a small disk (tmpfs), full while decoded images are written",
        "{full_disks}",
        "a warning; with room, the next start writes the same file",
    ),
    "fill disk, index": (
        "the same with an index",
        "{full_disks} of {runs} runs",
        "a warning; with room, the next start writes the same file",
    ),
    "fill disk, linear": (
        "the same during `linear --preset`",
        "{full_disks}",
        "epochs that could not be saved are named; numbers shown, or status 74; with room, the same"
        " result",
    ),
    "fill disk, detect": (
        "the same during `detect`",
        "{full_disks}",
        "status 74, no partial file; with room, the same command ends like the uninterrupted one",
    ),
}
"""The work of each part, its number, and what held if there is no finding."""


def table(result: dict[str, dict]) -> str:
    """Return the text between the marks; a part with findings shows their number instead."""
    seed, commit = result["of"]["seed"], result["of"].get("commit", "unknown")
    lines = [
        f"Commit {commit}, seed {seed}, torch {result['of']['versions']['torch']}:",
        totals(result),
        "",
        "| test | how often | result |",
        "|---|---|---|",
    ]
    for title, texts in ROWS.items():
        part = result.get(title)
        if part is None or "skipped" in part:
            continue
        facts = {**part, **summed(part)}
        what, often, held = (text.format_map(facts) for text in texts)
        findings = part.get("findings")
        lines.append(f"| {what} | {often} | {f'{len(findings)} findings' if findings else held} |")
    return "\n".join(lines)


def totals(result: dict[str, dict[str, object]]) -> str:
    """Return a sentence on all parts together."""
    damages = ("images", "checkpoints", "configs", "folders", "indexes", "caches", "odd_files")
    damages += ("hostile_shards", "runs_with_names_of_code", "changes")
    kills = sum(part.get("kills", 0) for part in result.values())
    damaged = sum(part.get(name, 0) for part in result.values() for name in damages)
    seconds = sum(part.get("seconds", 0) for part in result.values())
    peak = max((part.get("peak_mb", 0) for part in result.values()), default=0)
    findings = sum(len(part.get("findings", ())) for part in result.values())
    memory = f" at most {peak:,} MB of memory for a command on odd files or hostile shards;"
    return (
        f"{kills:,} kills, {damaged:,} damaged inputs, {findings} findings;{memory * bool(peak)}"
        f" {seconds / 60:.0f} minutes."
    )


def summed(part: dict) -> dict:
    """Return what a row says of several numbers together."""
    signals = ("SIGKILL", "SIGTERM", "SIGUSR1")
    sums = {
        each.lower(): sum(number for name, number in part.items() if name.startswith(each))
        for each in signals
    }
    found: dict[str, int] = {}
    for name, number in part.items():
        if "status" in name:
            status = name.replace("status_", "status ").split("status ")[1]
            found[status] = found.get(status, 0) + number
    said = [f"{status} ({number})" for status, number in sorted(found.items())]
    return {**sums, "statuses": "status " + ", ".join(said)}


def write_page(result: dict[str, dict], page: Path = PAGE) -> None:
    """Put the table into the page, between the marks."""
    text = page.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n{table(result)}\n{END}{tail}")


if __name__ == "__main__":
    write_page(json.loads((HERE / "results.json").read_text()))
