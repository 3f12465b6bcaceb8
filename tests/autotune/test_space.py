from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.space import DIMENSIONS, NOT_SEARCHED, Space, build_space, canonical
from runtime.config import TrainConfig
from runtime.errors import ConfigError
from tests.autotune import factories

MIB = 2**20


def make_space(
    *,
    ranks: int = 2,
    global_batch_size: int = 8,
    fix: dict[str, str] | None = None,
    vary: dict[str, list[str]] | None = None,
    profile: dict[str, Any] | None = None,
    **hardware: Any,
) -> Space:
    return build_space(
        factories.hardware(**{"fp16_arithmetic": True, **hardware}),
        factories.profile(**(profile or {})),
        ranks=ranks,
        global_batch_size=global_batch_size,
        threads_per_rank=1,
        fix=fix or {},
        vary=vary or {},
    )


def taken(space: Space, name: str) -> set[Any]:
    return {getattr(config, name) for config in space.configs}


any_config = st.builds(
    TrainConfig,
    ranks=st.integers(1, 4),
    micro_batch_size=st.integers(1, 8),
    gradient_accumulation_steps=st.integers(1, 4),
    zero_stage=st.sampled_from(DIMENSIONS["zero_stage"]),
    precision=st.sampled_from(DIMENSIONS["precision"]),
    reduce_dtype=st.sampled_from(DIMENSIONS["reduce_dtype"]),
    activation_checkpointing=st.sampled_from(DIMENSIONS["activation_checkpointing"]),
    compile=st.booleans(),
)
any_space = st.builds(
    lambda ranks, share, **flags: make_space(ranks=ranks, global_batch_size=ranks * share, **flags),
    ranks=st.integers(1, 8),
    share=st.integers(1, 60),
    fp16_arithmetic=st.booleans(),
    bf16_arithmetic=st.booleans(),
    compiler=st.sampled_from([None, "/usr/bin/g++"]),
    device=st.sampled_from(["cpu", "cuda"]),
)


def test_every_field_is_a_dimension_or_stated_as_not_searched() -> None:
    assert set(TrainConfig.model_fields) == set(DIMENSIONS) | set(NOT_SEARCHED)
    assert not set(DIMENSIONS) & set(NOT_SEARCHED)


@settings(max_examples=40, deadline=None)
@given(space=any_space)
def test_members_keep_the_global_batch_and_are_distinct_in_execution(space: Space) -> None:
    for config in space.configs:
        steps = config.gradient_accumulation_steps
        assert config.micro_batch_size * steps * space.ranks == space.global_batch_size
        assert config == canonical(config)
        assert space.find(config) == config
    assert len(set(space.configs)) == len(space.configs) > 0
    assert taken(space, "micro_batch_size") == {
        size
        for size in range(1, space.global_batch_size + 1)
        if space.global_batch_size % (size * space.ranks) == 0
    }


