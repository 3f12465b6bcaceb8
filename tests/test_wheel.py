"""The built wheel, installed afresh, works in any folder, beside modules of the same names too."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("autotune", "runtime")

MODEL = """
import torch
from torch import nn

global_batch_size = 4

def build_model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

def make_batch(micro_batch_size):
    return torch.randn(micro_batch_size, 8)

def compute_loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build leaves files in its source."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that has the wheel, and this one's dependencies."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    programs = home / "bin"
    _pip("--python", str(programs / "python"), "install", "--no-deps", "--no-index", str(wheel))
    purelib = sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)})
    # A .pth file's folders have their own .pth files left unread: no editable install comes along.
    Path(purelib, "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return programs


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with a model file and a stray `runtime.py`."""
    (tmp_path / "runtime.py").write_text("raise RuntimeError('the stray runtime.py was imported')")
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def _run(folder: Path, *command: str | Path, timeout: float = 120) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_wheel_holds_the_packages_whole(wheel: Path) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_installed_packages_are_the_ones_found(programs: Path, elsewhere: Path) -> None:
    (elsewhere / "runtime.py").unlink()
    where = "import autotune, runtime; print(autotune.__file__, runtime.__file__)"
    found = _run(elsewhere, programs / "python", "-c", where).split()
    assert [Path(path).is_relative_to(programs.parent) for path in found] == [True, True]


def test_the_program_beside_stray_modules(programs: Path, elsewhere: Path) -> None:
    (elsewhere / "autotune.py").write_text("raise RuntimeError('the stray autotune.py')")
    assert "search" in _run(elsewhere, programs / "autotune", "--help")
    schema = json.loads(_run(elsewhere, programs / "autotune", "schema"))
    assert "zero_stage" in schema["properties"]


def test_the_module_beside_a_stray_module(programs: Path, elsewhere: Path) -> None:
    """Beside a stray `autotune.py` Python itself would run that file."""
    assert "search" in _run(elsewhere, programs / "python", "-m", "autotune", "--help")
    schema = json.loads(_run(elsewhere, programs / "python", "-m", "autotune", "schema"))
    assert "zero_stage" in schema["properties"]


@pytest.mark.parametrize(
    "command",
    [["autotune"], pytest.param(["python", "-m", "autotune"], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_a_search_beside_stray_modules(programs: Path, elsewhere: Path, command: list[str]) -> None:
    if command == ["autotune"]:
        (elsewhere / "autotune.py").write_text("raise RuntimeError('the stray autotune.py')")
    program, *rest = command
    _run(
        elsewhere,
        programs / program,
        *rest,
        *("search", "model.py", "--out", "found", "--ranks", "2", "--threads-per-rank", "1"),
        *("--max-trials", "1", "--fix", "zero_stage=3", "--fix", "precision=fp32"),
    )
    best = json.loads((elsewhere / "found" / "best.json").read_text())
    assert best["ranks"] == 2
    assert (elsewhere / "found" / "report.html").is_file()
