"""Writes docs/api.md out of the source: `python tools/api.py [--check]`.

Signatures and docstrings are read as they stand in the files, so that shapes stay readable and
nothing heavy is imported. Settings and commands are in tools/api_settings.py.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from api_settings import SETTINGS, assigned, command, config, link, notes, table

from hardmix.commands import main as cli

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
SOURCE = Path(__file__).parent.parent / "src"

INTRODUCTION = """\
# Reference

Every public name, setting and command. [tools/api.py](../tools/api.py) writes this page out of the
source: change a docstring there and run `make docs`. The [library page](library.md) shows the names
at work.

Import each name from the module in its heading: `hardmix`, `hardmix.losses`, `hardmix.strategies`,
`hardmix.config`, `hardmix.explore` or `hardmix.integrations`.
The types in signatures are there to be read: a program passes a string or a function.

Axes in a shape: batch (queries), K (negatives), N (the hardest of them), S (synthetic points), dim
(of an embedding)."""

GROUPS = {
    "The loss": "MochiLoss",
    "The memory": "MemoryQueue",
    "The paper's functions": """
        contrast Contrast plan_mochi MixPlan QUERY KEY strategies.VECTOR hardest_negatives
        HardestNegatives materialize losses.logits losses.Logits losses.log_mass""",
    "Strategies": """
        strategies.Strategy strategies.Candidates losses.Embeddings strategies.STRATEGIES
        strategies.plan_points strategies.plan_mixed_with_key strategies.plan_beta_weighted
        strategies.plan_softmax_sampled strategies.plan_fixed_percentage strategies.plan_synco
        strategies.plan_mixcse strategies.FeatureTransformation
        strategies.extrapolated_positives strategies.mixed_queue strategies.dropped_negatives""",
    "Weights of negatives": """
        losses.WEIGHTS losses.NegativeWeights losses.WeightLine losses.hcl_weights
        losses.hardness_weights losses.given_weights losses.logq_weights losses.ring_weights""",
    "Denominators": """
        losses.DENOMINATORS losses.Denominator losses.Masses losses.decoupled
        losses.decoupled_weighted losses.debiased losses.hcl losses.dual_temperature
        losses.supcon_in""",
    "Filters of negatives": """
        losses.FILTERS losses.NegativeFilter losses.above_positive losses.share_of_positive
        losses.same_labels""",
    "Large batches": "backward_in_chunks",
    "Other libraries": """
        integrations.MixedNegativesLoss integrations.TwoTowerLoss integrations.NTXentLoss
        integrations.MomentumContrast integrations.MixingOptions""",
    "Diagnostics": """
        matching_probability proxy_accuracy mixing.diagnostics.ProxyAccuracy
        false_negatives_top false_parents mixing.diagnostics.FalseParents synthetic_mass
        negative_mass mixing.diagnostics.NegativeMass""",
    "Embedding space": "alignment uniformity",
    "Training": """
        pretrain Run recipes recipes.imagenet100 recipes.imagenet1k recipes.cifar10
        recipes.demo mixing_started config.decreasing gather""",
    "Images": "ImageSet UnreadableImage open_images draw_shapes",
    "Encoders": "load_encoder evaluation.features.TrainedEncoder export import_weights allow_code",
    "Evaluation": """
        open_evaluated_run evaluation.evaluated_run.EvaluatedRun extract
        evaluation.features.Features knn_accuracy probe_accuracy accuracy_of
        evaluation.accuracy.Accuracy runtime.device.choose_compute runtime.device.Compute""",
    "Figures and reports": """
        analyze analysis.analyze.Analysis analysis.picture.Picture write_report""",
    "Errors and version": "InputError OutputError UnfinishedError __version__",
    "Types in signatures": """
        settings.named_choices.StrategyName settings.named_choices.RealNegatives
        settings.named_choices.QueueStart settings.named_choices.WeightsName
        settings.named_choices.DenominatorName settings.named_choices.FilterName
        settings.named_choices.Reduction mixing.loss.Temperature mixing.loss.CallOptions
        settings.named_choices.DataName settings.methods.MethodName
        settings.methods.METHOD_FACTS runs.folder.Resume data.own_views.Pipeline
        training.metric_logs.OnLog""",
}
"""Public names by what they are for, each without its `hardmix.`. Types are there to be read: a
program passes a string or a function, and imports none of them."""

ABOUT_SETTINGS = """\
Frozen dataclasses, with keywords only. `--data.num-images` on the command line is
`PretrainConfig(data=DataConfig(num_images=...))` in Python. The defaults here are those of the
classes; a [recipe](recipes.md) changes some, and `hardmix pretrain RECIPE --help-all` shows its
own, with `--method` those of another method, without the settings that it does not use."""

ABOUT_COMMANDS = """\
`hardmix COMMAND --help` shows the same in a terminal (`pretrain --help-all`). Commands that take a
RUN look at the run's own images unless `--data.*` names others."""

