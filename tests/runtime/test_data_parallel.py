"""What breaks sharded training without an error, and what the runtime does about it.

That each model trains right is asserted in `test_engine`; here, how.
"""

from __future__ import annotations

import pytest

from tests.runtime.engine_runs import settings
from tests.runtime.ranks import RankError, Ranks


def test_groups_hold_only_what_every_rank_calls_alike(two_ranks: Ranks) -> None:
    names = ["gpt", "experts", "moe", "shared", "plain", "seq2seq"]
    first, second = two_ranks.call(
        "tests.runtime.engine_runs:probe_by_data", config=settings(zero_stage=3), names=names
    )
    assert first == second
    assert first["gpt"] == ["blocks.0", "blocks.1", "blocks.2"]
    assert first["experts"] == []  # which expert runs depends on the data
    assert first["moe"] == ["blocks.0", "blocks.1"]  # there, every rank calls every block
    assert first["shared"] == ["blocks.2", "blocks.3"]
    assert first["plain"] == ["embed", "lstm", "head"]
    assert len(first["seq2seq"]) == 4


def test_a_loss_that_reads_parameters_of_a_block_keeps_them_gathered(two_ranks: Ranks) -> None:
    groups = two_ranks.call(
        "tests.runtime.engine_runs:probe_by_data",
        config=settings(zero_stage=3),
        names=["method", "penalty"],
    )[0]
    assert groups["method"] == ["blocks.0", "blocks.1", "blocks.2"]  # it reads the root's alone
    assert groups["penalty"] == ["blocks.0", "blocks.2"]


@pytest.mark.parametrize(("skip", "event"), [(0, "called out of turn"), (2, "skipped")])
def test_a_rank_that_skips_a_block_is_told_so(two_ranks: Ranks, skip: int, event: str) -> None:
    with pytest.raises(RankError, match=event) as caught:
        two_ranks.call(
            "tests.runtime.engine_runs:refuse_skipping_blocks",
            config=settings(zero_stage=3),
            skip=skip,
        )
    assert caught.value.kind == "UnsupportedModelError"
    assert "use zero_stage 0" in caught.value.message


def test_buffers_of_any_kind_are_broadcast_by_name(two_ranks: Ranks) -> None:
    first, second = two_ranks.call("tests.runtime.engine_runs:broadcast_buffers")
    assert first["state"] == second["state"]
    assert first["state"]["flag"] is True
    assert first["state"]["expanded"] == [0.0] * 3
    assert first["state"]["table"] == [[0.0] * 3] * 2


def test_ranks_agree_on_use_and_on_changed_buffers(two_ranks: Ranks) -> None:
    for result in two_ranks.call("tests.runtime.engine_runs:broadcast_buffers"):
        assert result["flags"] == [[True, False], [False, False]]
        assert result["table"] == [[0.0] * 3] * 2
