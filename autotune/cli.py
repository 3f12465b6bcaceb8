"""The commands. Thin: each reads its options, calls one function, prints what comes back.

Nothing heavy is imported here; a command imports what it needs when it runs.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from autotune import __version__
from autotune.options import (
    Assignment,
    Seconds,
    assignments,
    debug_option,
    json_option,
    memory_limit_option,
    model_argument,
)
from runtime.errors import RunError, UserError

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
"""Exit codes: it failed, it was used wrongly, it was stopped with Ctrl-C."""


class _InOrder(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # as they stand below, not by the alphabet


@click.group(
    cls=_InOrder,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 88},
    epilog="Every command explains itself: autotune search --help",
)
@click.version_option(__version__, prog_name="autotune")
def cli() -> None:
    """Find the fastest configuration that trains a PyTorch model within your memory.

    \b
      autotune search model.py                       find it, and write it down
      autotune measure model.py --config best.json   run it again, by itself
      autotune report studies/gpt                    draw the report again
      autotune doctor                                check this machine

    A model file defines two functions, build_model() and make_batch(micro_batch_size).
    """


@cli.command(short_help="Find the fastest configuration that fits, and write it down.")
@model_argument
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Data-parallel processes.  [default: one for each GPU; on CPU one]",
)
@click.option(
    "--threads-per-rank",
    type=click.IntRange(min=1),
    metavar="N",
    help="CPU threads of one rank.  [default: cores / ranks]",
)
@memory_limit_option
@click.option(
    "--global-batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Samples of one optimizer step over all ranks, the same in every configuration.  "
    "[default: the model file's]",
)
@click.option(
    "--max-trials",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most configurations to run beside the baselines.  [default: 40]",
)
@click.option(
    "--time-budget",
    type=Seconds(),
    metavar="TIME",
    help="Most time for this search, such as 90s or 10m.  [default: no bound]",
)
@click.option(
    "--objective",
    type=click.Choice(["throughput", "memory"]),
    default="throughput",
    show_default=True,
    help="What wins: most samples per second, or least memory.",
)
@click.option(
    "--fix",
    type=Assignment(),
    multiple=True,
    metavar="DIM=VALUE",
    help="Search only this value of a dimension, such as zero_stage=3. Repeatable.",
)
@click.option(
    "--vary",
    type=Assignment(),
    multiple=True,
    metavar="DIM=V1,V2",
    help="Search only these values, such as precision=bf16,fp32. Repeatable.",
)
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    metavar="CONFIG.json",
    help="Your own configuration: measured too, and the speed-up over it is stated.",
)
@click.option(
    "--sampler",
    metavar="NAME",
    help="What proposes the next run: predictive, tpe, gp, random or "
    "brute-force.  [default: predictive]",
)
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Of the sampler.")
@click.option(
    "--storage",
    metavar="URL",
    help="Optuna storage, such as sqlite:///all.db.  [default: study.db in the output folder]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where to write.  [default: studies/<name of the model>]",
)
@json_option
@debug_option
@click.pass_context
def search(context: click.Context, /, as_json: bool, **given: Any) -> int:
    """Find the configuration of MODEL that trains fastest and fits.

    Runs the model for a few seconds at a time, in fresh processes, and writes best.json,
    trials.csv and report.html. Ctrl-C stops it and writes what there is; the same command again
    goes on from there.

    \b
    Examples:
      autotune search model.py
      autotune search model.py --ranks 2 --memory-limit 2GiB --time-budget 3m
      autotune search model.py --fix precision=bf16 --vary zero_stage=1,2,3
      autotune search model.py --baseline mine.json --json > result.json

    Dimensions: zero_stage (0 to 3), precision (fp32, bf16, fp16), reduce_dtype (fp32, compute),
    activation_checkpointing (none, selective, full), compile (on, off), micro_batch_size.

    Exit codes: 0 found one, 1 nothing fits or it failed, 2 used wrongly, 130 stopped by Ctrl-C.
    """
    from autotune.searching import run_search

    given["fix"] = assignments("--fix", given["fix"])
    vary = assignments("--vary", given["vary"])
    given["vary"] = {name: text.split(",") for name, text in vary.items()}
    command = shlex.join(["autotune", *context.obj])
    with _interrupts("the same command goes on from what was measured") as received:
        found = run_search(command=command, as_json=as_json, **given)
    return 128 + received[0] if received else 0 if found else FAILED


@cli.command(short_help="Draw the report again, from the study alone.")
@click.argument("folder")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where to write.  [default: FOLDER itself]",
)
@json_option
@debug_option
def report(folder: str, out: Path | None, as_json: bool) -> None:
    """Draw the report of FOLDER again, from its study alone.

    FOLDER is what a search has written, such as studies/gpt, or an Optuna storage URL (then give
    --out too). Writes best.json, trials.csv and report.html; measures nothing.
    """
    from autotune.report import write_outputs
    from autotune.searching import print_result
    from autotune.study import load_result

    is_url = "://" in folder
    if is_url and out is None:
        raise UserError(f"a storage URL needs --out FOLDER to write to, but got {folder} alone")
    result = load_result(folder if is_url else Path(folder))
    print_result(result, write_outputs(result, out or Path(folder)), as_json=as_json)


@cli.command(short_help="Run one configuration again, and say how fast it is.")
@model_argument
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    required=True,
    metavar="CONFIG.json",
    help="The configuration, such as the best.json of a search.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    metavar="N",
    default=5,
    show_default=True,
    help="Fresh processes, one after the other.",
)
@memory_limit_option
@json_option
@debug_option
def measure(
    model: Path, config: Path, repeats: int, memory_limit: int | float | None, as_json: bool
) -> int:
    """Run one configuration of MODEL again, in fresh processes, and say how fast it is.

    Measures exactly as a search does. Prints samples per second with the interval in which a
    fresh run lies with 95% probability.

    \b
    Example:
      autotune measure model.py --config studies/gpt/best.json --repeats 10
    """
    from autotune.remeasure import run_measure

    with _interrupts("nothing was measured") as received:
        measured = run_measure(model, config, repeats, memory_limit, as_json=as_json)
    return 128 + received[0] if received else 0 if measured else FAILED


@cli.command(short_help="Print the JSON Schema of a configuration.")
@debug_option
def schema() -> None:
    """Print the JSON Schema of a configuration (best.json and the like)."""
    from runtime.config import config_schema

    click.echo(json.dumps(config_schema(), indent=2))


@cli.command(short_help="Check this machine: what is here, and what is wrong.")
@json_option
@debug_option
def doctor(as_json: bool) -> int:
    """Say what hardware and software is here, and what is wrong with it.

    Starts two ranks for a second to try what a search needs. Exits with 1 where something that a
    search needs is broken.
    """
    from autotune.doctor import examine, print_checks

    checks = examine()
    print_checks(checks, as_json=as_json)
    return FAILED if any(check.status == "broken" for check in checks) else 0


def run(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code. Errors are one or two lines on stderr."""
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal may not know every character
    try:
        code = cli.main(
            args=list(arguments), prog_name="autotune", standalone_mode=False, obj=arguments
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "autotune"
        return _fail(f"{error.format_message()}\nHelp: {where} --help", error.exit_code, debug)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code, debug)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (UserError, RunError) as error:
        return _fail(str(error), error.exit_code, debug, detail=getattr(error, "detail", ""))
    except OSError as error:  # a full disk, no permission, a device that fails
        if not error.strerror:
            return _fail_unknown(error, debug)
        return _fail(f"{error.filename or 'writing the output'}: {error.strerror}", FAILED, debug)
    except Exception as error:  # noqa: BLE001  the last resort: nothing above knows it
        return _fail_unknown(error, debug)


def _fail_unknown(error: Exception, debug: bool) -> int:
    message = str(error).strip().partition("\n")[0]
    kind = type(error).__name__
    hint = "" if debug else " (a fault of this program: run with --debug to see where)"
    return _fail(f"{kind}: {message}{hint}", FAILED, debug)


def _fail(message: str, code: int, debug: bool, detail: str = "") -> int:
    if debug:
        click.echo(detail or traceback.format_exc(), err=True)
    click.echo(f"autotune: {message}", err=True)
    return code


@contextmanager
def _interrupts(consequence: str) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt; yields the signals received so far.

    Where the command does not catch it, it ends with a line that says so, and with its exit code.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    except KeyboardInterrupt as error:
        click.echo(f"autotune: interrupted; {consequence}", err=True)
        raise click.exceptions.Exit(128 + received[0] if received else INTERRUPTED) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
