"""`hardmix --version`, as every command line has it."""

import pytest

import hardmix
from hardmix.commands import main as cli


@pytest.mark.parametrize("word", ["--version", "version"])
def test_the_version_is_told_either_way(word, capfd):
    with pytest.raises(SystemExit) as done:
        cli.main([word])
    assert not done.value.code
    assert capfd.readouterr().out == f"{hardmix.__version__}\n"
