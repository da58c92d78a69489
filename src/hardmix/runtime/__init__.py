"""What any program of many processes needs: console, files, devices, signals, random numbers."""
