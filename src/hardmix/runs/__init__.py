"""The folder of a run: its files, its checkpoints, and their reader."""
