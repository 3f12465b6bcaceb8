from __future__ import annotations

import csv
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.model_states import (
    absent_at_activation_peak,
    model_state_terms,
    startup_bytes,
    zero_model_states,
)
from runtime.config import TrainConfig
from tests.autotune import factories

PAPER_BYTES = (2, 2, 12)
STAGE_COLUMNS = {1: "p_os_gb", 2: "p_os_g_gb", 3: "p_os_g_p_gb"}
TABLE = list(csv.DictReader((Path(__file__).parent / "zero_table1.csv").open()))


def stage_bytes(config: TrainConfig) -> float:
    return sum(model_state_terms(factories.profile(), config).values())


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['params_billion']}B-{row['dp']}")
@pytest.mark.parametrize("stage", STAGE_COLUMNS)
def test_zero_table_1(row: dict[str, str], stage: int) -> None:
    printed = row[STAGE_COLUMNS[stage]]
    expected = zero_model_states(
        float(row["params_billion"]),
        stage=stage,
        ranks=int(row["dp"]),
        bytes_per_parameter=PAPER_BYTES,
    )
    # The paper rounds some cells and truncates others.
    unit = 10.0 ** -len(printed.partition(".")[2])
    assert abs(expected - float(printed)) < unit


@given(
    parameters=st.floats(1, 1e12),
    ranks=st.integers(1, 4096),
    counts=st.tuples(st.integers(0, 16), st.integers(0, 16), st.integers(0, 16)),
)
def test_a_higher_stage_never_holds_more(
    parameters: float, ranks: int, counts: tuple[int, int, int]
) -> None:
    held = [
        zero_model_states(parameters, stage=stage, ranks=ranks, bytes_per_parameter=counts)
        for stage in range(4)
    ]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(held))
    assert held[0] == pytest.approx(sum(counts) * parameters)
    assert held[3] == pytest.approx(held[0] / ranks)


def test_plain_training_holds_parameters_gradients_and_adam_whole() -> None:
    profile = factories.profile()
    terms = model_state_terms(profile, TrainConfig(ranks=1))
    assert sum(terms.values()) == 4 * profile.parameter_bytes + profile.buffer_bytes


def test_one_accumulation_step_makes_stage_1_hold_what_stage_2_does() -> None:
    first, second = (TrainConfig(ranks=4, zero_stage=stage) for stage in (1, 2))
    assert stage_bytes(first) == stage_bytes(second)
    many = {"gradient_accumulation_steps": 4}
    first, second = (config.model_copy(update=many) for config in (first, second))
    assert stage_bytes(first) > stage_bytes(second)


def test_whole_gradients_of_stage_1_are_in_the_reduce_dtype() -> None:
    size = factories.PARAMETER_BYTES
    config = TrainConfig(ranks=2, zero_stage=1, precision="bf16", gradient_accumulation_steps=2)
    assert model_state_terms(factories.profile(), config)["gradients"] == size
    config = config.model_copy(update={"reduce_dtype": "compute"})
    assert model_state_terms(factories.profile(), config)["gradients"] == size / 2


def test_more_ranks_never_need_more_at_rest() -> None:
    for stage in (1, 2, 3):
        held = [stage_bytes(TrainConfig(ranks=ranks, zero_stage=stage)) for ranks in (2, 4, 64)]
        assert held == sorted(held, reverse=True)


def test_startup_holds_the_whole_model_on_every_rank() -> None:
    size = factories.profile().parameter_bytes + factories.profile().buffer_bytes
    assert startup_bytes(factories.profile(), TrainConfig(ranks=1)) == size
    sharded = TrainConfig(ranks=64, zero_stage=3)
    assert startup_bytes(factories.profile(), sharded) == size
    lowered = sharded.model_copy(update={"precision": "bf16"})
    assert startup_bytes(factories.profile(), lowered) == size + factories.PARAMETER_BYTES / 2


def test_ddp_accumulates_beside_its_buckets() -> None:
    one = TrainConfig(ranks=2)
    many = one.model_copy(update={"gradient_accumulation_steps": 4})
    assert stage_bytes(many) - stage_bytes(one) == factories.PARAMETER_BYTES


def test_gradients_that_replace_activations_are_absent_at_their_peak() -> None:
    profile = factories.profile()
    for config, names in (
        (TrainConfig(), {"gradients"}),
        (TrainConfig(gradient_accumulation_steps=2), set()),
        (TrainConfig(ranks=2), set()),
        (TrainConfig(ranks=2, zero_stage=3), {"gradients", "communication"}),
        (
            TrainConfig(ranks=2, zero_stage=1, gradient_accumulation_steps=2),
            {"communication"},
        ),
        (TrainConfig(ranks=2, zero_stage=3, gradient_accumulation_steps=2), set()),
    ):
        terms = model_state_terms(profile, config)
        assert absent_at_activation_peak(terms, config) == sum(terms[name] for name in names)
