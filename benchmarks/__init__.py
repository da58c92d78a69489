"""The laboratory: speed, memory, robustness, and whether a refactoring keeps every bit.

`python -m benchmarks`, from the folder of the project, measures the claims of docs/performance.md.
The other programs in this folder measure one thing each; their first lines say what.
"""
