"""What a search needs of the machine: its facts, the model's profile, and measured runs."""

from __future__ import annotations

import importlib.util
import site
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from autotune.hardware import measure_hardware
from autotune.profile import profile_model
from autotune.records import Hardware, ModelProfile
from autotune.trial import KeepGoing, TrialPlan, run_trial
from runtime.config import TrainConfig
from runtime.launch import Launcher
from runtime.measurement import Measurement

PROFILE_DEADLINE_SECONDS = 600.0


class Runner(Protocol):
    """Runs one model file. Leaving it as a context manager ends every process."""

    def __enter__(self) -> Runner: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def hardware(self) -> Hardware:
        """The machine."""

    def profile(self, *, threads: int, memory_limit_bytes: int) -> ModelProfile:
        """What the model is like. Raises ModelFileError where the model file is at fault."""

    def run(
        self,
        config: TrainConfig,
        *,
        threads_per_rank: int,
        memory_limit_bytes: int,
        deadline_seconds: float,
        keep_going: KeepGoing,
        on_step: Callable[[float], None],
    ) -> Measurement:
        """Train `config` in fresh processes; see `autotune.trial.run_trial`."""

    def problems(self) -> Sequence[str]:
        """One line for each thing that is not as it should be."""


class ProcessRunner:
    """The real machine: one launcher for the whole search."""

    def __init__(self, model_file: Path, preload: Sequence[str]) -> None:
        self._model_file = model_file
        self._launcher = Launcher(preload=preload)  # imports torch while the search prepares

    def __enter__(self) -> ProcessRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._launcher.close()

    def hardware(self) -> Hardware:
        """See `Runner`."""
        return measure_hardware()

    def profile(self, *, threads: int, memory_limit_bytes: int) -> ModelProfile:
        """See `Runner`."""
        return profile_model(
            self._launcher,
            self._model_file,
            threads=threads,
            memory_limit_bytes=memory_limit_bytes,
            deadline_seconds=PROFILE_DEADLINE_SECONDS,
        )

    def run(
        self,
        config: TrainConfig,
        *,
        threads_per_rank: int,
        memory_limit_bytes: int,
        deadline_seconds: float,
        keep_going: KeepGoing,
        on_step: Callable[[float], None],
    ) -> Measurement:
        """See `Runner`."""
        return run_trial(
            self._launcher,
            self._model_file,
            config,
            threads_per_rank=threads_per_rank,
            memory_limit_bytes=memory_limit_bytes,
            plan=TrialPlan(deadline_seconds=deadline_seconds),
            keep_going=keep_going,
            on_step=on_step,
        )

    def problems(self) -> Sequence[str]:
        """See `Runner`."""
        return self._launcher.problems


def installed_packages(names: Sequence[str], model_file: Path) -> list[str]:
    """Those of `names` that are installed packages, so that a server may import them once.

    Modules beside the model file must be imported in every run, or an edit would go unseen; the
    standard library needs no preloading.
    """
    folders = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        site.getusersitepackages(),
    }
    roots = [Path(folder).resolve() for folder in folders if folder]
    found = []
    for name in names:
        beside = model_file.parent / name
        if name in sys.stdlib_module_names or beside.exists() or beside.with_suffix(".py").exists():
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        origin = Path(spec.origin).resolve()
        if any(origin.is_relative_to(root) for root in roots):
            found.append(name)
    return found
