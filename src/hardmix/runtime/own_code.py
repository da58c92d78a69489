"""Code and commands by name: a user's own functions, 'mypackage.module:function', and streams.

Names are stored in config.json and in encoder files, which may come from anyone. **A name is only
used if the user has given it in this call, too**: a command allows the names on its command line, a
program those that it passes to `allow_code`. All others are refused. The current folder is
searched only for names that are allowed.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hardmix.errors import InputError, UnnamedCodeError

_allowed: set[str] = set()


def allow_code(*names: str) -> None:
    """Allow configs, runs and encoders to name this code, for the rest of the program.

    A name is that of your own function, "mypackage:make_net", or of a stream of images, as in
    `data.root`: "pipe:COMMAND" or an address. Nothing else that a file names is ever executed.
    """
    _allowed.update(names)


@contextmanager
def allowing(*names: str) -> Iterator[None]:
    """Allow these names, too, within the context."""
    before = set(_allowed)
    _allowed.update(names)
    try:
        yield
    finally:
        _allowed.clear()
        _allowed.update(before)


def allowed_code() -> list[str]:
    """Return all names that are allowed, to be passed on to a child process."""
    return sorted(_allowed)


@contextmanager
def asked_by(where: Path | str) -> Iterator[None]:
    """Name this file as the origin of code that is refused within the context."""
    try:
        yield
    except UnnamedCodeError as error:
        raise UnnamedCodeError(error.name, error.setting, str(where)) from None


def check_allowed(name: str, setting: str, where: str = "the config") -> None:
    """Raise UnnamedCodeError unless the user has given this name; `where` says what requests it."""
    if name not in _allowed:
        raise UnnamedCodeError(name, setting, where)


def is_own(name: str) -> bool:
    """Return whether a name has the form 'mypackage.module:function'; 'timm:NAME' does not."""
    module, _, function = name.partition(":")
    return module != "timm" and all(part.isidentifier() for part in [*module.split("."), function])


def load_own(name: str, setting: str) -> Callable[..., Any]:
    """Return the function or class of this name, which is the value of `setting`."""
    module_name, _, attribute = name.partition(":")
    if not is_own(name):
        raise InputError(f"{setting}={name!r} must have the form 'mypackage.module:function'.")
    if module_name.split(".")[0] in sys.stdlib_module_names:
        raise InputError(
            f"{setting}={name!r} is in Python's standard library: name your own function."
        )
    check_allowed(name, setting)
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
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    home = str(getattr(function, "__module__", "")).split(".")[0]
    if function is None or not callable(function) or home != module_name.split(".")[0]:
        names = [key for key, each in vars(module).items() if callable(each) and key[0] != "_"]
        raise InputError(
            f"{setting}={name!r}: {module_name} defines no function {attribute!r}; it has"
            f" {', '.join(sorted(names)[:8]) or 'none'}."
        )
    return function


def call_own(function: Callable[..., Any], setting: str, **offered: Any) -> Any:
    """Call the function with those of the offered arguments that it accepts."""
    try:
        parameters = inspect.signature(function).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        return function(**{k: v for k, v in offered.items() if takes_all or k in parameters})
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{setting}: {function.__name__} failed with {type(error).__name__}: {error}."
        ) from error
