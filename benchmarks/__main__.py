"""`python -m benchmarks [PART ...]` measures hardmix's performance on this machine.

`python -m benchmarks gpu` checks and measures everything that needs a GPU. `duplicates` and
`unusual` count the planted pictures that hardmix explore finds.
"""

import sys

import tyro

from benchmarks import gpu, planted
from benchmarks.suite import BenchOptions, bench
from hardmix.errors import InputError
from hardmix.runtime.console import complain


def main(arguments: list[str] | None = None) -> None:
    """Measure; end with status 2 and one sentence if the options are wrong."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if words[:1] == ["gpu"]:
            gpu.main(words[1:])
            return
        if words[:1] in (["duplicates"], ["unusual"]):
            planted.main(words)
            return
        bench(tyro.cli(BenchOptions, prog="python -m benchmarks", args=arguments))
    except InputError as error:
        complain(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
