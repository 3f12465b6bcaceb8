"""Ends that a test cannot bring about for real."""

from __future__ import annotations

import errno
import time
from typing import Any

from runtime.rank_group import RankProcesses


def group() -> RankProcesses:
    def no_event(rank: int, name: str, data: dict[str, Any]) -> None:
        raise AssertionError((rank, name, data))

    return RankProcesses(
        1, deadline=time.monotonic() + 9, seconds=9, limit_bytes=None, on_event=no_event
    )


def test_a_host_that_runs_out_of_memory_ends_the_run() -> None:
    ranks = group()
    ranks.check_memory(host_is_low=True, reserve_bytes=512 << 20)
    ranks.stop()  # too late to count
    assert ranks.advance(time.monotonic(), alone=False) == {
        "outcome": "out of memory",
        "reason": "the host had less than 512.0 MiB of memory left",
        "traceback": "",
        "failed_rank": None,
        "user_error": False,
    }


def test_a_fork_that_fails_is_told_with_its_cause() -> None:
    for code, outcome in ((errno.ENOMEM, "out of memory"), (errno.EAGAIN, "crashed")):
        ranks = group()
        ranks.fail(OSError(code, "the cause"))
        end = ranks.advance(time.monotonic(), alone=False)
        assert end is not None
        assert (end["outcome"], end["reason"]) == (outcome, "could not start a rank: the cause")
