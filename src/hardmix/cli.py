"""The command line: one function per subcommand. The only file that knows it.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

import os
import sys
from typing import Annotated, NoReturn

import tyro

from hardmix import __version__
from hardmix.errors import InputError

DESCRIPTION = f"hardmix {__version__}: contrastive pre-training with hard negative mixing (MoCHi)."


def demo(
    num_hardest: Annotated[
        int, tyro.conf.arg(help="N: negatives of a query that may be mixed")
    ] = 1024,
    num_pairs: Annotated[int, tyro.conf.arg(help="s: points that mix two of them")] = 1024,
    num_with_query: Annotated[
        int, tyro.conf.arg(help="s': points that mix one with the query")
    ] = 128,
    seed: Annotated[int, tyro.conf.arg(help="of the random embeddings")] = 0,
) -> None:
    """MoCo's and MoCHi's loss on random embeddings, and the closed form against its definition."""
    from hardmix.demo import show

    show(num_hardest=num_hardest, num_pairs=num_pairs, num_with_query=num_with_query, seed=seed)


def version() -> None:
    """The version of hardmix."""
    from hardmix.console import say

    say(__version__)


COMMANDS = {"demo": demo, "version": version}


def main(arguments: list[str] | None = None) -> NoReturn:
    """Exit status: 0 done; 2 bad input, with one message; 1 a defect of ours, with a traceback."""
    # Before torch is imported: threads that wait should sleep. Where other processes are busy too
    # (loader workers are), spinning ones make a training step several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="hardmix", description=DESCRIPTION, args=arguments
        )
    except InputError as error:
        from hardmix.console import complain

        complain(str(error))
        sys.exit(2)
    sys.exit(0)
