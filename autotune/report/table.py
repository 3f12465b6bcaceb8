"""trials.csv: a row for each configuration of the space, tried or not."""

from __future__ import annotations

from typing import Any

import pandas

from autotune.records import Prediction, SearchResult
from autotune.report.configurations import Tried, name_of, tried_configurations
from runtime.config import TrainConfig

UNTRIED = "not tried"
COLUMNS = (
    *TrainConfig.model_fields,
    "name",
    "role",
    "runs",
    "predicted_allocated_bytes",
    "predicted_reserved_bytes",
    "predicted_fit_probability",
    "predicted_step_seconds",
    "predicted_step_seconds_low",
    "predicted_step_seconds_high",
    "measured_step_seconds",
    "measured_samples_per_second",
    "measured_samples_per_second_low",
    "measured_samples_per_second_high",
    "measured_tokens_per_second",
    "measured_allocated_peak_bytes",
    "measured_reserved_peak_bytes",
    "stopped_early",
    "outcome",
    "reason",
)
"""Seconds are of one optimizer step (measured: the median), rates over all ranks, bytes of one
rank. `low` and `high` bound a fresh run's rate, known for the configurations that were ranked."""


def trials_table(result: SearchResult) -> pandas.DataFrame:
    """The columns `COLUMNS`; tried configurations first, the fastest at the top."""
    tried = sorted(tried_configurations(result), key=lambda t: -(t.samples_per_second or 0.0))
    rows = [_tried_row(item, result) for item in tried]
    rows += [
        {
            **item.config.model_dump(mode="json"),
            **_predicted(item.prediction),
            "runs": 0,
            "outcome": UNTRIED,
            "reason": item.reason,
        }
        for item in result.untried
    ]
    table = pandas.DataFrame(rows, columns=list(COLUMNS))
    counts = [name for name in COLUMNS if name.endswith("_bytes")] + ["threads_per_rank"]
    return table.astype(dict.fromkeys(counts, "Int64"))


def _tried_row(item: Tried, result: SearchResult) -> dict[str, Any]:
    interval = item.interval
    return {
        **item.config.model_dump(mode="json"),
        **_predicted(item.prediction),
        "name": name_of(item.config, result),
        "role": "+".join(item.roles),
        "runs": len(item.trials),
        "measured_step_seconds": item.median_step_seconds,
        "measured_samples_per_second": item.samples_per_second,
        "measured_samples_per_second_low": interval.low if interval else None,
        "measured_samples_per_second_high": interval.high if interval else None,
        "measured_tokens_per_second": item.tokens_per_second,
        "measured_allocated_peak_bytes": item.allocated_peak_bytes,
        "measured_reserved_peak_bytes": item.reserved_peak_bytes,
        "stopped_early": item.stopped_early,
        "outcome": item.outcome.value,
        "reason": item.reason,
    }


def _predicted(prediction: Prediction | None) -> dict[str, Any]:
    if prediction is None:
        return {}
    return {
        "predicted_allocated_bytes": round(prediction.allocated_bytes),
        "predicted_reserved_bytes": round(prediction.reserved_bytes),
        "predicted_fit_probability": prediction.fit_probability,
        "predicted_step_seconds": prediction.step_seconds,
        "predicted_step_seconds_low": prediction.step_seconds_low,
        "predicted_step_seconds_high": prediction.step_seconds_high,
    }
