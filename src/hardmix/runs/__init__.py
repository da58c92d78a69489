"""The folder of a run: its files, its checkpoints, and the one reader of both."""