HIDDEN = {"__init__", "extra_repr"}
"""Methods that have no entry: the first stands with its class, the second is for print()."""


class Module(NamedTuple):
    """A source file, read."""

    file: Path
    text: str
    body: list[ast.stmt]


@cache
def read(name: str) -> Module:
    """The source of a module or package."""
    path = SOURCE.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = file.read_text(encoding="utf-8")
    return Module(file, text, ast.parse(text).body)


def home(module: str, name: str) -> str | None:
    """The module that a name is imported from, if it is imported at all."""
    for each in ast.walk(ast.Module(read(module).body, [])):
        if isinstance(each, ast.ImportFrom) and name in [alias.name for alias in each.names]:
            return str(each.module)
    return None


def public_module(name: str) -> str | None:
    """Where a module that users import from `hardmix` lies, such as `recipes`."""
    where = home("hardmix", name.removeprefix("hardmix."))
    path = SOURCE.joinpath(*(where or "").split("."), f"{name.rpartition('.')[2]}.py")
    return f"{where}.{name.rpartition('.')[2]}" if where and path.is_file() else None


def exported() -> list[str]:
    """Return every public name, in full, but those of other libraries and of explore."""
    return [
        f"{module}.{alias.name}"
        for module in ("hardmix", "hardmix.config", "hardmix.losses", "hardmix.strategies")
        for block in read(module).body
        if isinstance(block, ast.If)
        for imported in block.body
        if isinstance(imported, ast.ImportFrom) and imported.module != "hardmix"
        for alias in imported.names
    ]


def definition(module: str, name: str) -> tuple[Module, ast.stmt]:
    """Where a public name is defined: in the module itself, or where that imports it from."""
    module = public_module(module) or module
    here = read(module)
    for each in here.body:
        if getattr(each, "name", assigned(each)) == name:
            return here, each
    where = home(module, name)
    if where is None:
        sys.exit(f"tools/api.py: {module} has no {name}; correct GROUPS.")
    return definition(where, name)


def public_names(group: str) -> list[str]:
    """The names of a group, in full."""
    return [f"hardmix.{each}" for each in group.split()]


def heading(name: str) -> str:
    """An entry's title: classes are marked, as two names may differ in a capital letter alone."""
    if public_module(name):
        return f"`{name}`"
    _, statement = definition(*name.rsplit(".", 1))
    return f"class `{name}`" if isinstance(statement, ast.ClassDef) else f"`{name}`"


def entry(name: str) -> str:
    """A public name: signature, docstring, and the parts of a class."""
    if whole := public_module(name):
        module = read(whole)
        text = ast.get_docstring(ast.Module(module.body, [])) or ""
        about = [code(f"from hardmix import {name.removeprefix('hardmix.')}"), text]
    else:
        module, statement = definition(*name.rsplit(".", 1))
        about = list(described(module, statement))
    path = module.file.relative_to(SOURCE.parent).as_posix()
    parts = [f"### {heading(name)}", *about, f"[{path}](../{path})"]
    return "\n\n".join(parts)


def described(module: Module, statement: ast.stmt) -> Iterator[str]:
    """The paragraphs of an entry."""
    if isinstance(statement, ast.FunctionDef):
        yield code(signature(module, statement))
        yield docstring(statement)
    elif isinstance(statement, ast.ClassDef):
        yield from described_class(module, statement)
    else:
        yield code(ast.get_source_segment(module.text, statement) or "")
        name = str(assigned(statement))
        if name not in notes(module.body):
            sys.exit(f"tools/api.py: {name} in {module.file.name} has no docstring; write one.")
        yield notes(module.body)[name]


