"""Evaluations of a trained encoder, one file each."""
