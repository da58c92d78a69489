"""The command `hardmix`, `python -m hardmix`, and `torchrun -m hardmix -- ...`."""

import sys


def main() -> None:
    """Run the command line, or say which packages it needs."""
    try:
        from hardmix.commands.main import main as run
    except ModuleNotFoundError as error:
        if (error.name or "hardmix").split(".")[0] == "hardmix":
            raise
        sys.stderr.write(
            f"hardmix: the command line needs {error.name}: pip install 'hardmix[cli]'. Without"
            " it, hardmix is a library: the loss, the queue and the integrations.\n"
        )
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
