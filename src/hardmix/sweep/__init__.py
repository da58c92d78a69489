"""The grids of the paper as one command: rows, scales, a plan, its runs, a table."""
