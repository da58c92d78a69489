"""Run folders to one self-contained HTML page."""
