"""`python -m hardmix`, and `torchrun -m hardmix -- ...`."""

from hardmix.cli import main

if __name__ == "__main__":
    main()
