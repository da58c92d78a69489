"""The grids of the paper as one command: rows, scales, a plan, its runs, a table.

`sweeping.sweep` is the whole of it; docs/sweeps.md tells how to use it.
"""
