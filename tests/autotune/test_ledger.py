from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.ledger import Ledger, ledger
from autotune.model_states import (
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
    zero_model_states,
)
from autotune.model_trace import (
    ARITHMETICS,
    ModelTrace,
    StepTrace,
    TracedParameter,
    timeline_key,
)
from autotune.records import dump, load
from autotune.replay import TERMS, bucket_sizes
from autotune.replay_sharded import shard_elements
from autotune.timeline import Line, Moment, Timeline
from runtime.config import TrainConfig

BLOCKS = 4
ROWS = 64
COLUMNS = 512
ACTIVATIONS = 3000.0  # bytes of one sample in one block
TABLE = list(csv.DictReader((Path(__file__).parent / "zero_table1.csv").open()))


def parameter(index: int, group: int, **fields: Any) -> TracedParameter:
    values = {
        "name": f"p{index}", "rows": ROWS, "row_elements": COLUMNS, "element_bytes": 4,
        "trainable": True, "used": True, "lowers": True, "group": group, "whole": False,
        "whole_lowered": False, "state_element_bytes": 8, "state_extra_bytes": 4,
    }  # fmt: skip
    return TracedParameter(**(values | fields))


def line(fixed: float = 0.0, per_sample: float = 0.0, temporary: float = 0.0) -> Line:
    return Line((fixed, 0.0, 0.0, 0.0), (per_sample, 0.0, temporary, 0.0))


def timeline(parameters: tuple[TracedParameter, ...]) -> Timeline:
    """Each block keeps `ACTIVATIONS` of each sample; its backward takes twice that for itself."""
    moments: list[Moment] = []

    def add(kind: Any, index: int, kept: int, working: float = 0.0) -> None:
        before = line(0.0, kept * ACTIVATIONS, working)
        moments.append(Moment(kind, index, (before,), line(0.0, kept * ACTIVATIONS)))

    for block in range(BLOCKS):
        add("forward", block, block)
        add("forwarded", block, block + 1)
    add("loss", 0, BLOCKS)
    for index, item in enumerate(parameters):
        if item.group == BLOCKS and item.used:
            add("gradient", index, BLOCKS)
    for block in reversed(range(BLOCKS)):
        add("backward", block, block + 1)
        for index, item in enumerate(parameters):
            if item.group == block:
                add("gradient", index, block + 1, 2 * ACTIVATIONS)
        add("backwarded", block, block)
    add("end", 0, 0)
    return Timeline(tuple(moments), (0.0, 1.0))


def trace(**fields: Any) -> ModelTrace:
    groups = [block for block in range(BLOCKS) for _ in range(2)] + [BLOCKS]
    default = tuple(parameter(i, group) for i, group in enumerate(groups))
    parameters = fields.pop("parameters", default)
    return ModelTrace(
        parameters=parameters,
        buffer_bytes=0,
        groups=tuple(f"blocks.{block}" for block in range(BLOCKS)),
        timelines={
            timeline_key(kind, precision, "none"): timeline(parameters)
            for kind in ARITHMETICS
            for precision in ("fp32", "bf16", "fp16")
        },
        step=StepTrace(name="AdamW", temporary_bytes=0, largest_bytes=ROWS * COLUMNS * 4),
        **fields,
    )


TRACE = trace()
configs = st.builds(
    TrainConfig,
    ranks=st.sampled_from([2, 4, 8, 16]),
    zero_stage=st.sampled_from([0, 1, 2, 3]),
    micro_batch_size=st.integers(1, 64),
    gradient_accumulation_steps=st.integers(1, 4),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    reduce_dtype=st.sampled_from(["fp32", "compute"]),
)


def peak(config: TrainConfig, **changes: object) -> float:
    return ledger(TRACE, config.model_copy(update=changes)).peak_bytes


@given(config=configs)
def test_more_samples_never_need_less(config: TrainConfig) -> None:
    assert peak(config, micro_batch_size=config.micro_batch_size + 1) >= peak(config)


@given(config=configs, factor=st.sampled_from([2, 4]))
def test_more_ranks_never_need_more(config: TrainConfig, factor: int) -> None:
    assert peak(config, ranks=config.ranks * factor) <= peak(config)