@given(config=any_config)
def test_canonical_is_idempotent_and_keeps_what_decides_execution(config: TrainConfig) -> None:
    once = canonical(config)
    assert canonical(once) == once
    kept = ("ranks", "micro_batch_size", "gradient_accumulation_steps", "precision", "compile")
    assert all(getattr(once, name) == getattr(config, name) for name in kept)
    assert once.zero_stage <= config.zero_stage


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"zero_stage": 1}, {"zero_stage": 2}, True),
        (
            {"zero_stage": 1, "gradient_accumulation_steps": 2},
            {"zero_stage": 2, "gradient_accumulation_steps": 2},
            False,
        ),
        ({"zero_stage": 0}, {"zero_stage": 1}, False),
        ({"reduce_dtype": "fp32"}, {"reduce_dtype": "compute"}, True),
        (
            {"precision": "bf16", "reduce_dtype": "fp32"},
            {"precision": "bf16", "reduce_dtype": "compute"},
            False,
        ),
        (
            {"ranks": 1, "zero_stage": 3, "precision": "bf16", "reduce_dtype": "compute"},
            {"ranks": 1, "precision": "bf16"},
            True,
        ),
    ],
)
def test_canonical_joins_what_executes_identically(
    one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    first, second = (TrainConfig(**{"ranks": 2, **changes}) for changes in (one, other))
    assert (canonical(first) == canonical(second)) is same


def test_one_rank_drops_the_stages_and_says_so() -> None:
    space = make_space(ranks=1)
    assert taken(space, "zero_stage") == {0}
    assert taken(space, "reduce_dtype") == {"fp32"}
    assert {"zero_stage", "reduce_dtype"} <= space.dropped.keys()
    assert {dimension.name for dimension in space.dimensions} == {
        "precision",
        "activation_checkpointing",
        "micro_batch_size",
    }


@pytest.mark.parametrize(
    ("hardware", "profile", "key"),
    [
        ({"fp16_arithmetic": False}, {}, "precision=fp16"),
        ({"bf16_arithmetic": False}, {}, "precision=bf16"),
        ({"fp16_arithmetic": False, "bf16_arithmetic": False}, {}, "precision"),
        ({"compiler": None}, {}, "compile"),
        ({"compiler": None, "device": "cuda"}, {}, "compile"),
        ({}, {}, "compile"),
        ({}, {"block_count": 0, "block_class": None}, "activation_checkpointing"),
        ({}, {"activation_bytes": {2: MIB, 4: 2 * MIB}}, "micro_batch_size=1"),
    ],
)
def test_what_cannot_matter_here_is_dropped_with_a_reason(
    hardware: dict[str, Any], profile: dict[str, Any], key: str
) -> None:
    space = make_space(profile=profile, **hardware)
    name, _, value = key.partition("=")
    assert "\n" not in space.dropped[key]
    assert len(taken(space, name)) == 1 if not value else value not in map(str, taken(space, name))


def test_compile_is_searched_on_cuda_with_a_compiler() -> None:
    assert taken(make_space(device="cuda"), "compile") == {False, True}


def test_fp32_alone_drops_the_reduce_dtype() -> None:
    space = make_space(fix={"precision": "fp32"})
    assert taken(space, "reduce_dtype") == {"fp32"}
    assert "reduce_dtype" in space.dropped


def test_vary_asks_for_what_is_only_unlikely_to_pay() -> None:
    space = make_space(
        vary={"compile": ["on", "off"], "precision": ["fp16", "fp32"]}, fp16_arithmetic=False
    )
    assert taken(space, "compile") == {False, True}
    assert taken(space, "precision") == {"fp16", "fp32"}
    assert not {"compile", "precision=fp16", "precision"} & space.dropped.keys()


def test_fix_keeps_the_users_value_where_another_executes_alike() -> None:
    space = make_space(fix={"zero_stage": "2", "precision": "fp32"})
    assert taken(space, "zero_stage") == {2}
    same = TrainConfig(ranks=2, micro_batch_size=4, zero_stage=1, threads_per_rank=1)
    member = space.find(same)
    assert member is not None
    assert (member.zero_stage, member.gradient_accumulation_steps) == (2, 1)
    assert len({canonical(config) for config in space.configs}) == len(space.configs)


@pytest.mark.parametrize("text", ["on", "true", "ON"])
def test_compile_reads_on_and_true(text: str) -> None:
    assert taken(make_space(fix={"compile": text}), "compile") == {True}


def test_accumulation_steps_are_read_as_the_micro_batch_that_they_leave() -> None:
    space = make_space(fix={"gradient_accumulation_steps": "4"})
    assert taken(space, "micro_batch_size") == {1}
    both = make_space(fix={"gradient_accumulation_steps": "2", "micro_batch_size": "2"})
    assert taken(both, "micro_batch_size") == {2}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fix": {"zero_stag": "3"}}, ["zero_stag", "did you mean 'zero_stage'?", "precision"]),
        ({"fix": {"zero_stage": "4"}}, ["0, 1, 2, 3", "'4'"]),
        ({"fix": {"precision": "bf61"}}, ["fp32, bf16, fp16", "did you mean 'bf16'?"]),
        ({"fix": {"compile": "yes"}}, ["on, true, off, false", "'yes'"]),
        ({"fix": {"micro_batch_size": "3"}}, ["1, 2, 4", "'3'"]),
        ({"fix": {"ranks": "3"}}, ["--ranks"]),
        ({"vary": {"precision": []}}, ["at least one value"]),
        ({"fix": {"compile": "on"}, "vary": {"compile": ["on"]}}, ["both"]),
        (
            {"fix": {"micro_batch_size": "4", "gradient_accumulation_steps": "4"}},
            ["must be 4", "leave 1"],
        ),
        ({"ranks": 1, "fix": {"zero_stage": "3"}}, ["zero_stage=3", "one rank"]),
        ({"fix": {"compile": "on"}, "compiler": None}, ["compile=on", "no C++ compiler"]),
        (
            {"fix": {"activation_checkpointing": "full"}, "profile": {"block_count": 0}},
            ["activation_checkpointing=full", "no blocks"],
        ),
        ({"ranks": 3, "global_batch_size": 8}, ["8 with 3 ranks", "6 or 9"]),
        ({"ranks": 4, "global_batch_size": 2}, ["2 with 4 ranks", "use 4"]),
        (
            {"global_batch_size": 2, "profile": {"activation_bytes": {2: MIB, 4: MIB}}},
            ["micro_batch_size", "larger global batch size"],
        ),
    ],
)
def test_wrong_requests_are_refused_with_the_rule(options: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_space(**options)
    assert all(text in str(caught.value) for text in said), str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_ten_thousand_configurations_are_listed_in_under_a_second() -> None:
    start = time.perf_counter()
    space = make_space(global_batch_size=2 * 5040 * 11 * 13, vary={"compile": ["on", "off"]})
    seconds = time.perf_counter() - start
    assert len(space.configs) > 10_000
    assert seconds < 1.0 * len(space.configs) / 10_000
