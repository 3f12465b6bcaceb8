"""The command `measure`: one configuration, run again in fresh processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from autotune.hardware import measure_hardware
from autotune.intervals import enough_steps, fresh_run_interval
from autotune.records import Hardware, Ranked, dump
from autotune.report.answer import peak_bytes
from autotune.runner import ProcessRunner, Runner, installed_packages
from autotune.searching import limit_bytes
from autotune.summary import rate_text
from autotune.units import format_bytes, significant
from runtime.config import TrainConfig, load_config
from runtime.errors import ConfigError, ModelFileError, RunError
from runtime.limits import default_limit_bytes
from runtime.measurement import Measurement, Outcome
from runtime.model_file import check_model_file, imported_modules

DEADLINE_SECONDS = 1800.0
"""Of one run."""


def run_measure(
    model: Path, config_file: Path, repeats: int, memory_limit: float | None, *, as_json: bool
) -> bool:
    """Measure, and print the throughput with its interval; False where nothing was measured.

    Ctrl-C ends the present run; what was measured before it is printed.

    Raises:
        UserError: the model file or the configuration is not as it must be.
        RunError: a run did not end well.
    """
    config = load_config(config_file)
    tree = check_model_file(model)
    hardware = measure_hardware()
    _check_ranks(config, hardware)
    limit = limit_bytes(memory_limit, config.ranks)
    limit = limit or default_limit_bytes(config.ranks, hardware.device_memory_bytes)
    runs: list[Measurement] = []

    def tell(run: Measurement) -> None:
        runs.append(run)
        click.echo(f"run {len(runs)} of {repeats}: {_run_text(run)}", err=True)

    preload = installed_packages(imported_modules(tree), model)
    try:
        with ProcessRunner(model.resolve(), preload) as runner:
            measure_again(runner, config, repeats, hardware, limit, tell)
    except KeyboardInterrupt:
        if not runs:
            raise
    ranked = ranked_runs(config, runs)
    if as_json:
        click.echo(json.dumps(_as_json(ranked, limit), indent=2))
    else:
        click.echo(f"{rate_text(ranked.samples_per_second)}  {config.label()}")
        peak = peak_bytes(ranked)
        if peak is not None:
            click.echo(f"{format_bytes(peak)} of {format_bytes(limit)} a rank ({peak / limit:.0%})")
    return True


def measure_again(
    runner: Runner,
    config: TrainConfig,
    repeats: int,
    hardware: Hardware,
    limit: int,
    tell: Callable[[Measurement], None],
) -> None:
    """Run `config` `repeats` times, each long enough for a narrow median, as a search does.

    `limit` is bytes of one rank.

    Raises:
        ModelFileError: the user's code failed; `detail` is its traceback.
        RunError: a run ended otherwise than well; `detail` is the failed rank's traceback.
    """
    threads = config.threads_per_rank or max(1, hardware.cores // config.ranks)
    for _ in range(repeats):
        run = runner.run(
            config,
            threads_per_rank=threads,
            memory_limit_bytes=limit,
            deadline_seconds=DEADLINE_SECONDS,
            keep_going=lambda step_seconds: not enough_steps(step_seconds),
            on_step=lambda seconds: None,
        )
        if run.outcome is not Outcome.OK:
            if run.user_error:
                raise ModelFileError(run.reason, run.traceback)
            message = f"{config.label()}: {run.outcome.value}: {run.reason}"
            raise RunError(message, run.traceback)
        tell(run)


def ranked_runs(config: TrainConfig, runs: list[Measurement]) -> Ranked:
    """The runs with the interval in which a fresh one lies."""
    rates = [run.samples_per_second for run in runs]
    return Ranked(
        config=config,
        samples_per_second=fresh_run_interval([rate for rate in rates if rate is not None]),
        measurements=tuple(runs),
    )


def _check_ranks(config: TrainConfig, hardware: Hardware) -> None:
    if hardware.device == "cuda" and config.ranks > hardware.device_count:
        raise ConfigError(
            f"the configuration must have at most as many ranks as there are CUDA devices, "
            f"{hardware.device_count}, but has {config.ranks}"
        )


def _run_text(run: Measurement) -> str:
    rate = run.samples_per_second
    steps = f"{len(run.step_seconds)} steps"
    return f"{significant(rate, 4)} samples/s, {steps}" if rate is not None else steps


def _as_json(ranked: Ranked, limit: int) -> dict[str, Any]:
    tokens = next((run.tokens_per_sample for run in ranked.measurements), None)
    rate = ranked.samples_per_second
    return {
        "config": ranked.config.model_dump(mode="json"),
        "label": ranked.config.label(),
        "samples_per_second": dump(rate),
        "tokens_per_second": rate.value * tokens if tokens else None,
        "runs": [run.samples_per_second for run in ranked.measurements],
        "reserved_peak_bytes": peak_bytes(ranked),
        "memory_limit_bytes": limit,
    }