@given(config=configs)
def test_the_optimizer_never_finds_less_than_zero_of_any_term(config: TrainConfig) -> None:
    found = ledger(TRACE, config)
    assert [entry.name for entry in found.entries] == [n for n in TERMS if n in found.terms]
    assert all(entry.bytes > 0 for entry in found.entries)
    assert found.peak_bytes >= sum(found.terms[name] for name in ("parameters", "optimizer states"))


@given(config=configs)
def test_accumulating_more_than_three_times_changes_nothing(config: TrainConfig) -> None:
    three = peak(config, gradient_accumulation_steps=3)
    assert peak(config, gradient_accumulation_steps=7) == three
    assert peak(config, gradient_accumulation_steps=1) <= three


@given(config=configs)
def test_states_are_those_of_zero_for_shards_without_padding(config: TrainConfig) -> None:
    """The same functions that give the paper's table, with this engine's byte counts."""
    terms = ledger(TRACE, config).terms
    count = sum(item.elements for item in TRACE.parameters)
    share = {"stage": config.zero_stage, "ranks": config.ranks}
    assert terms["parameters"] == optimizer_bytes(4 * count, **share)
    counters = 4 * len(TRACE.parameters)
    assert terms["optimizer states"] == optimizer_bytes(8 * count, **share) + counters


@pytest.mark.parametrize("ranks", [4, 64])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_held_between_micro_batches_as_zero_says(ranks: int, precision: str) -> None:
    """Paper's sections 5.1 to 5.3: what each stage adds to what is divided by the ranks."""
    count = sum(item.elements for item in TRACE.parameters)
    width = 4 if precision == "fp32" else 2
    for stage in (1, 2, 3):
        config = TrainConfig.model_validate({
            "ranks": ranks, "zero_stage": stage, "precision": precision,
            "gradient_accumulation_steps": 3,
        })  # fmt: skip
        terms = ledger(TRACE, config).terms
        # At the peak, one block's gradients at most are not reduced yet.
        block = 2 * ROWS * COLUMNS
        whole = parameter_bytes(width * count, stage=stage, ranks=ranks)
        reduced = gradient_bytes(4 * count, stage=stage, ranks=ranks)
        if stage < 3:
            assert terms["gathered parameters"] <= whole
            assert terms["gathered parameters"] >= whole - block * width
        else:
            assert terms["gathered parameters"] <= 3 * block * width
        assert abs(terms["gradients"] - reduced) <= block * (4 + width)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['params_billion']}B-{row['dp']}")
def test_zero_table_1_stage_by_stage(row: dict[str, str]) -> None:
    count, ranks = float(row["params_billion"]), int(row["dp"])
    for stage, column in ((1, "p_os_gb"), (2, "p_os_g_gb"), (3, "p_os_g_p_gb")):
        share = {"stage": stage, "ranks": ranks}
        terms = (
            parameter_bytes(2 * count, **share),
            gradient_bytes(2 * count, **share),
            optimizer_bytes(12 * count, **share),
        )
        whole = zero_model_states(count, bytes_per_parameter=(2, 2, 12), **share)
        assert sum(terms) == pytest.approx(whole)
        unit = 10.0 ** -len(row[column].partition(".")[2])
        assert abs(sum(terms) - float(row[column])) < unit


def test_padding_whole_parameters_and_unused_ones() -> None:
    odd = trace(
        parameters=(
            parameter(0, 0, rows=5, row_elements=10),
            parameter(1, 0, rows=1, row_elements=1, whole=True, whole_lowered=True),
            parameter(2, BLOCKS, used=False, state_element_bytes=0, state_extra_bytes=0),
        )
    )
    config = TrainConfig(ranks=4, zero_stage=3)
    terms = ledger(odd, config).terms
    # Shards of 2 of 5 rows, a whole scalar, 16 of 64 rows.
    assert terms["parameters"] == 4 * (2 * 10 + 1 + 16 * COLUMNS)
    assert terms["optimizer states"] == 8 * (2 * 10 + 1) + 4 + 4


