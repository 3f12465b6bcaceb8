"""What the user asked of the space: `--fix` and `--vary`, read and checked against what exists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from runtime.errors import ConfigError

_BOOLEANS = {"on": True, "true": True, "off": False, "false": False}
_ACCUMULATION = "gradient_accumulation_steps"
_MICRO_BATCH = "micro_batch_size"


@dataclass(frozen=True)
class Choices:
    """Dimension → the values asked for, without repetition; absent where nothing was asked."""

    values: dict[str, tuple[int | str | bool, ...]]


def show(value: int | str | bool) -> str:
    """`value` as the user would write it."""
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def parse_choices(
    known: Mapping[str, tuple[int | str | bool, ...]],
    not_searched: Mapping[str, str],
    *,
    share: int | None,
    fix: Mapping[str, str],
    vary: Mapping[str, Sequence[str]],
) -> Choices:
    """Check `fix` and `vary` against the dimensions.

    `gradient_accumulation_steps` is accepted too, and read as the micro-batch size that it leaves.

    Args:
        known: dimension → every legal value.
        not_searched: other fields of a configuration → why they are not searched.
        share: samples of one rank in one optimizer step; None where it is not known yet, and with
            it the sizes of the micro-batch: these are left out then, if they are whole numbers.

    Raises:
        ConfigError: an unknown dimension or value, or a contradiction; the valid ones are listed.
    """
    for name in fix:
        if name in vary:
            raise ConfigError(f"{name} must be given to --fix or --vary, but got both")
    asked = [("--fix", name, [text]) for name, text in fix.items()]
    asked += [("--vary", name, list(texts)) for name, texts in vary.items()]
    values: dict[str, tuple[int | str | bool, ...]] = {}
    for option, name, texts in asked:
        if not texts:
            raise ConfigError(f"{option} {name} must name at least one value, but got none")
        valid = _valid_values(option, name, known, not_searched)
        parsed = [_parse(option, name, text, valid) for text in texts]
        if name not in (_MICRO_BATCH, _ACCUMULATION):
            values[name] = tuple(dict.fromkeys(parsed))
        elif share is not None:
            if name == _ACCUMULATION:
                parsed = [share // int(steps) for steps in parsed]
            chosen = tuple(dict.fromkeys(parsed))
            earlier = values.get(_MICRO_BATCH)
            values[_MICRO_BATCH] = _agreeing(earlier, chosen, share) if earlier else chosen
    return Choices(values)


def _valid_values(
    option: str,
    name: str,
    known: Mapping[str, tuple[int | str | bool, ...]],
    not_searched: Mapping[str, str],
) -> tuple[int | str | bool, ...]:
    if name == _ACCUMULATION:
        return known[_MICRO_BATCH]  # if d divides the share, so does share / d
    if name in known:
        return known[name]
    names = (*known, _ACCUMULATION)
    if name in not_searched:
        raise ConfigError(
            f"{option}: {name} {not_searched[name]}; the dimensions are {', '.join(names)}"
        )
    raise ConfigError(
        f"{option}: unknown dimension {name!r}{_near(name, names)}; "
        f"the dimensions are {', '.join(names)}"
    )


def _parse(
    option: str, name: str, text: str, valid: Sequence[int | str | bool]
) -> int | str | bool:
    if not valid:
        return _whole_number(option, name, text)
    spelled = {show(value): value for value in valid}
    if isinstance(valid[0], bool):
        spelled = {word: value for word, value in _BOOLEANS.items() if value in valid}
    value = spelled.get(text.strip().lower())
    if value is None:
        rule = ", ".join(spelled)
        raise ConfigError(
            f"{option}: {name} must be one of {rule}, but got {text!r}{_near(text, spelled)}"
        )
    return value


def _whole_number(option: str, name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"{option}: {name} must be an integer >= 1, but got {text!r}")
    return number


def _agreeing(
    first: tuple[int | str | bool, ...], second: tuple[int | str | bool, ...], share: int
) -> tuple[int | str | bool, ...]:
    both = tuple(value for value in first if value in second)
    if not both:
        raise ConfigError(
            f"{_MICRO_BATCH} x {_ACCUMULATION} must be {share}, one rank's share of the global "
            f"batch, but the micro-batch sizes asked for are {', '.join(map(show, first))} and "
            f"the accumulation steps leave {', '.join(map(show, second))}"
        )
    return both


def _near(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
