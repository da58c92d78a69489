"""`python -m benchmarks [PART ...]` measures hardmix's performance on this machine."""

import sys

import tyro

from benchmarks.suite import BenchOptions, bench
from hardmix.errors import InputError
from hardmix.runtime.console import complain


def main(arguments: list[str] | None = None) -> None:
    """Measure; end with status 2 and one sentence if the options are wrong."""
    try:
        bench(tyro.cli(BenchOptions, prog="python -m benchmarks", args=arguments))
    except InputError as error:
        complain(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
