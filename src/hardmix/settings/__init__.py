"""All settings, checked before any image is read. Imports no torch."""
