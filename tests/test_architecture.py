"""The structure: who may import whom, how long a file may be, what must not be loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("autotune", "runtime")

# Rooms from the top down. A room may import those below it, through helpers or not, never one
# above it.
ROOMS = (
    "autotune.cli",
    "autotune.search",
    "autotune.study",
    "autotune.trial",
    "autotune.memory",
    "autotune.profile",
    "autotune.space",
    "autotune.records",
    "runtime.launch",
    "runtime.measure",
    "runtime.engine",
    "runtime.sharding",
    "runtime.model_spec",
    "runtime.model_file",
    "runtime.measurement",
    "runtime.config",
    "runtime.errors",
)

TOP_LEVEL = {
    *(".ci", ".gitignore", "Makefile", "constraints.txt", "pyproject.toml"),
    *("CHANGELOG.md", "LICENSE", "README.md"),
    *("autotune", "runtime", "studies", "tests"),
}


@dataclass(frozen=True)
class Import:
    """One import statement, at any depth of its module."""

    importer: str
    imported: str
    """Dotted name of a module of ours, or the top-level name of another's."""
    line: int
    runs: bool
    """False where only the type checker reads it."""


def _sources(*folders: str) -> list[Path]:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in paths if "__pycache__" not in path.parts)


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {_module(path): ast.parse(path.read_bytes()) for path in _sources(*PACKAGES)}


def _type_checking_only(tree: ast.Module) -> set[ast.AST]:
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    return {inner for block in blocks for line in block.body for inner in ast.walk(line)}


def _imports(module: str, tree: ast.Module) -> Iterator[Import]:
    unread = _type_checking_only(tree)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            # `from package import module` names a module; `from module import name` does not.
            inner = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in TREES else base for name in inner]
        for name in names:
            ours = name.partition(".")[0] in PACKAGES or name.startswith(".")
            imported = name if ours else name.partition(".")[0]
            yield Import(module, imported, node.lineno, runs=node not in unread)


IMPORTS = [item for module, tree in TREES.items() for item in _imports(module, tree)]


def _reachable(start: str, *, type_checking: bool) -> dict[str, str]:
    """Modules of ours that `start` imports, directly or not → the module that imports them."""
    edges: dict[str, set[str]] = {}
    for item in IMPORTS:
        if item.imported in TREES and (item.runs or type_checking):
            edges.setdefault(item.importer, set()).add(item.imported)
    via: dict[str, str] = {}
    queue = [start]
    while queue:
        module = queue.pop()
        for imported in edges.get(module, ()):
            if imported not in via:
                via[imported] = module
                queue.append(imported)
    return via


def _chain(via: dict[str, str], start: str, end: str) -> str:
    chain = [end]
    while len(chain) == 1 or chain[-1] != start:
        chain.append(via[chain[-1]])
    return " imports ".join(reversed(chain))


def test_every_room_exists() -> None:
    assert [room for room in ROOMS if room not in TREES] == []


@pytest.mark.parametrize("module", TREES)
def test_no_import_cycle(module: str) -> None:
    via = _reachable(module, type_checking=True)
    assert module not in via, _chain(via, module, module)


@pytest.mark.parametrize("room", ROOMS[1:])
def test_rooms_import_downwards(room: str) -> None:
    via = _reachable(room, type_checking=False)
    above = [other for other in ROOMS[: ROOMS.index(room)] if other in via]
    assert above == [], _chain(via, room, above[0])


def test_runtime_knows_nothing_of_the_tuner() -> None:
    forbidden = {"autotune", "optuna", "pandas", "matplotlib", "click", "rich", "jinja2"}
    found = [
        f"{item.importer}:{item.line} imports {item.imported}"
        for item in IMPORTS
        if item.importer.partition(".")[0] == "runtime"
        and item.imported.partition(".")[0] in forbidden
    ]
    assert found == []


def test_imports_are_absolute_and_resolve() -> None:
    found = [
        f"{item.importer}:{item.line} imports {item.imported}"
        for item in IMPORTS
        if item.imported.startswith(".")
        or (item.imported.partition(".")[0] in PACKAGES and item.imported not in TREES)
    ]
    assert found == []


@pytest.mark.parametrize("path", _sources(*PACKAGES, "studies", "tests"), ids=_module)
def test_files_stay_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 400, f"{path.relative_to(ROOT)} has {lines} lines: split it"


def test_public_things_have_docstrings() -> None:
    """Modules, classes and functions; methods often say what their base class has said."""
    missing = [module for module, tree in TREES.items() if ast.get_docstring(tree) is None]
    missing += [
        f"{module}.{node.name}"
        for module, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
    ]
    assert missing == []


def _modules_loaded_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return set(result.stderr.splitlines())


def test_help_loads_neither_torch_nor_matplotlib() -> None:
    loaded = _modules_loaded_by(
        "sys.argv = ['autotune', '--help']\n"
        "from autotune.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as exit:\n    assert not exit.code, exit.code"
    )
    assert "autotune.cli" in loaded
    assert {"torch", "matplotlib"} & loaded == set()


@pytest.mark.parametrize("module", ["autotune.search", "runtime.launch"])
def test_the_searching_process_does_without_torch(module: str) -> None:
    loaded = _modules_loaded_by(f"import {module}")
    assert module in loaded
    assert "torch" not in loaded


def test_top_level_holds_only_what_belongs_there() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {Path(name).parts[0] for name in tracked} == TOP_LEVEL
