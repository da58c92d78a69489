"""`python -m hardmix`, and `torchrun -m hardmix -- ...`."""

from hardmix.commands.main import main

if __name__ == "__main__":
    main()
