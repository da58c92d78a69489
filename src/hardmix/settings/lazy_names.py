"""Public names that are imported on first use, so that `hardmix --help` needs no torch."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def lazy_names(
    module: str, file: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a module of public names.

    The names are those that the module's own file imports from hardmix, under `TYPE_CHECKING`: type
    checkers and readers see ordinary imports, and every name is listed once.

    Args:
        module: `__name__` of the module.
        file: its `__file__`.
    """
    homes = {
        alias.name: str(node.module)
        for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hardmix"
        for alias in node.names
        if alias.name != "lazy_names"
    }

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            home = import_module(homes[name])
        except ModuleNotFoundError as error:
            if (error.name or "hardmix").split(".")[0] == "hardmix":
                raise
            raise ImportError(
                f"{module}.{name} needs {error.name}: pip install 'hardmix[cli]'. The loss, the"
                " queue and the integrations need torch, numpy and jaxtyping alone."
            ) from error
        value = vars(home)[name] if name in vars(home) else import_module(f"{homes[name]}.{name}")
        setattr(sys.modules[module], name, value)
        return value

    names = sorted(homes)
    return get, lambda: names, names
