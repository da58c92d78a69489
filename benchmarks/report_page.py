"""The aim: a page of 20 runs of 200 epochs takes under 10 s and under 10 MB.

Runs are written by hand, as large as those of the imagenet100 recipe: 20 lines of metrics an epoch,
a gallery of 1 MB and a map of 5,000 points each. Prints seconds, of the clock and of the processor
(which other work on the machine does not lengthen much), and MB.
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from fake_runs import (
    config_of,
    gallery_of,
    map_of,
    metrics_of,
    result_of,
    write_figures,
    write_run,
)

CLASSES = [f"class {number}" for number in range(100)]


def main() -> None:
    """Write the runs, then the page."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [write(Path(folder), number) for number in range(20)]
        started, worked = time.perf_counter(), time.process_time()
        from hardmix.report.page import write_report  # torch's import is part of the command

        page = write_report(runs, Path(folder) / "report.html")
        seconds, cpu = time.perf_counter() - started, time.process_time() - worked
        print(f"{seconds:.1f} s ({cpu:.1f} s of CPU), {page.stat().st_size / 1e6:.1f} MB")


def write(folder: Path, number: int) -> Path:
    """Five settings with four seeds each."""
    kind, seed = divmod(number, 4)
    method = "moco-v2" if kind == 0 else "mochi"
    config = config_of(method, seed, "imagenet100", mix__num_pairs=256 * (kind or 1))
    results = {
        name: result_of(config, 0.6 + kind / 100 + seed / 500)
        for name in ("knn", "linear", "linear-cached")
    }
    lines = metrics_of(200, offset=kind / 10 + seed / 50, lines=20)
    run = write_run(folder / f"{method}-{kind}-{seed}", config, lines, results)
    gallery = gallery_of(CLASSES, queries=8)
    filler = "data:image/webp;base64," + "A" * 16_000
    for query in gallery["numbers"]["queries"]:
        for each in query["hardest"]:
            each["image"] = filler
    write_figures(run, {"gallery.json": gallery, "embedding-map.json": map_of(CLASSES, 5000)})
    return run


if __name__ == "__main__":
    main()
