"""The kinds of values that options take, and the options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from autotune.units import parse_bytes, parse_seconds, parse_share
from runtime.errors import UserError

Function = TypeVar("Function", bound=Callable[..., Any])


class MemorySize(click.ParamType):  # type: ignore[type-arg]
    """Bytes (int) from `2GiB`, a share of what there is (float in (0, 1]) from `80%`."""

    name = "size"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float:
        """Bytes as int, a share as float."""
        if isinstance(value, (int, float)):
            return value
        try:
            share = parse_share(value)
            return parse_bytes(value) if share is None else share
        except UserError as error:
            self.fail(f"{error}; or a share such as 80%", param, ctx)


class Seconds(click.ParamType):  # type: ignore[type-arg]
    """Seconds from `90s`, `3m`, `1h` or `2m30s`."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds."""
        if isinstance(value, (int, float)):
            return float(value)
        try:
            return parse_seconds(value)
        except UserError as error:
            self.fail(str(error), param, ctx)


class Assignment(click.ParamType):  # type: ignore[type-arg]
    """A dimension's name and the text after its equals sign."""

    name = "dim=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """(name, text)."""
        name, _, text = str(value).partition("=")
        if not (name.strip() and text.strip()):
            self.fail(f"must be DIM=VALUE, such as zero_stage=3, but got {value!r}", param, ctx)
        return name.strip(), text.strip()


def assignments(option: str, pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Name → text.

    Raises:
        UserError: a name is given twice.
    """
    found: dict[str, str] = {}
    for name, text in pairs:
        if name in found:
            raise UserError(
                f"{option} must name each dimension once, but got {name} twice "
                f"({found[name]}, {text})"
            )
        found[name] = text
    return found


model_argument = click.argument("model", type=click.Path(path_type=Path))
memory_limit_option = click.option(
    "--memory-limit",
    type=MemorySize(),
    metavar="SIZE",
    help="Most memory of one rank, such as 2GiB or 900MiB, or a share: 80% of a GPU, or of the "
    "host over the ranks.  [default: 90% of what is free]",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of text."
)


def debug_option(function: Function) -> Function:
    """`--debug`, which `autotune.cli.run` looks for itself, since parsing too may fail."""
    return click.option(
        "--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."
    )(function)
