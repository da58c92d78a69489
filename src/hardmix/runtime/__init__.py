"""Console, files, devices, processes, signals and random numbers."""
