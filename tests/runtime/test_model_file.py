from __future__ import annotations

import ast
from pathlib import Path

import pytest

from runtime.errors import ModelFileError
from runtime.model_file import check_model_file, imported_modules, model_file_hash, user_error

GOOD = "def build_model(): ...\ndef make_batch(micro_batch_size): ...\n"


def write(folder: Path, content: str = GOOD, name: str = "model.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        "from somewhere import build_model, make_batch",
        "from somewhere import *",
        "from somewhere import make as build_model\nmake_batch = lambda size: None",
        "if True:\n    def build_model(): ...\n    make_batch: object = print",
        "class build_model: ...\nfor make_batch in (): ...",
        "globals()['build_model'] = globals()['make_batch'] = print",
    ],
)
def test_what_may_define_both_functions_passes(tmp_path: Path, content: str) -> None:
    assert isinstance(check_model_file(write(tmp_path, content)), ast.Module)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"Python file, but .*/none\.py does not exist$"):
        check_model_file(tmp_path / "none.py")
    with pytest.raises(ModelFileError, match="is a folder"):
        check_model_file(tmp_path)


@pytest.mark.parametrize(
    ("content", "met"),
    [
        ("", "no function"),
        ("import torch\nx = 1\n", "no function"),
        ("def build(): ...\ndef _hidden(): ...\ndef make_batch(n): ...", "build(), make_batch()"),
    ],
)
def test_no_build_model(tmp_path: Path, content: str, met: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ModelFileError) as caught:
        check_model_file(path)
    assert str(caught.value) == f"{path} must define build_model(), but it defines {met}"


def test_no_make_batch(tmp_path: Path) -> None:
    path = write(tmp_path, "def build_model(): ...")
    with pytest.raises(ModelFileError) as caught:
        check_model_file(path)
    assert str(caught.value) == (
        f"{path} must define make_batch(micro_batch_size), but it defines build_model()"
    )


@pytest.mark.parametrize(
    ("content", "line"),
    [(b"x = 1\ndef build_model(:\n", ":2"), (b"x = '\xff'", ""), (b"x = 1\0", "")],
)
def test_a_syntax_error_names_its_line(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "model.py"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        check_model_file(path)
    assert str(caught.value).startswith(f"{path}{line}")
    assert "not valid Python: " in str(caught.value)


@pytest.mark.parametrize("beside", ["runtime.py", "runtime/__init__.py", "runtime/helpers.py"])
def test_a_helper_with_the_name_of_our_package_is_refused(tmp_path: Path, beside: str) -> None:
    write(tmp_path, "", beside)
    path = write(tmp_path, "from runtime.helpers import f\n" + GOOD)
    with pytest.raises(ModelFileError, match=r"imports 'runtime', .*: rename") as caught:
        check_model_file(path)
    assert str(tmp_path / beside.partition("/")[0]) in str(caught.value)


def test_a_stray_file_of_that_name_is_no_matter_unless_imported(tmp_path: Path) -> None:
    write(tmp_path, "", "runtime.py")
    check_model_file(write(tmp_path, GOOD))


def test_imported_modules() -> None:
    source = "import b.c, a as x\nfrom d.e import f\nfrom . import g\ndef h():\n    import i\n"
    assert imported_modules(ast.parse(source)) == ["a", "b", "d", "i"]


def test_hash_follows_the_modules_beside_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "import helper, torch\n" + GOOD)
    write(tmp_path, "from package import deep", "helper.py")
    write(tmp_path, "", "package/__init__.py")
    write(tmp_path, "x = 1", "package/deep.py")
    write(tmp_path, "", "unrelated.py")
    seen = {model_file_hash(path)}
    for name, changes in [
        ("model.py", True),
        ("helper.py", True),
        ("package/deep.py", True),
        ("unrelated.py", False),
    ]:
        source = tmp_path / name
        source.write_text(source.read_text() + "\ny = 2\n")
        assert (model_file_hash(path) not in seen) == changes
        seen.add(model_file_hash(path))


def test_hash_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    assert model_file_hash(write(tmp_path / "a")) == model_file_hash(write(tmp_path / "b"))


def test_hash_of_modules_that_import_each_other_or_do_not_parse(tmp_path: Path) -> None:
    path = write(tmp_path, "import one, broken\n" + GOOD)
    write(tmp_path, "import two", "one.py")
    write(tmp_path, "import one", "two.py")
    write(tmp_path, "def (", "broken.py")
    assert len(model_file_hash(path)) == 64


def test_user_error_names_the_last_line_of_the_users_own(tmp_path: Path) -> None:
    path = write(tmp_path, "import json\ndef f():\n    return json.loads('{')\n")
    space: dict[str, object] = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    try:
        space["f"]()  # type: ignore[operator]
    except ValueError as error:
        found = user_error(path, error, "f()")
    assert str(found).startswith(f"{path}:3: f() raised JSONDecodeError: Expecting property name")
    assert "Traceback (most recent call last)" in found.detail
    assert "json.loads" in found.detail


def test_user_error_keeps_to_one_line(tmp_path: Path) -> None:
    found = user_error(tmp_path / "model.py", RuntimeError("one\ntwo"), "build_model()")
    assert str(found) == f"{tmp_path / 'model.py'}: build_model() raised RuntimeError: one"
    bare = user_error(tmp_path / "model.py", RuntimeError(), "build_model()")
    assert str(bare) == f"{tmp_path / 'model.py'}: build_model() raised RuntimeError"
