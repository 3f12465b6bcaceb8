from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.records import (
    Hardware,
    Interval,
    ModelProfile,
    Prediction,
    Ranked,
    SearchResult,
    TrialRecord,
    Untried,
    dump,
    load,
)
from runtime.config import TrainConfig
from runtime.measurement import Measurement, RankMemory

texts = st.text(max_size=20)
sizes = st.integers(0, 2**50)
reals = st.floats(allow_nan=False)
configs = st.builds(
    TrainConfig,
    ranks=st.integers(1, 8),
    zero_stage=st.sampled_from([0, 1, 2, 3]),
    gradient_clipping=st.none(),
)


def records(kind: type[Any], **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any `kind`; fields of numbers and text are drawn by their type."""
    by_type = {"int": sizes, "float": reals, "str": texts, "bool": st.booleans()}
    drawn = {
        field.name: by_type[field.type] for field in fields(kind) if str(field.type) in by_type
    }
    return st.builds(kind, **{**drawn, **more})


hardware = records(Hardware)
profiles = records(
    ModelProfile,
    activation_bytes=st.dictionaries(st.integers(1, 64), sizes, max_size=3),
    micro_batch_seconds=st.dictionaries(st.integers(1, 64), reals, max_size=3),
    notes=st.lists(texts, max_size=2).map(tuple),
)
predictions = records(Prediction, terms=st.dictionaries(texts, reals, max_size=2))
measurements = records(
    Measurement,
    step_seconds=st.lists(reals, max_size=3).map(tuple),
    losses=st.lists(reals, max_size=3).map(tuple),
    memory=st.lists(records(RankMemory), max_size=2).map(tuple),
)
trials = records(
    TrialRecord,
    config=configs,
    prediction=st.none() | predictions,
    measurement=measurements,
)
ranked = records(
    Ranked,
    config=configs,
    samples_per_second=records(Interval),
    measurements=st.lists(measurements, max_size=2).map(tuple),
)
results = records(
    SearchResult,
    hardware=hardware,
    profile=profiles,
    trials=st.lists(trials, max_size=2).map(tuple),
    untried=st.lists(records(Untried, config=configs), max_size=2).map(tuple),
    dropped_dimensions=st.dictionaries(texts, texts, max_size=2),
    best=st.none() | ranked,
    runner_up=st.none(),
    plain=st.none() | ranked,
    own=st.none(),
)


@pytest.mark.parametrize(
    "strategy", [hardware, profiles, predictions, measurements, trials, ranked, results]
)
@given(data=st.data())
def test_every_record_survives_json(strategy: st.SearchStrategy[Any], data: st.DataObject) -> None:
    record = data.draw(strategy)
    assert is_dataclass(record)
    assert load(type(record), json.loads(json.dumps(dump(record)))) == record


def test_a_loss_that_is_not_finite_survives_json() -> None:
    """It is just what a run that ended as not finite has to tell."""
    data = {"outcome": "not finite", "global_batch_size": 4, "ranks": 1}
    record = load(Measurement, {**data, "losses": [2.0, math.inf, math.nan]})
    again = load(Measurement, json.loads(json.dumps(dump(record))))
    assert again.losses[:2] == (2.0, math.inf)
    assert math.isnan(again.losses[2])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"outcome": "fine"}, "outcome"),
        ({"ranks": "two"}, "ranks"),
        ({"step_seconds": 1.0}, "step_seconds"),
        ({"memory": [{"parameter_bytes": "much"}]}, "parameter_bytes"),
    ],
)
def test_data_of_another_shape_is_refused(change: dict[str, Any], rule: str) -> None:
    data: dict[str, Any] = {"outcome": "ok", "global_batch_size": 4, "ranks": 1}
    load(Measurement, data)
    with pytest.raises(ValidationError, match=rule):
        load(Measurement, {**data, **change})
    del data["ranks"]
    with pytest.raises(ValidationError, match="ranks"):
        load(Measurement, data)


def test_relative_half_width() -> None:
    interval = Interval(value=50.0, low=48.0, high=53.0, level=0.95, processes=3)
    assert interval.relative_half_width == pytest.approx(0.05)
