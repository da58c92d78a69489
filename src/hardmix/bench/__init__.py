"""The performance claims, measured where you are: `hardmix bench`.

suite.py runs the parts (one file each: loss, step, loader, end_to_end, start, memory, growth),
claims.py has every limit, and official.py and lightly_peer.py are what we compare with.
"""
