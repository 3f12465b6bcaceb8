"""What the search ran on and with: hardware, versions, the model, the limits."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from markupsafe import Markup

from autotune import __version__
from autotune.records import Hardware, ModelProfile, SearchResult
from autotune.report.render import render
from autotune.units import format_bytes, format_count, format_seconds

Row = tuple[str, str, str]
"""Name, value, and how it is known: `measured`, `derived`, or empty where it was given."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Facts, grouped."""

    search: tuple[Row, ...]
    hardware: tuple[Row, ...]
    model: tuple[Row, ...]
    activations: tuple[tuple[int, str, str], ...]
    """Micro-batch size, its peak of forward and backward, its seconds: both measured."""
    dropped: tuple[tuple[str, str], ...]


def setting(result: SearchResult) -> Setting:
    """The facts that `result` holds."""
    return Setting(
        search=_search_rows(result),
        hardware=_hardware_rows(result.hardware),
        model=_model_rows(result.profile),
        activations=_activations(result.profile),
        dropped=tuple(result.dropped_dimensions.items()),
    )


def draw_setting(record: Setting) -> Markup:
    """The section that closes the page."""
    return render("setting.html", record=record)


def _search_rows(result: SearchResult) -> tuple[Row, ...]:
    return (
        ("model file", result.model_file, ""),
        ("its hash", result.model_hash[:16], ""),
        ("study", result.study_name, ""),
        ("started", _when(result.started_at), ""),
        ("took", format_seconds(result.seconds), "measured"),
        ("objective", result.objective, ""),
        ("ranks", str(result.ranks), ""),
        ("global batch size", f"{result.global_batch_size} samples", ""),
        ("memory limit of a rank", format_bytes(result.memory_limit_bytes), ""),
        ("runs", str(len(result.trials)), ""),
        ("configurations not run", f"{len(result.untried):,}", ""),
        ("autotune", __version__, ""),
    )


def _when(started_at: str) -> str:
    moment = datetime.datetime.fromisoformat(started_at)
    return moment.astimezone(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _hardware_rows(hardware: Hardware) -> tuple[Row, ...]:
    on_device: tuple[Row, ...] = ()
    if hardware.device == "cuda":
        on_device = (
            ("devices", str(hardware.device_count), ""),
            ("memory of a device", format_bytes(hardware.device_memory_bytes), ""),
        )
    return (
        ("device", f"{hardware.device_name} ({hardware.device})", ""),
        *on_device,
        ("cores", str(hardware.cores), ""),
        ("host memory that may be used", format_bytes(hardware.host_memory_bytes), ""),
        ("bf16 arithmetic", "yes" if hardware.bf16_arithmetic else "no", ""),
        ("fp16 arithmetic", "yes" if hardware.fp16_arithmetic else "no", ""),
        ("compiler", hardware.compiler or "none", ""),
        ("torch", hardware.torch, ""),
        ("python", hardware.python, ""),
        ("platform", hardware.platform, ""),
    )


def _model_rows(profile: ModelProfile) -> tuple[Row, ...]:
    parameters = format_count(profile.parameter_count)
    if profile.trainable_parameter_count != profile.parameter_count:
        parameters += f", {format_count(profile.trainable_parameter_count)} of them trainable"
    blocks = f"{profile.block_count} × {profile.block_class}" if profile.block_class else "none"
    states = profile.parameter_bytes + profile.trainable_bytes + profile.optimizer_state_bytes
    rows: list[Row] = [
        ("parameters", parameters, ""),
        ("parameter bytes", format_bytes(profile.parameter_bytes), ""),
        ("buffers", format_bytes(profile.buffer_bytes), ""),
        ("repeated blocks", blocks, ""),
        ("largest gathered at once", format_bytes(profile.largest_block_bytes), "derived"),
        ("optimizer", profile.optimizer, ""),
        ("optimizer states", format_bytes(profile.optimizer_state_bytes), "measured"),
        ("parameters, gradients and states", format_bytes(states), "derived"),
    ]
    if profile.tokens_per_sample:
        rows.append(("tokens in a sample", str(profile.tokens_per_sample), ""))
    if profile.halves_difference is not None:
        rows.append(
            ("a batch against its halves", f"{profile.halves_difference:.1e} relative", "measured")
        )
    rows.append(("random between two passes", "yes" if profile.stochastic else "no", "measured"))
    return tuple(rows)


def _activations(profile: ModelProfile) -> tuple[tuple[int, str, str], ...]:
    sizes = sorted({*profile.activation_bytes, *profile.micro_batch_seconds})
    return tuple(
        (
            size,
            format_bytes(profile.activation_bytes[size])
            if size in profile.activation_bytes
            else "",
            format_seconds(profile.micro_batch_seconds[size])
            if size in profile.micro_batch_seconds
            else "",
        )
        for size in sizes
    )
