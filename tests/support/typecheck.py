"""The checker behind the tests' type enforcement: an int will do where a float is asked for."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
