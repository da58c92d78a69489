"""Run folders to one self-contained HTML page: read, group, compare, draw, write.

Nothing is computed anew: the page shows what config.json, metrics.jsonl, results/ and figures/
hold. What cannot be read is said on the page and the rest is shown.
"""
