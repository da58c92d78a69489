"""Fixtures that several tests of data share."""

import pytest

from shard_files import png, write_shard


@pytest.fixture
def root(tmp_path) -> str:
    """Three shards of four images; the red of an image is its number, its class that modulo 3."""
    for shard in range(3):
        members = {}
        for key in range(4):
            number = 4 * shard + key
            members |= {f"{key:03}.png": png(number), f"{key:03}.cls": str(number % 3).encode()}
        write_shard(tmp_path / f"a-{shard:02}.tar", members)
    return str(tmp_path / "a-{00..02}.tar")