def described_class(module: Module, statement: ast.ClassDef) -> Iterator[str]:
    """A class: how it is made, its docstring, its fields, its methods."""
    methods = {each.name: each for each in statement.body if isinstance(each, ast.FunctionDef)}
    start = methods.get("__init__")
    if start is None:
        yield code(header(module, statement))
    else:
        made = signature(module, start).replace("__init__", statement.name, 1)
        yield code(made.removesuffix(" -> None"))
    yield docstring(statement)
    if start is not None and ast.get_docstring(start):
        yield docstring(start)
    meaning = notes(statement.body)
    rows = [
        [f"`{name}`", f"`{annotation(module, each)}`", meaning.get(name, "")]
        for each in statement.body
        if isinstance(each, ast.AnnAssign) and (name := assigned(each))
    ]
    if rows:
        yield table(["field", "type", "meaning"], rows)
    for name, method in methods.items():
        special = name.startswith("__") and ast.get_docstring(method) is not None
        if name not in HIDDEN and (special or not name.startswith("_")):
            yield code(f"{statement.name}.{signature(module, method)}")
            yield docstring(method)


def header(module: Module, statement: ast.FunctionDef | ast.ClassDef) -> str:
    """A definition's lines before its body, as they stand in the file."""
    lines = module.text.splitlines()[statement.lineno - 1 : statement.body[0].lineno - 1]
    return textwrap.dedent("\n".join(lines)).strip().removesuffix(":")


def signature(module: Module, function: ast.FunctionDef) -> str:
    """How a function is called: its header without `def` and `self`."""
    call = header(module, function).removeprefix("def ")
    return re.sub(r"\((\s*)(self|cls)(,\s*|(?=\)))", r"(\1", call, count=1)


def annotation(module: Module, field: ast.AnnAssign) -> str:
    """A field's type, and its default if it has one, as they stand in the file."""
    parts = [
        ast.get_source_segment(module.text, part)
        for part in (field.annotation, field.value)
        if part
    ]
    return " = ".join(str(part) for part in parts)


def docstring(statement: ast.FunctionDef | ast.ClassDef) -> str:
    """A docstring as Markdown: lines that begin with an argument's name become a list."""
    text = ast.get_docstring(statement)
    if text is None:
        sys.exit(f"tools/api.py: {statement.name} has no docstring; write one.")
    arguments = {each.arg for each in ast.walk(statement) if isinstance(each, ast.arg)}
    listed = re.compile(r"^(\w+): ", re.MULTILINE)
    return listed.sub(lambda word: f"- `{word[1]}`: " if word[1] in arguments else word[0], text)


def code(source: str) -> str:
    """A block of Python."""
    return f"```python\n{source}\n```"


def page() -> str:
    """The whole page."""
    groups = {title: public_names(group) for title, group in GROUPS.items()}
    named = {name for names in groups.values() for name in names}
    named |= {f"hardmix.config.{kind.__name__}" for kind in SETTINGS}
    if missing := [name for name in exported() if name not in named]:
        sys.exit(f"tools/api.py: not listed are {', '.join(missing)}: give each a place in GROUPS.")
    summaries = [
        [link(f"`hardmix {name}`", f"hardmix {name}"), each.__doc__ or ""]
        for name, each in cli.COMMANDS.items()
    ]
    parts = [INTRODUCTION, contents(groups)]
    for title, names in groups.items():
        parts += [f"## {title}", *(entry(name) for name in names)]
    parts += ["## Settings", ABOUT_SETTINGS, *(config(*each) for each in SETTINGS.items())]
    parts += ["## Command line", ABOUT_COMMANDS, table(["command", "what it does"], summaries)]
    parts += [inspect.getdoc(cli.main) or "", *(command(name) for name in cli.COMMANDS)]
    return "\n\n".join(parts) + "\n"


def contents(groups: dict[str, list[str]]) -> str:
    """The list of sections, with the names in each."""
    lines = []
    for title, names in groups.items():
        links = [link(f"`{name.removeprefix('hardmix.')}`", heading(name)) for name in names]
        lines.append(f"- {link(title, title)}: {', '.join(links)}")
    return "\n".join([*lines, *(f"- {link(each, each)}" for each in ("Settings", "Command line"))])


def main() -> None:
    """Write the page, or with --check say that it is stale."""
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE.name} differs from the source's docstrings: run `make docs`.")


if __name__ == "__main__":
    main()
