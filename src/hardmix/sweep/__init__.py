"""Trains the paper's tables with one command: rows, scales, a plan, its runs, tables."""
