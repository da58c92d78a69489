"""Load a user's own functions by name: 'mypackage.module:function'.

The current folder is searched as well. Such names are stored in config.json and in encoder files,
which may come from anyone: only functions and classes that the named package itself defines are
called, and never Python's standard library.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from hardmix.errors import InputError


def is_own(name: str) -> bool:
    """Whether a name has the form 'mypackage.module:function'."""
    module, _, function = name.partition(":")
    return all(part.isidentifier() for part in [*module.split("."), function])


def load_own(name: str, setting: str) -> Callable[..., Any]:
    """Return the function or class; error messages call it `setting`."""
    module_name, _, attribute = name.partition(":")
    if not is_own(name):
        raise InputError(f"{setting}={name!r} must have the form 'mypackage.module:function'.")
    if module_name.split(".")[0] in sys.stdlib_module_names:
        raise InputError(
            f"{setting}={name!r} is in Python's standard library: name your own function."
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's file raises
        raise InputError(
            f"{setting}={name!r}: {module_name} cannot be imported ({type(error).__name__}:"
            f" {error}); start the command in the folder of {module_name.split('.')[0]}.py, or"
            " install the package."
        ) from error
    found: Callable[..., Any] | None = getattr(module, attribute, None)
    home = str(getattr(found, "__module__", "")).split(".")[0]
    if found is None or not callable(found) or home != module_name.split(".")[0]:
        known = [key for key, each in vars(module).items() if callable(each) and key[0] != "_"]
        raise InputError(
            f"{setting}={name!r}: {module_name} defines no function {attribute!r}; it has"
            f" {', '.join(sorted(known)[:8]) or 'none'}."
        )
    return found


def call_own(function: Callable[..., Any], setting: str, **offered: Any) -> Any:
    """Call the function with those of the offered arguments that it accepts."""
    try:
        taken = inspect.signature(function).parameters
        every = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        return function(**{k: v for k, v in offered.items() if every or k in taken})
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{setting}: {function.__name__} failed with {type(error).__name__}: {error}."
        ) from error
