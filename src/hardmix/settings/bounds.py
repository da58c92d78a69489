"""Checks of settings against their limits; errors name a setting by its dotted name."""

import difflib
import math
from collections.abc import Iterable
from typing import Any

from hardmix.errors import InputError

LARGEST, LARGEST_FLOAT = 2**63 - 1, 1e30
"""Largest integer setting (int64), and largest float: float32 arithmetic still works with it."""


def check_above(config: object, prefix: str, **limits: float) -> None:
    """Raise InputError if a setting is not above its limit; None passes."""
    for name, limit in limits.items():
        value = getattr(config, name)
        if value is not None and not (_is_usable(value) and value > limit):
            raise InputError(
                f"{prefix}.{name}={shown(value)} must be a finite number above {limit}"
                f"{_upper_limit(value)}."
            )


def check_at_least(config: object, prefix: str, **limits: int) -> None:
    """Raise InputError if a setting is below its limit; None passes."""
    for name, limit in limits.items():
        value = getattr(config, name)
        if value is None or (_is_usable(value) and value >= limit):
            continue
        finite = "" if isinstance(value, int) or math.isfinite(value) else "finite and "
        raise InputError(
            f"{prefix}.{name}={shown(value)} must be {finite}at least {limit}{_upper_limit(value)}."
        )


def check_between(config: object, prefix: str, low: float, high: float, *names: str) -> None:
    """Raise InputError if a setting is outside [low, high]; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise InputError(f"{prefix}.{name}={shown(value)} must be between {low} and {high}.")


def shown(value: Any) -> str:
    """Return a value as messages print it: an integer of many digits as a power of ten."""
    if isinstance(value, int) and abs(value) > 10**30:
        return f"{'-' * (value < 0)}1e{int(math.log10(abs(value)))}"
    return str(value)


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names, those most similar to `name` first."""
    names = list(known)
    return difflib.get_close_matches(name, names, n=len(names), cutoff=0.0)


def _is_usable(value: float) -> bool:
    return value <= (LARGEST if isinstance(value, int) else LARGEST_FLOAT)  # NaN is not


def _upper_limit(value: float) -> str:
    """In words, where a number is too large."""
    if isinstance(value, int):
        return " and below 2^63" if value > LARGEST else ""
    return " and at most 1e30" if LARGEST_FLOAT < value < math.inf else ""
