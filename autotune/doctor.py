"""What hardware and software is here, and what is wrong with it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.console import Console
from rich.table import Table

from autotune.hardware import cuda_devices, measure_hardware
from autotune.records import Hardware
from autotune.units import format_bytes
from runtime.errors import RunError
from runtime.launch import Launcher
from runtime.limits import available_memory_bytes, host_reserve_bytes, total_memory_bytes
from runtime.loopback import loopback_interface
from runtime.measurement import Outcome

if TYPE_CHECKING:
    from runtime.rank import RankContext

Status = Literal["fine", "note", "broken"]

OLDEST_PYTHON = (3, 10)
LEAST_SHARED_MEMORY_BYTES = 64 * 2**20
"""Below Docker's default, ranks of NCCL and data loader workers run out of it."""

PACKAGES = ("torch", "optuna", "pydantic", "pandas", "matplotlib", "rich", "click", "jinja2")
OPTIONAL_PACKAGES = {"scipy": "--sampler gp", "transformers": "models of the Hugging Face library"}
_TRIAL_SECONDS = 90.0
_TRIED_VALUE = 3.0  # the sum over ranks 1 and 2
_MARKS = {"fine": ("ok", "green"), "note": ("note", "yellow"), "broken": ("BROKEN", "bold red")}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    """`note`: a search works, with less; `broken`: it does not work."""
    found: str
    advice: str = ""
    """What to do; empty where the status is fine."""


def examine() -> list[Check]:
    """Look at everything; takes some seconds, for it starts two ranks as a search would."""
    hardware = measure_hardware()
    return [
        _python(),
        *_packages(),
        _device(hardware),
        _cores(hardware),
        _memory(),
        _arithmetic(hardware),
        _compiler(hardware),
        _shared_memory(),
        _temporary_folder(),
        _loopback(),
        *_trial(),
    ]


def print_checks(checks: Sequence[Check], *, as_json: bool) -> None:
    """A table, or a JSON array of the checks."""
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks], indent=2))
        return
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        mark, style = _MARKS[check.status]
        table.add_row(f"[{style}]{mark}[/]", check.name, _escaped(check.found))
        if check.advice:
            table.add_row("", "", f"[{style}]{_escaped(check.advice)}[/]")
    console.print(table)
    broken = [check.name for check in checks if check.status == "broken"]
    console.print()
    if broken:
        console.print(f"[bold red]A search cannot run here:[/] mend {', '.join(broken)}.")
    else:
        console.print("A search can run here: autotune search model.py")


def reduce_job(payload: dict[str, Any], context: RankContext) -> None:
    """Runs in each rank: adds numbers over the ranks, as gradients are."""
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(context.rank + 1)], device=context.device)
    dist.all_reduce(value)
    context.report("reduced", value=float(value.item()))


def _python() -> Check:
    text = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return Check(name="Python", status="broken", found=text, advice="use Python 3.10 or newer")
    return Check(name="Python", status="fine", found=text)


def _packages() -> list[Check]:
    versions, missing = _versions(PACKAGES)
    checks = [
        Check(name="packages", status="fine", found=versions)
        if not missing
        else Check(
            name="packages",
            status="broken",
            found=f"missing: {', '.join(missing)}",
            advice=f"pip install {' '.join(missing)}",
        )
    ]
    found, absent = _versions(OPTIONAL_PACKAGES)
    if absent:
        found = "; ".join(filter(None, (found, f"without {', '.join(absent)}")))
        uses = ", ".join(f"{name} for {OPTIONAL_PACKAGES[name]}" for name in absent)
        checks.append(Check(name="optional", status="note", found=found, advice=uses))
    else:
        checks.append(Check(name="optional", status="fine", found=found))
    return checks


def _versions(names: Sequence[str] | dict[str, str]) -> tuple[str, list[str]]:
    versions, missing = [], []
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return ", ".join(versions), missing


def _device(hardware: Hardware) -> Check:
    devices = cuda_devices()
    if hardware.device == "cuda":
        memory = format_bytes(hardware.device_memory_bytes)
        found = f"{hardware.device_count} × {hardware.device_name}, {memory} each"
        return Check(name="GPU", status="fine", found=found)
    if devices:
        return Check(
            name="GPU",
            status="note",
            found=f"{len(devices)} × {devices[0].name}, but torch {hardware.torch} has no CUDA",
            advice="install a torch with CUDA to train on it: https://pytorch.org",
        )
    return Check(name="GPU", status="fine", found="none: searches run on the CPU")


