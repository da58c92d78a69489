"""Measures hardmix's performance claims on this machine."""
