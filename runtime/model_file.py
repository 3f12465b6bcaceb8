"""What can be known of a model file without running it: its imports, its hash, its errors.

Kept apart from `runtime.model_spec` because it needs no torch.
"""

from __future__ import annotations

import ast
import hashlib
import traceback
from collections.abc import Iterable
from pathlib import Path

from runtime.errors import ModelFileError

RESERVED_MODULES = ("autotune", "runtime")
REQUIRED = {"build_model": "build_model()", "make_batch": "make_batch(micro_batch_size)"}
"""What a model file must define, and how it is called."""


def check_model_file(path: Path) -> ast.Module:
    """The parsed file; what can be refused without running it is refused here.

    Raises:
        ModelFileError: no such file, a syntax error, a required function that nothing in it could
            define, or an import of a module that this tool's own packages would hide.
    """
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise ModelFileError(f"model file must be a Python file, but {path} {kind}")
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""
        raise ModelFileError(f"{path}{line}: not valid Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ModelFileError(f"{path}: not valid Python: {error}") from error
    except OSError as error:
        raise ModelFileError(f"{path} must be readable, but gave: {error.strerror}") from error
    for name in imported_modules(tree):
        if name in RESERVED_MODULES and _beside(path, name):
            raise ModelFileError(
                f"{path} imports {name!r}, a name that this tool's own package has: "
                f"rename {_beside(path, name)}"
            )
    for name in REQUIRED:
        if not _could_define(tree, name):
            functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
            raise missing_function(path, name, functions)
    return tree


def missing_function(path: Path, name: str, functions: Iterable[str]) -> ModelFileError:
    """The error of a file that defines `functions`, but not the required `name`."""
    met = ", ".join(f"{other}()" for other in functions if not other.startswith("_"))
    return ModelFileError(
        f"{path} must define {REQUIRED[name]}, but it defines {met or 'no function'}"
    )


def imported_modules(tree: ast.Module) -> list[str]:
    """Top-level names of the modules imported anywhere in `tree`, sorted, absolute imports only."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return sorted(names)


def model_file_hash(path: Path) -> str:
    """SHA-256 (hex) of the model file and of every module beside it that it imports, at any depth.

    Data files are not followed.
    """
    digest = hashlib.sha256()
    seen: set[Path] = set()
    queue = [path.resolve()]
    while queue:
        source = queue.pop(0)
        if source in seen:
            continue
        seen.add(source)
        content = source.read_bytes()
        digest.update(source.name.encode() + b"\0" + content)
        try:
            names = imported_modules(ast.parse(content))
        except (SyntaxError, ValueError):
            continue
        for name in names:
            beside = _beside(path.resolve(), name)
            if beside is not None:
                queue.extend(sorted(beside.rglob("*.py")) if beside.is_dir() else [beside])
    return digest.hexdigest()


def user_error(path: Path, error: BaseException, doing: str) -> ModelFileError:
    """`error`, raised by the user's code while `doing`, as one line with its file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).parent == path.parent]
    at = f"{own[-1].filename}:{own[-1].lineno}" if own else str(path)
    message = str(error).strip().splitlines()
    text = f"{at}: {doing} raised {type(error).__name__}"
    if message:
        text += f": {message[0]}"
    if isinstance(error, SystemExit):
        text += '; leave what a script does to `if __name__ == "__main__"`'
    return ModelFileError(text, "".join(traceback.format_exception(error)))


def _could_define(tree: ast.Module, name: str) -> bool:
    """Whether some statement binds `name`, or may do so in a way that only running it shows."""
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            bound = "*" if node.name == "*" else node.asname or node.name.partition(".")[0]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound = node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            bound = node.value  # globals()["build_model"] = ...
        else:
            continue
        if bound in (name, "*"):
            return True
    return False


def _beside(path: Path, module: str) -> Path | None:
    for candidate in (path.parent / f"{module}.py", path.parent / module):
        if candidate.is_file() or (candidate.is_dir() and any(candidate.glob("*.py"))):
            return candidate
    return None
