"""Limits of settings, checked by their names on the command line."""

import difflib
import math
from collections.abc import Iterable

from hardmix.errors import InputError


def check_above(config: object, prefix: str, **limits: float) -> None:
    """Refuse a setting that is not above its limit, by its name on the command line."""
    for name, limit in limits.items():
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value > limit):
            raise InputError(f"{prefix}.{name}={value} must be a finite number above {limit}.")


def check_between(config: object, prefix: str, low: float, high: float, *names: str) -> None:
    """Refuse a setting outside of its limits, by its name on the command line."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise InputError(f"{prefix}.{name}={value} must be between {low} and {high}.")


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """What a user may have meant, the most similar first."""
    names = list(known)
    return difflib.get_close_matches(name, names, n=len(names), cutoff=0.0)
