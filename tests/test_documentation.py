"""What README, CONTRIBUTING, CHANGELOG and the guides say is held to the code: links, code, command lines, messages.

Nothing is run and no framework is imported: names and signatures are read from the source.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from horovod_abs.cli import app
from horovod_abs.examples.arguments import parse

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "notebooks" / "guides"
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *sorted(GUIDES.glob("*.md"))]
BINDINGS = ("horovod_abs.torch", "horovod_abs.tensorflow", "horovod_abs.tensorflow.keras")
FOREIGN_ATTRIBUTES = {"zero_grad", "param_groups", "build", "variables", "iterations", "learning_rate"}
"""Of the frameworks' own optimizers."""
FOREIGN_KEYWORDS = {"drop_last", "in_order", "initial_epoch", "sparse"}
"""Of the frameworks' own functions, where the text speaks of them."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# -- what is in a page -------------------------------------------------------------------------------------------------


class Code(NamedTuple):
    """A piece of code in a page.

    Attributes:
        language: Of a fenced block; ``"indented"`` or ``"inline"`` otherwise.
        text: The code.
    """

    language: str
    text: str


def codes(page: Path) -> list[Code]:
    """Blocks in the page's order, and then what stands within lines."""
    text = page.read_text()
    fenced = [Code(*found) for found in re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", text)]
    rest = re.sub(r"(?ms)^```.*?^```$", "", text)
    indented = [Code("indented", block) for block in re.findall(r"(?m)(?:^    .*\n?)+", rest)]
    rest = re.sub(r"(?m)^    .*$", "", rest)
    return [*fenced, *indented, *(Code("inline", found.replace("\n", " ")) for found in re.findall(r"`([^`]+)`", rest))]


def python_blocks(page: Path) -> Iterator[str]:
    """Blocks of Python, and of a diff what it leads to."""
    for code in codes(page):
        if code.language == "python":
            yield code.text
        elif code.language == "diff":
            yield "\n".join(line[1:] for line in code.text.splitlines() if not line.startswith("-"))


def code_lines(page: Path) -> Iterator[str]:
    """Lines that could be a shell's, with those put together that go on in the next."""
    for code in codes(page):
        if code.language not in ("python", "diff", "yaml"):
            yield from re.sub(r"\\\n\s*", "", code.text).splitlines()


# -- what is in the code -----------------------------------------------------------------------------------------------

Definition = ast.FunctionDef | ast.ClassDef


def source_of(module: str) -> Path | None:
    """The file of a module of ours or of Horovod's."""
    top, *rest = module.split(".")
    if top == "horovod_abs":
        folder = ROOT / top
    else:
        spec = importlib.util.find_spec(top)
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent
    path = folder.joinpath(*rest)
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None


@functools.cache
def names_of(module: str) -> dict[str, str | Definition]:
    """What a module binds, at its top: definitions, ``"module:name"`` for what it imports, "" for all else."""
    path = source_of(module)
    assert path is not None, module
    names: dict[str, str | Definition] = {}
    for node in _top_level(ast.parse(path.read_text()).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Import):
            names.update({alias.asname or alias.name.split(".")[0]: f"{alias.name}:" for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if alias.name == "*":
                    names = {**names_of(node.module), **names}
                else:
                    names[alias.asname or alias.name] = f"{node.module}:{alias.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update({target.id: "" for target in targets if isinstance(target, ast.Name)})
    return names


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers"):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler) or part == "handlers":
                yield from _top_level(getattr(node, part, []))


def definition(module: str, name: str) -> Definition | None:
    """Where something of ours is defined, however it was imported; ``None`` if it is nothing with a signature."""
    found = names_of(module).get(name)
    if isinstance(found, str) and found.startswith("horovod_abs"):
        origin, _, original = found.partition(":")
        return definition(origin, original) if original and source_of(f"{origin}.{original}") is None else None
    return found if not isinstance(found, str) else None


def exists(dotted: str) -> bool:
    """Whether ``package.module.name`` is there; beyond a class or function it is taken for granted."""
    parts = dotted.split(".")
    module = parts[0]
    for part in parts[1:]:
        if source_of(f"{module}.{part}") is not None:
            module = f"{module}.{part}"
        else:
            return part in names_of(module)
    return True


def keywords_of(found: Definition) -> set[str] | None:
    """Keywords that a function or a class takes; ``None`` for any."""
    if isinstance(found, ast.ClassDef):
        inits = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        if not inits:
            return {n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        found = inits[0]
    if found.args.kwarg:
        return None
    return {argument.arg for argument in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)}


@functools.cache
def methods() -> dict[str, ast.FunctionDef]:
    """Of a distributed optimizer, in either framework."""
    mixins = [("horovod_abs.rounds", "RoundsMixin")]
    mixins += [(f"{binding}.optimizer", "DistributedOptimizerMixin") for binding in BINDINGS[:2]]
    found = [definition(*mixin) for mixin in mixins]
    return {n.name: n for each in found if each for n in each.body if isinstance(n, ast.FunctionDef)}


@functools.cache
def all_keywords() -> set[str]:
    """Parameters of everything that the package defines."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "horovod_abs").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    return arguments | {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


# -- links -------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```$", "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_names_every_guide() -> None:
    for guide in GUIDES.glob("*.md"):
        assert f"(notebooks/guides/{guide.name})" in (ROOT / "README.md").read_text(), guide.name


# -- Python ------------------------------------------------------------------------------------------------------------


@pages
def test_python_speaks_of_what_is_there(page: Path) -> None:
    binding = BINDINGS[0]
    for block in python_blocks(page):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                ours = [alias for alias in node.names if alias.name.split(".")[0] in ("horovod", "horovod_abs")]
                for alias in ours:
                    assert source_of(alias.name) is not None, alias.name
                    if alias.asname == "hvd":
                        binding = alias.name
            elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("horovod", "horovod_abs"):
                for alias in node.names:
                    assert exists(f"{node.module}.{alias.name}"), f"{node.module}.{alias.name}"
        imported = {
            alias.asname or alias.name: f"{node.module}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("horovod_abs")
            for alias in node.names
        }
        for node in ast.walk(tree):
            check_attribute(node, binding)
            if isinstance(node, ast.Call):
                check_call(node, binding, imported)


def check_attribute(node: ast.AST, binding: str) -> None:
    if not isinstance(node, ast.Attribute):
        return
    dotted = ast.unparse(node)
    if dotted.startswith("hvd."):
        assert exists(f"{binding}.{dotted.removeprefix('hvd.')}"), f"{dotted} in {binding}"
    if dotted.startswith("optimizer.") and dotted.count(".") == 1:
        assert node.attr in {*methods(), *FOREIGN_ATTRIBUTES}, dotted


def check_call(call: ast.Call, binding: str, imported: dict[str, str]) -> None:
    owner, _, name = ast.unparse(call.func).rpartition(".")
    found: Definition | None = None
    if owner == "hvd" or owner.startswith("hvd."):
        module = ".".join([binding, *owner.split(".")[1:]])
        found = definition(module, name) if source_of(module) else None
    elif owner == "optimizer":
        found = methods().get(name)
    elif not owner and name in imported:
        found = definition(imported[name], name)
    known = keywords_of(found) if found is not None else None
    if known is not None:
        assert {keyword.arg for keyword in call.keywords} <= known, ast.unparse(call)


@pages
def test_what_the_text_names_is_there(page: Path) -> None:
    for code in codes(page):
        for name in re.findall(r"(?<![\w.])hvd\.([\w.]*\w)", code.text) if code.language == "inline" else ():
            assert any(exists(f"{binding}.{name}") for binding in BINDINGS), f"hvd.{name}"
        for name in re.findall(r"(?<![\w.])optimizer\.(\w+)", code.text) if code.language == "inline" else ():
            assert name in {*methods(), *FOREIGN_ATTRIBUTES}, f"optimizer.{name}"
        for name in re.findall(r"(?<![\w./-])horovod_abs(?:\.\w+)+", code.text):
            assert exists(name), name
        if code.language == "inline" and (found := re.match(r"([a-z_]+)=", code.text)):
            assert found[1] in all_keywords() | FOREIGN_KEYWORDS, code.text
        if code.language == "inline" and re.fullmatch(r"[A-Z]\w+\(.*\)", code.text):
            check_inline_call(code.text)


def check_inline_call(text: str) -> None:
    call = ast.parse(text.replace("…", "..."), mode="eval").body
    assert isinstance(call, ast.Call)
    found = [definition(binding, ast.unparse(call.func)) for binding in BINDINGS]
    known = [keywords_of(each) for each in found if each is not None]
    given = {keyword.arg for keyword in call.keywords}
    assert not known or any(each is None or given <= each for each in known), text


# -- command lines -----------------------------------------------------------------------------------------------------


def words(line: str) -> list[str]:
    """Of one command, without what a shell would do with its result."""
    found = shlex.split(line, comments=True)
    ends = [index for index, word in enumerate(found) if word in ("&&", "|", ";", ">", ">>", "<")]
    return found[: ends[0]] if ends else found


@pages
def test_commands_and_their_options_are_there(page: Path) -> None:
    for line in code_lines(page):
        for command in re.findall(r"(?<![\w/.-])horovod-abs(?: .*)?$", line):
            check_command(words(command)[1:])
        for module, rest in re.findall(r"python -m horovod_abs\.examples\.(\w+_mnist)((?: .*)?)$", line):
            assert source_of(f"horovod_abs.examples.{module}") is not None
            parse("", words(re.sub(r"replay:\S+", "sync", rest)))  # it would read the log


def check_command(arguments: list[str]) -> None:
    """Take a command line apart as the program would, without the checks of its values."""
    command = typer.main.get_command(app)
    while True:
        context = typer.Context(command, **{**command.context_settings, "ignore_unknown_options": False})
        command.make_parser(context).parse_args(list(arguments))
        subcommands = getattr(command, "commands", None)
        if not arguments or subcommands is None or arguments[0].startswith("-"):
            return
        assert arguments[0] in subcommands, arguments[0]
        command, arguments = subcommands[arguments[0]], arguments[1:]


@pages
def test_make_has_the_targets(page: Path) -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):.*##", (ROOT / "Makefile").read_text()))
    for line in code_lines(page):
        for target in re.findall(r"(?:^|&& )\s*make (?:[A-Z_]+=\S* )*([a-z-]+)", line):
            assert target in targets, target


# -- messages ----------------------------------------------------------------------------------------------------------

MESSAGES = {
    *("ValueError", "TypeError", "RuntimeError", "ModuleNotFoundError"),
    *("RunError", "Mismatch", "ExchangeTimeout", "ExchangeFailed", "RunLogError", "ReplayError"),
    *("ClusterError", "LaunchError", "Problem", "typer.BadParameter"),
    *("logger.warning", "warnings.warn"),
}
TOLD_TO_USERS = [
    *sorted((ROOT / "horovod_abs").glob("*.py")),
    *(ROOT / "horovod_abs" / "core" / f"{name}.py" for name in ("clocks", "scaling")),
    *(path for part in ("install", "observe", "plan") for path in sorted((ROOT / "horovod_abs" / part).glob("*.py"))),
    *sorted((ROOT / "horovod_abs" / "torch").glob("*.py")),
    *sorted((ROOT / "horovod_abs" / "tensorflow").rglob("*.py")),
    ROOT / "horovod_abs" / "bench" / "launch.py",
]
"""Without what the core says to a driver that is wrong, and what benchmarks and simulations say of their numbers."""


def messages(paths: Iterable[Path]) -> Iterator[str]:
    """What errors and warnings in some files say, with ``…`` for what is filled in."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in MESSAGES:
                said = [text for text in map(_text, node.args) if text][:1]
                yield from [text for text in said if re.search("[a-z]", text)]  # else it passes on another's


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub("%[ds]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in node.values)
    return ""


def told() -> list[str]:
    """The messages that the guide to troubles lists: the first cells of its tables."""
    rows = re.findall(r"(?m)^\| ``? ?(.*?) ?``? \|", (GUIDES / "troubleshooting.md").read_text())
    assert rows
    return rows


def says(message: str, row: str) -> bool:
    """Whether a row quotes a message, or a part of it."""
    parts = (re.escape(part.strip()) for part in row.split("…"))
    return re.search(".*".join(parts), message) is not None


def test_the_guide_to_troubles_has_every_message() -> None:
    missing = [message for message in messages(TOLD_TO_USERS) if not any(says(message, row) for row in told())]
    assert not missing


def test_the_guide_to_troubles_has_no_message_that_is_not_ours() -> None:
    known = list(messages((ROOT / "horovod_abs").rglob("*.py")))
    foreign = [row for row in told() if not any(says(message, row) for message in known)]
    assert not foreign
