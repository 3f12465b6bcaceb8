"""What one configuration does differently from another, and what each difference brought.

A difference is priced by two measured configurations that differ in it alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.report.configurations import Tried
from runtime.config import TrainConfig
from runtime.measurement import Outcome

_SETTINGS: dict[str, tuple[str, ...]] = {
    "micro-batch × accumulation": ("micro_batch_size", "gradient_accumulation_steps"),
    "ZeRO stage": ("zero_stage",),
    "precision": ("precision",),
    "gradients travel in": ("reduce_dtype",),
    "activation checkpointing": ("activation_checkpointing",),
    "compile": ("compile",),
    "gradient clipping": ("gradient_clipping",),
    "threads per rank": ("threads_per_rank",),
    "ranks": ("ranks",),
}
"""Name → the fields that change together: the global batch is fixed."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One setting that differs, and the pair that shows what it is worth."""

    setting: str
    before: str
    after: str
    rate_ratio: float | None = None
    """Throughput after ÷ before in the pair; None where no pair was measured."""
    memory_bytes: int | None = None
    """Reserved peak after minus before in the pair."""
    pair: tuple[str, str] | None = None
    """Labels of the two configurations, before and after."""
    needed_to_fit: bool = False
    """With this setting turned back the run is out of memory."""

    @property
    def told(self) -> bool:
        """Something was measured about this setting alone."""
        return self.needed_to_fit or self.rate_ratio is not None


def differing_settings(before: TrainConfig, after: TrainConfig) -> tuple[str, ...]:
    """The names of the settings in which two configurations differ."""
    return tuple(
        name
        for name, fields in _SETTINGS.items()
        if any(getattr(before, field) != getattr(after, field) for field in fields)
    )


def setting_value(config: TrainConfig, setting: str) -> str:
    """As a reader would write it: `16 × 2`, `on`, `none`."""
    if setting == "gradients travel in":
        return config.precision if config.reduce_dtype == "compute" else "fp32"
    values = [getattr(config, field) for field in _SETTINGS[setting]]
    return " × ".join(
        {"True": "on", "False": "off", "None": "none"}.get(str(value), str(value))
        for value in values
    )


def differences(
    before: TrainConfig, after: TrainConfig, tried: Iterable[Tried]
) -> tuple[Difference, ...]:
    """Every setting that differs between `before` and `after`, priced where `tried` allows.

    Of several pairs, the one closest to `after` counts.
    """
    known = list(tried)
    return tuple(
        _priced(setting, before, after, known) for setting in differing_settings(before, after)
    )


def _priced(
    setting: str, before: TrainConfig, after: TrainConfig, known: list[Tried]
) -> Difference:
    named = Difference(
        setting=setting,
        before=setting_value(before, setting),
        after=setting_value(after, setting),
    )
    pairs = [
        (low, high)
        for high in known
        if _same(setting, high.config, after)
        for low in known
        if _same(setting, low.config, before) and _alone(setting, low.config, high.config)
    ]
    turned_back = [low for low, high in pairs if high.config == after]
    if any(low.outcome is Outcome.OUT_OF_MEMORY for low in turned_back):
        return Difference(
            setting=setting, before=named.before, after=named.after, needed_to_fit=True
        )
    timed = [
        (low, high, high.samples_per_second / low.samples_per_second)
        for low, high in pairs
        if low.samples_per_second and high.samples_per_second
    ]
    if not timed:
        return named
    low, high, ratio = min(timed, key=lambda pair: _distance(pair[0], pair[1], after))
    low_peak, high_peak = low.reserved_peak_bytes, high.reserved_peak_bytes
    return Difference(
        setting=setting,
        before=named.before,
        after=named.after,
        rate_ratio=ratio,
        memory_bytes=high_peak - low_peak if high_peak and low_peak else None,
        pair=(low.config.label(), high.config.label()),
    )


def _alone(setting: str, low: TrainConfig, high: TrainConfig) -> bool:
    differing = set(differing_settings(low, high))
    if setting == "precision" and "fp32" in (low.precision, high.precision):
        differing.discard("gradients travel in")  # in fp32 there is nothing to choose
    return differing == {setting}


def _same(setting: str, one: TrainConfig, other: TrainConfig) -> bool:
    return all(getattr(one, field) == getattr(other, field) for field in _SETTINGS[setting])


def _distance(low: Tried, high: Tried, after: TrainConfig) -> tuple[int, int]:
    return len(differing_settings(high.config, after)), low.stopped_early + high.stopped_early
