"""Turns run folders into a self-contained HTML page."""