def _cores(hardware: Hardware) -> Check:
    machine = os.cpu_count() or hardware.cores
    limited = f" of {machine}" if hardware.cores < machine else ""
    load = os.getloadavg()[0]
    found = f"{hardware.cores}{limited} usable, {hardware.device_name}; load {load:.1f}"
    if load > 0.5 * hardware.cores:
        advice = "other work is running: timings will scatter, so search when it has ended"
        return Check(name="cores", status="note", found=found, advice=advice)
    return Check(name="cores", status="fine", found=found)


def _memory() -> Check:
    available, total = available_memory_bytes(), total_memory_bytes()
    found = f"{format_bytes(available)} available of {format_bytes(total)} (control group included)"
    if available <= 2 * host_reserve_bytes():
        advice = "end other programs, or raise the control group's limit"
        return Check(name="memory", status="broken", found=found, advice=advice)
    return Check(name="memory", status="fine", found=found)


def _arithmetic(hardware: Hardware) -> Check:
    known = {"fp32": True, "bf16": hardware.bf16_arithmetic, "fp16": hardware.fp16_arithmetic}
    slow = [name for name, fast in known.items() if not fast]
    found = ", ".join(name for name, fast in known.items() if fast)
    if slow:
        found += f"; {' and '.join(slow)} only emulated, so likely slower"
    return Check(name="arithmetic", status="fine", found=found)


def _compiler(hardware: Hardware) -> Check:
    if hardware.compiler:
        return Check(name="compiler", status="fine", found=hardware.compiler)
    return Check(
        name="compiler",
        status="note",
        found="none, or no Python.h",
        advice="without it torch.compile is not searched: install g++ and Python's headers",
    )


def _shared_memory() -> Check:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        advice = "mount it (docker run --shm-size=1g), or NCCL and data loader workers fail"
        return Check(name="shared memory", status="note", found="no /dev/shm", advice=advice)
    usage = shutil.disk_usage(folder)
    found = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} in {folder}"
    if usage.free <= LEAST_SHARED_MEMORY_BYTES:
        advice = "small: give the container more (docker run --shm-size=1g)"
        return Check(name="shared memory", status="note", found=found, advice=advice)
    return Check(name="shared memory", status="fine", found=found)


def _temporary_folder() -> Check:
    try:
        with tempfile.TemporaryDirectory() as folder:
            free = shutil.disk_usage(folder).free
            (Path(folder) / "probe").write_bytes(b"x")
    except OSError as error:
        return Check(
            name="temporary folder",
            status="broken",
            found=f"cannot be written: {error.strerror or error}",
            advice="set TMPDIR to a folder that can",
        )
    found = f"{tempfile.gettempdir()}, {format_bytes(free)} free"
    return Check(name="temporary folder", status="fine", found=found)


def _loopback() -> Check:
    try:
        return Check(name="loopback", status="fine", found=loopback_interface())
    except RunError as error:
        rule, _, advice = str(error).rpartition(": ")
        return Check(name="loopback", status="broken", found=rule, advice=advice)


def _trial(start: Callable[[], Launcher] = Launcher) -> list[Check]:
    """Two ranks that talk to each other, started as a search starts them."""
    try:
        with start() as launcher:
            checks = [_fork_server(launcher.problems)]
            values: list[float] = []
            with launcher.start(
                "autotune.doctor:reduce_job",
                {},
                ranks=2,
                threads_per_rank=1,
                memory_limit_bytes=None,
                deadline_seconds=_TRIAL_SECONDS,
            ) as group:
                values = [event.data["value"] for event in group.events()]
                end = group.end
    except (RunError, OSError) as error:
        return [Check(name="two ranks", status="broken", found=str(error), advice="see above")]
    if end is None or end.outcome is not Outcome.OK or values != [_TRIED_VALUE] * 2:
        reason = end.reason if end is not None and end.reason else f"they summed to {values}"
        checks.append(
            Check(name="two ranks", status="broken", found=reason, advice="mend what stands above")
        )
    else:
        checks.append(Check(name="two ranks", status="fine", found="started, and talked"))
    return checks


def _fork_server(problems: Sequence[str]) -> Check:
    if problems:
        advice = "searches work, but each run takes seconds longer to start"
        found = "; ".join(problems)
        return Check(name="fork server", status="note", found=found, advice=advice)
    return Check(name="fork server", status="fine", found="usable")


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