@given(rows=st.integers(1, 40), ranks=st.integers(1, 9))
def test_shards_are_those_of_torch(rows: int, ranks: int) -> None:
    item = parameter(0, 0, rows=rows, row_elements=3)
    first = torch.empty(rows, 3).chunk(ranks)[0]
    assert shard_elements(item, ranks) == first.numel()


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4_000_000), min_size=1, max_size=20),
    narrow=st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_buckets_are_those_of_ddp(sizes: list[int], narrow: list[bool]) -> None:
    parameters, tensors = [], []
    for index, size in enumerate(sizes):
        width = 2 if narrow[index] else 4
        parameters.append(parameter(index, 0, rows=size, row_elements=1, element_bytes=width))
        tensors.append(torch.empty(size, dtype=torch.bfloat16 if narrow[index] else torch.float32))
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, [2**20, 25 * 2**20])
    assert sorted(bucket_sizes(parameters)) == sorted(list(bucket) for bucket in expected)


def test_one_rank_by_hand() -> None:
    found = ledger(TRACE, TrainConfig(micro_batch_size=1))
    count = sum(item.elements for item in TRACE.parameters)
    # All gradients are there; the activations, small here, are not.
    assert found.segment == "start of the step"
    assert found.terms["gradients"] == 4 * count
    large = ledger(TRACE, TrainConfig(micro_batch_size=1000))
    # The last block's backward begins with all activations and its own work.
    assert large.segment == f"backward of blocks.{BLOCKS - 1}"
    assert large.terms["activations"] == 1000 * ACTIVATIONS * BLOCKS
    assert large.terms["temporaries"] == 1000 * ACTIVATIONS * 2
    assert large.terms["gradients"] == pytest.approx(4 * ROWS * COLUMNS * 2)


def test_stage_3_by_hand() -> None:
    found = ledger(TRACE, TrainConfig(ranks=2, zero_stage=3, micro_batch_size=1000))
    block = 2 * ROWS * COLUMNS * 4
    # In the last block's backward: root and block are gathered, the one before is on its way.
    assert found.segment == f"backward of blocks.{BLOCKS - 1}"
    assert found.terms["gathered parameters"] == block + block / 2
    assert found.terms["gather buffers"] == block
    assert found.lingering_bytes == block


def test_stage_0_compresses_into_buffers() -> None:
    config = TrainConfig(ranks=2, precision="bf16", reduce_dtype="compute", micro_batch_size=1)
    found = ledger(TRACE, config)
    count = sum(item.elements for item in TRACE.parameters)
    assert found.terms["gradient buckets"] == 4 * count
    assert found.terms["reduce buffers"] == 2 * count


def test_optimizer_temporaries_shrink_with_the_shards() -> None:
    largest = ROWS * COLUMNS * 4
    small = trace()
    step = StepTrace(name="SGD", temporary_bytes=2 * largest, largest_bytes=largest)
    one = ModelTrace(**{**vars(small), "step": step})
    whole = ledger(one, TrainConfig())
    assert whole.segment == "optimizer step"
    assert whole.terms["optimizer temporaries"] == 2 * largest
    many = StepTrace(name="SGD", temporary_bytes=90 * largest, largest_bytes=largest)
    all_at_once = ModelTrace(**{**vars(small), "step": many})
    shards = ledger(all_at_once, TrainConfig(ranks=4, zero_stage=3))
    assert shards.terms["optimizer temporaries"] == 90 * largest / 4


def test_the_batch_and_the_tier_follow_the_device() -> None:
    on_device = trace(device="cuda", batch_bytes=(100.0, 10.0))
    found = ledger(on_device, TrainConfig(micro_batch_size=3))
    assert found.terms["batch"] == 130.0
    assert {entry.tier for entry in found.entries} == {"device"}
    assert {entry.tier for entry in ledger(TRACE, TrainConfig()).entries} == {"host"}


def test_a_missing_timeline_is_an_error() -> None:
    with pytest.raises(KeyError, match="fp32 full"):
        ledger(TRACE, TrainConfig(activation_checkpointing="full"))


def test_records_survive_json() -> None:
    assert load(ModelTrace, dump(TRACE)) == TRACE
    found = ledger(TRACE, TrainConfig())
    assert load(Ledger, dump(found)) == found
