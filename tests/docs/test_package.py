"""The frame: public names, layers, a quick command line, honest documents."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module, metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import hardmix
from hardmix.commands import main as cli
from places import ROOT

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*.md")]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


def test_all_equals_the_namespace_and_what_type_checkers_see():
    tree = ast.parse(Path(hardmix.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in guarded.body for alias in node.names}
    assert sorted(hardmix.__all__) == sorted(seen)
    assert sorted(hardmix.__all__) == dir(hardmix)
    for name in hardmix.__all__:
        assert getattr(hardmix, name) is not None
    assert len(hardmix.__all__) < 50


@pytest.mark.parametrize(
    "module", ["hardmix", *(f"hardmix.{name}" for name in ("config", "losses", "strategies"))]
)
def test_every_public_name_says_what_it_is(module):
    names = import_module(module).__all__
    assert names
    for name in names:
        thing = getattr(import_module(module), name)
        if callable(thing):
            assert thing.__doc__, name


def test_importing_the_module_does_not_hide_the_function_of_its_name():
    done = run("-c", "import hardmix.mixing.loss, hardmix; assert callable(hardmix.contrast)")
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        hardmix.nonsense  # noqa: B018


def test_help_needs_no_torch():
    program = """
import sys
from hardmix.commands.main import main
try:
    main(["--help"])
except SystemExit as done:
    assert not done.code
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--seed", "x"], ["seed", "x"]),
        (["demo", "--epochs", "0"], ["train.epochs=0"]),
        (["demmo"], ["'demmo'", "choose one of demo"]),
    ],
)
def test_bad_input_is_one_message_and_status_2(arguments, words, capfd):
    with pytest.raises(SystemExit) as done:
        cli.main(arguments)
    shown = capfd.readouterr().err
    assert done.value.code == 2
    assert "Traceback" not in shown
    assert all(word in shown for word in words)


def test_a_defect_of_ours_shows_a_traceback_and_status_1(monkeypatch, capfd):
    monkeypatch.setitem(cli.COMMANDS, "version", lambda _: 1 / 0)
    with pytest.raises(SystemExit) as done:
        cli.main(["version"])
    shown = capfd.readouterr().err
    assert done.value.code == 1
    assert "ZeroDivisionError" in shown
    assert "please report it" in shown


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_that_exist_and_name_no_line(document):
    for target in re.findall(r"\]\(([^)#][^)]*)\)", document.read_text()):
        if "://" in target:
            continue
        path, _, place = target.partition("#")  # headings are looked up in test_site.py
        assert (document.parent / path).exists(), target
        assert not re.fullmatch(r"L\d+", place), target  # lines move with every change


def test_a_link_to_a_symbol_that_is_not_there_is_refused(tmp_path):
    for folder in ("docs", "tools", "src/hardmix"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "links.py", tmp_path / "tools")
    (tmp_path / "src/hardmix/queue.py").write_text("class Queue:\n    def put(self): ...\n")
    page = tmp_path / "docs" / "page.md"
    link = "[`{}`](../src/hardmix/{})"
    page.write_text(" ".join(link.format(name, "queue.py") for name in ("Queue", "Queue.put")))
    assert run(str(tmp_path / "tools" / "links.py")).returncode == 0
    for name, file in [("get", "queue.py"), ("Queue", "memory.py"), ("Queue", "queue.py#L1")]:
        page.write_text(link.format(name, file))
        assert run(str(tmp_path / "tools" / "links.py")).returncode == 1


def test_only_rooms_stand_at_the_top():
    package = Path(hardmix.__file__).parent
    public = {"config", "losses", "strategies"}
    assert {file.stem for file in package.glob("*.py")} == {
        "__init__",
        "__main__",
        "errors",
    } | public


def test_the_readmes_loop_runs():
    import torch

    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    views = [
        (torch.randn(4, 128, requires_grad=True), torch.randn(4, 128), torch.arange(4))
        for _ in range(2)
    ]
    exec(block, {"embeddings_of_two_views": views})
    assert all(query.grad.isfinite().all() for query, _, _ in views)


def test_a_reader_that_leaves_is_no_defect():
    python = shlex.quote(sys.executable)
    command = f"{python} -m hardmix pretrain --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "141"
    assert done.stderr == ""


WITHOUT_THE_EXTRA = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.split(".")[0])

sys.meta_path.insert(0, Missing())
"""


def without_the_extra(program):
    """Run a program where only the dependencies of the library itself can be imported."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extra = tomllib.load(file)["project"]["optional-dependencies"]["cli"]
    names = {"pillow": "PIL"}
    missing = {names.get(Requirement(text).name, Requirement(text).name) for text in extra}
    return run("-c", WITHOUT_THE_EXTRA.format(missing=missing) + program)


def test_the_library_needs_torch_numpy_and_jaxtyping_alone():
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)["project"]["dependencies"]
    assert {Requirement(text).name for text in needed} == {"torch", "numpy", "jaxtyping"}
    program = """
import hardmix, hardmix.integrations, hardmix.losses, hardmix.strategies, torch
for module in (hardmix.losses, hardmix.strategies, hardmix.config, hardmix.integrations):
    for name in module.__all__:
        getattr(module, name)
memory = hardmix.MemoryQueue(64, 8)
hardmix.MochiLoss(4, 4, 2)(torch.randn(3, 8), torch.randn(3, 8), memory)
memory.enqueue(hardmix.gather(torch.randn(3, 8)))
hardmix.alignment(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64))
try:
    hardmix.load_encoder
except ImportError as error:
    print(error)
"""
    done = without_the_extra(program)
    assert done.returncode == 0, done.stderr
    assert re.match(r"hardmix.load_encoder needs \w+: pip install 'hardmix\[cli\]'", done.stdout)


def test_the_command_line_without_its_extra_says_so_in_one_sentence():
    done = without_the_extra("from hardmix.__main__ import main; main()")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'hardmix[cli]'" in done.stderr


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(name, extras, found):
    """Add what a package needs, and what that needs, as far as it is installed."""
    new = {*extras, ""} - found.get(canonical(name), set())
    if not new:
        return
    try:
        requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    found.setdefault(canonical(name), set()).update(new)
    for each in map(Requirement, requirements):
        if each.marker is None or any(each.marker.evaluate({"extra": one}) for one in new):
            needed(each.name, each.extras, found)


def test_the_constraints_name_every_package_that_is_installed_for_hardmix():
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    pins = {
        canonical(name): version for name, _, version in (each.partition("==") for each in lines)
    }
    found = {}
    needed("hardmix", {"dev"}, found)
    assert len(found) > 20
    assert sorted(found.keys() - pins.keys()) == ["hardmix"]


def test_releases_with_known_flaws_in_what_we_use_are_not_admitted():
    bounds = {"pillow": "12.3", "lightning": "2.6.6", "pytorch-lightning": "2.6.6"}
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    named = [Requirement(text) for group in groups for text in group]
    for name, first in bounds.items():
        (requirement,) = (each for each in named if each.name == name)
        assert str(requirement.specifier) == f">={first}"


def test_the_citation_names_this_version_and_the_paper():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == hardmix.__version__
    assert cited["preferred-citation"]["title"] in (ROOT / "README.md").read_text()
