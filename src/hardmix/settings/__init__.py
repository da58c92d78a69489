"""What can be chosen, and checked before any image is read. Imports no torch."""
