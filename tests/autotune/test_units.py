"""Units, read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.units import (
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_seconds,
    parse_share,
    significant,
)
from runtime.errors import UserError


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("512 mib", 2**29), ("1.5GB", 1_500_000_000), ("2g", 2**31), ("4096", 4096)],
)
def test_reads_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 apples", "0", "1e9", "nan", "2GiB!"])
def test_refuses_other_bytes(text: str) -> None:
    with pytest.raises(UserError, match=r"2GiB, 512MiB or 1\.5GB, but got"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("3m", 180), ("2m30s", 150), ("1.5h", 5400), ("90", 90)]
)
def test_reads_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-3m", "3 days", "0s", "1 2", "3mm", "inf"])
def test_refuses_other_seconds(text: str) -> None:
    with pytest.raises(UserError, match="90s, 3m or 1h, but got"):
        parse_seconds(text)


def test_reads_shares() -> None:
    assert parse_share("80%") == pytest.approx(0.8)
    assert parse_share("2GiB") is None
    for text in ("0%", "101%"):
        with pytest.raises(UserError, match="percentage must lie above 0% and up to 100%"):
            parse_share(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (712 * 2**20, "712 MiB"), (1.24 * 2**30, "1.24 GiB"),
     (999.6 * 2**20, "0.976 GiB"), (-(2**20), "-1.00 MiB")],
)  # fmt: skip
def test_writes_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (0.9996, "1.00 s"), (99.4, "99.4 s"), (99.6, "1 min 40 s"),
     (200, "3 min 20 s"), (7500, "2 h 05 min")],
)  # fmt: skip
def test_writes_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_writes_counts() -> None:
    counts = (512, 34_100, 10_800_000, 7_000_000_000)
    assert [format_count(count) for count in counts] == ["512", "34.1K", "10.8M", "7.00B"]


@given(st.floats(min_value=1e-6, max_value=1e12))
def test_significant_digits_keep_the_value(value: float) -> None:
    text = significant(value)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.0051)


@given(st.integers(min_value=1, max_value=2**49))
def test_bytes_survive_reading_back(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.0051)
