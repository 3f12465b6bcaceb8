from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from runtime.config import (
    ActivationCheckpointing,
    Precision,
    ReduceDtype,
    TrainConfig,
    ZeroStage,
    config_schema,
    load_config,
    parse_config,
    save_config,
)
from runtime.errors import ConfigError, UserError

counts = st.integers(1, 2**31)
configs = st.builds(
    TrainConfig,
    ranks=counts,
    micro_batch_size=counts,
    gradient_accumulation_steps=counts,
    zero_stage=st.sampled_from(get_args(ZeroStage)),
    precision=st.sampled_from(get_args(Precision)),
    reduce_dtype=st.sampled_from(get_args(ReduceDtype)),
    activation_checkpointing=st.sampled_from(get_args(ActivationCheckpointing)),
    compile=st.booleans(),
    gradient_clipping=st.none()
    | st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False),
    threads_per_rank=st.none() | counts,
)


@given(config=configs)
def test_survives_json(config: TrainConfig) -> None:
    assert parse_config(json.loads(config.model_dump_json()), source="here") == config


@given(config=configs, other=configs)
def test_equal_configurations_share_a_hash(config: TrainConfig, other: TrainConfig) -> None:
    assert (config == other) == (config.model_dump() == other.model_dump())
    assert hash(config) == hash(config.model_copy())


@given(config=configs)
def test_global_batch_size(config: TrainConfig) -> None:
    steps, size = config.gradient_accumulation_steps, config.micro_batch_size
    assert config.global_batch_size == config.ranks * size * steps


def test_survives_a_file(tmp_path: Path) -> None:
    config = TrainConfig(ranks=2, micro_batch_size=4, zero_stage=3, precision="bf16")
    save_config(config, tmp_path / "best.json")
    assert load_config(tmp_path / "best.json") == config
    assert set(json.loads((tmp_path / "best.json").read_text())) == set(TrainConfig.model_fields)


def test_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TrainConfig().ranks = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("ranks", 0, "greater than or equal to 1"),
        ("ranks", 2.0, "valid integer"),
        ("ranks", True, "valid integer"),
        ("micro_batch_size", "4", "valid integer"),
        ("micro_batch_size", -4, "greater than or equal to 1"),
        ("gradient_accumulation_steps", None, "valid integer"),
        ("zero_stage", 4, "0, 1, 2 or 3"),
        ("zero_stage", "3", "0, 1, 2 or 3"),
        ("precision", "float16", "'fp32', 'bf16' or 'fp16'"),
        ("precision", ["bf16"], "'fp32', 'bf16' or 'fp16'"),
        ("reduce_dtype", "bf16", "'fp32' or 'compute'"),
        ("activation_checkpointing", True, "'none', 'selective' or 'full'"),
        ("compile", "on", "valid boolean"),
        ("compile", 1, "valid boolean"),
        ("gradient_clipping", 0, "greater than 0"),
        ("gradient_clipping", "1.0", "valid number"),
        ("gradient_clipping", float("nan"), "finite"),
        ("gradient_clipping", float("inf"), "finite"),
        ("threads_per_rank", 0, "greater than or equal to 1"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, key: str, value: Any, rule: str) -> None:
    path = tmp_path / "best.json"
    path.write_text(json.dumps({key: value}))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {key}: ")
    assert rule in message
    assert message.endswith(f"but got {value!r}")
    assert len(message.splitlines()) == 1


def test_an_unknown_key_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"zero_stages": 3}, source="best.json")
    assert "best.json: unknown key 'zero_stages'; the keys are ranks, " in str(caught.value)
    assert "zero_stage," in str(caught.value)


def test_every_mistake_has_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"ranks": 0, "precision": "fp8", "stage": 1}, source="best.json")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("best.json: ") for line in lines)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "must be JSON"),
        (b'{"ranks": 2,}', "must be JSON"),
        (b"\xff\xfe", "must be JSON"),
        (b"[2]", "must hold a JSON object, but got list"),
        (b"null", "must hold a JSON object, but got NoneType"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: bytes, rule: str) -> None:
    path = tmp_path / "best.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rule) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json: No such file"):
        load_config(tmp_path / "none.json")
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        load_config(tmp_path)


def test_schema_describes_every_field() -> None:
    properties = config_schema()["properties"]
    assert set(properties) == set(TrainConfig.model_fields)
    assert all(field["description"] for field in properties.values())
    assert config_schema()["additionalProperties"] is False


@pytest.mark.parametrize(
    ("config", "label"),
    [
        (TrainConfig(), "z0 mb1x1 fp32"),
        (
            TrainConfig(
                zero_stage=2,
                micro_batch_size=4,
                gradient_accumulation_steps=8,
                precision="bf16",
                activation_checkpointing="full",
                compile=True,
            ),
            "z2 mb4x8 bf16/fp32 ckpt=full compile",
        ),
        (TrainConfig(precision="fp16", reduce_dtype="compute"), "z0 mb1x1 fp16/fp16"),
    ],
)
def test_label(config: TrainConfig, label: str) -> None:
    assert config.label() == label
