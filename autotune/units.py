"""Bytes, seconds and rates as people write them, in both directions. Binary units for memory."""

from __future__ import annotations

import re

from runtime.errors import UserError

_BYTE_UNITS = {
    "b": 1,
    **dict.fromkeys(("k", "ki", "kib"), 2**10),
    **dict.fromkeys(("m", "mi", "mib"), 2**20),
    **dict.fromkeys(("g", "gi", "gib"), 2**30),
    **dict.fromkeys(("t", "ti", "tib"), 2**40),
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SECOND_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_bytes(text: str) -> int:
    """Bytes from text such as `2GiB`, `512 MiB`, `1.5GB` or `1048576` (a bare number is bytes).

    Raises:
        UserError: another form, or not above zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match[2].lower() or "b" if match else ""
    if match is None or unit not in _BYTE_UNITS or float(match[1]) * _BYTE_UNITS[unit] < 1:
        raise UserError(f"memory must be a size such as 2GiB, 512MiB or 1.5GB, but got {text!r}")
    return int(float(match[1]) * _BYTE_UNITS[unit])


def parse_share(text: str) -> float | None:
    """0.8 for `80%`; None where `text` is not a percentage.

    Raises:
        UserError: a percentage outside (0, 100].
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if match is None:
        return None
    share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise UserError(f"a percentage must lie above 0% and up to 100%, but got {text!r}")
    return share


def parse_seconds(text: str) -> float:
    """Seconds from text such as `90s`, `3m`, `1.5h`, `2m30s` or `90` (a bare number is seconds).

    Raises:
        UserError: another form, or not above zero.
    """
    compact = text.strip().lower()
    number = r"(\d+(?:\.\d+)?)"
    parts = re.findall(rf"{number}\s*(h|min|m|s)", compact)
    if re.fullmatch(number, compact):
        parts = [(compact, "s")]
    elif not re.fullmatch(rf"(?:{number}\s*(?:h|min|m|s)\s*)+", compact):
        parts = []
    seconds = sum(float(count) * _SECOND_UNITS[unit] for count, unit in parts)
    if seconds <= 0:
        raise UserError(f"a time must be such as 90s, 3m or 1h, but got {text!r}")
    return seconds


def format_bytes(count: float) -> str:
    """Three significant digits: `712 MiB`, `1.24 GiB`."""
    size, unit = abs(float(count)), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 999.5 or unit == "TiB":
            break
        size /= 1024
    sign = "-" if count < 0 else ""
    return f"{sign}{significant(size) if unit != 'B' else round(size)} {unit}"


def format_seconds(seconds: float) -> str:
    """`183 ms`, `2.31 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 0.9995:
        return f"{significant(seconds * 1000)} ms"
    if seconds < 99.5:
        return f"{significant(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_count(count: int) -> str:
    """`10.8M`, `34.1K`, `512`: parameters and the like."""
    for limit, suffix in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= limit:
            return f"{significant(count / limit)}{suffix}"
    return str(count)


def significant(value: float, digits: int = 3) -> str:
    """`value` to `digits` significant digits, never in scientific form: `1,234`, `112`, `9.87`."""
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # after rounding: 99.96 gives 2
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"
