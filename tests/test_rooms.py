"""The house: rooms that show the architecture, and what no room may do (docs/extending.md)."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from places import ROOT

PACKAGE = ROOT / "src" / "hardmix"
MODULES = sorted(PACKAGE.rglob("*.py"))
NAMESPACES = {PACKAGE / f"{name}.py" for name in ("config", "losses", "strategies")}
PUBLIC = NAMESPACES | {
    PACKAGE.joinpath(*room, "__init__.py") for room in [(), ("explore",), ("integrations",)]
}
"""Files of public names, each of which is imported on first use."""


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0]


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imported(file: Path) -> set[str]:
    """Return the modules of hardmix that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return {name for name in found if name.split(".")[0] == "hardmix"}


def test_nothing_stands_in_the_corridor():
    assert {file.stem for file in PACKAGE.glob("*.py")} == {
        *("__init__", "__main__", "errors"),
        *(file.stem for file in NAMESPACES),
    }


def test_every_test_is_in_the_room_of_what_it_tests():
    rooms = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()}
    for folder in (ROOT / "tests").iterdir():
        if folder.is_dir() and list(folder.glob("test_*.py")):
            assert folder.name in rooms | {"benchmarks", "docs", "experiments", "tools"}
    assert {file.name for file in (ROOT / "tests").glob("test_*.py")} == {Path(__file__).name}


def test_a_rooms_first_file_is_empty_but_for_its_sentence():
    for file in set(PACKAGE.glob("*/**/__init__.py")) - PUBLIC:
        (sentence,) = tree_of(file).body
        assert isinstance(sentence, ast.Expr)
        assert isinstance(sentence.value, ast.Constant), file


def test_mixing_needs_nothing_but_settings_and_errors():
    for file in (PACKAGE / "mixing").glob("*.py"):
        rooms = {name.split(".")[1] for name in imported(file)}
        assert rooms <= {"mixing", "settings", "errors"}, file


@pytest.mark.parametrize("room", ["settings", "commands"])
def test_what_a_help_needs_imports_nothing_heavy_at_its_top(room):
    heavy = {"torch", "torchvision", "numpy", "PIL", "safetensors", "jaxtyping"}
    for file in (PACKAGE / room).glob("*.py"):
        if file.name == "demonstration.py":  # which `demo` imports once it runs
            continue
        for node in tree_of(file).body:
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & heavy, file


def test_only_commands_know_the_command_line():
    for file in MODULES:
        tops = {
            name.split(".")[0]
            for node in ast.walk(tree_of(file))
            for name in (
                [each.name for each in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert "tyro" not in tops or room_of(file) == "commands", file


def test_no_two_files_and_no_two_classes_have_one_name():
    files, classes = defaultdict(list), defaultdict(list)
    for file in MODULES:
        where = str(file.relative_to(PACKAGE))
        if file.stem != "__init__" and file not in NAMESPACES:
            files[file.stem].append(where)
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(where)
    assert {name: where for name, where in files.items() if len(where) > 1} == {}
    assert {name: where for name, where in classes.items() if len(where) > 1} == {}


def test_a_function_has_one_door():
    """Only the package itself re-exports names of its modules."""
    for file in MODULES:
        if file in PUBLIC:
            continue
        defined = {
            name.id
            for node in tree_of(file).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            for name in ast.walk(target)
            if isinstance(name, ast.Name)
        }
        assert "__all__" not in defined, file
        taken = {
            (each.asname or each.name)
            for node in tree_of(file).body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hardmix")
            for each in node.names
        }
        used = {node.id for node in ast.walk(tree_of(file)) if isinstance(node, ast.Name)}
        assert taken <= used, (file, taken - used)
    homes = {file: file.relative_to(PACKAGE.parent).with_suffix("") for file in MODULES}
    modules = {".".join(path.parts): file for file, path in homes.items()}
    for file in MODULES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                body = tree_of(modules[node.module]).body
                own = {name for each in body for name in names_defined(each)}
                assert {each.name for each in node.names} <= own, (file, node.module)


def names_defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {
        name.id
        for target in targets
        if target is not None
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }


def test_what_is_trained_is_known_in_its_room_alone():
    """Only methods/ contains code that depends on the method's class."""
    kinds = {
        node.name
        for file in (PACKAGE / "methods").glob("*.py")
        for node in tree_of(file).body
        if isinstance(node, ast.ClassDef) and node.name not in ("Method", "Materials")
        if any(isinstance(base, ast.Name) and base.id == "Method" for base in node.bases)
    }
    assert {"Moco", "Supervised"} <= kinds
    for file in MODULES:
        if room_of(file) == "methods":
            continue
        names = {node.id for node in ast.walk(tree_of(file)) if isinstance(node, ast.Name)}
        assert not names & kinds, file
        assert not any(name.startswith("hardmix.methods.moco") for name in imported(file)), file


def test_one_function_turns_images_into_features():
    callers = {
        str(file.relative_to(PACKAGE))
        for file in MODULES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "evaluation_batches"
    }
    assert callers == {"evaluation/features.py"}


def test_functions_are_short():
    """A body has at most 53 lines, its docstring aside; files may be as long as their idea."""
    too_long = [
        (str(file.relative_to(PACKAGE)), node.name, length)
        for file in MODULES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := body_length(node)) > 53
    ]
    assert too_long == []


def body_length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first, *rest = function.body
    if rest and ast.get_docstring(function) is not None:
        first = rest[0]
    return function.end_lineno - first.lineno + 1
