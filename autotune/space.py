"""The tunable dimensions, what of them matters on this machine, and the rules of legality.

The space is finite and small, so it is written out whole: every legal configuration once, in its
canonical form. A dimension or value that cannot matter here is dropped, with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from autotune.choices import Choices, parse_choices, show
from autotune.records import Hardware, ModelProfile
from runtime.config import ActivationCheckpointing, Precision, ReduceDtype, TrainConfig, ZeroStage
from runtime.errors import ConfigError

Value = int | str | bool


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One field of `TrainConfig` that a search may vary."""

    name: str
    values: tuple[Value, ...]
    """The simplest first. Of `micro_batch_size`: the divisors of one rank's share of the batch."""


DIMENSIONS: dict[str, tuple[Value, ...]] = {
    "zero_stage": get_args(ZeroStage),
    "precision": get_args(Precision),
    "reduce_dtype": get_args(ReduceDtype),
    "activation_checkpointing": get_args(ActivationCheckpointing),
    "compile": (False, True),
    "micro_batch_size": (),
}
"""Field of `TrainConfig` → its values; those of the micro-batch follow from the global batch."""

NOT_SEARCHED: dict[str, str] = {
    "ranks": "is given by --ranks",
    "gradient_accumulation_steps": "follows from the micro-batch size and the global batch size",
    "gradient_clipping": "changes what is learned, so it stays as it is",
    "threads_per_rank": "is given by --threads-per-rank",
}
"""Every other field of `TrainConfig`, and why it is not searched."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Every configuration worth considering, once."""

    configs: tuple[TrainConfig, ...]
    """Legal and distinct in execution, the simplest first. Each is its own canonical form, except
    where the user fixed a value that the canonical form would replace (stage 2 at one accumulation
    step): then it carries the user's value."""
    dimensions: tuple[Dimension, ...]
    """Those that apply here, with the values that the configurations take."""
    dropped: dict[str, str]
    """`dimension` or `dimension=value` → the one-line reason why it is not searched here."""
    ranks: int
    global_batch_size: int
    threads_per_rank: int

    def find(self, config: TrainConfig) -> TrainConfig | None:
        """The member that executes as `config` does; None where there is none."""
        wanted = canonical(config)
        return next((member for member in self.configs if canonical(member) == wanted), None)


@dataclass(frozen=True)
class _Drop:
    """Why a value is left out; `possible` where it would run if the user insists."""

    reason: str
    possible: bool


def canonical(config: TrainConfig) -> TrainConfig:
    """The representative of all configurations that execute exactly as `config` does.

    Of several the lowest stage and `reduce_dtype="fp32"` stand for the rest:

    - one rank shards and communicates nothing: stage 0, fp32;
    - in fp32 the compute dtype is fp32: `reduce_dtype` is fp32;
    - with one accumulation step, stages 1 and 2 issue the same collectives and hold the same
      bytes, since the only micro-batch is also the last: stage 1.
    """
    changes: dict[str, Any] = {}
    if config.ranks == 1:
        changes = {"zero_stage": 0, "reduce_dtype": "fp32"}
    else:
        if config.precision == "fp32":
            changes["reduce_dtype"] = "fp32"
        if config.zero_stage == 2 and config.gradient_accumulation_steps == 1:
            changes["zero_stage"] = 1
    return config.model_copy(update=changes) if changes else config


def legal_micro_batches(global_batch_size: int, ranks: int) -> tuple[int, ...]:
    """Divisors of `global_batch_size / ranks`, ascending.

    Raises:
        ConfigError: the ranks do not divide the global batch.
    """
    share, rest = divmod(global_batch_size, ranks)
    if rest or share < 1:
        nearest = {max(1, share) * ranks, (share + 1) * ranks}
        raise ConfigError(
            f"the global batch size must be a multiple of the ranks, but got {global_batch_size} "
            f"with {ranks} ranks: use {' or '.join(map(str, sorted(nearest)))}"
        )
    small = [size for size in range(1, int(share**0.5) + 1) if share % size == 0]
    return tuple(sorted({*small, *(share // size for size in small)}))


def check_request(
    *,
    ranks: int | None,
    global_batch_size: int | None,
    fix: Mapping[str, str],
    vary: Mapping[str, Sequence[str]],
) -> None:
    """Refuse what no model and no machine makes legal, so that nothing need run for it.

    None where the ranks or the global batch size are not known yet: then any size of micro-batch
    may still be legal.

    Raises:
        ConfigError: as `build_space` does.
    """
    micro_batches: tuple[int, ...] = ()
    if ranks is not None and global_batch_size is not None:
        micro_batches = legal_micro_batches(global_batch_size, ranks)
    parse_choices(
        {**DIMENSIONS, "micro_batch_size": micro_batches},
        NOT_SEARCHED,
        share=(global_batch_size or 0) // (ranks or 1) if micro_batches else None,
        fix=fix,
        vary=vary,
    )


def build_space(
    hardware: Hardware,
    profile: ModelProfile,
    *,
    ranks: int,
    global_batch_size: int,
    threads_per_rank: int,
    fix: Mapping[str, str],
    vary: Mapping[str, Sequence[str]],
) -> Space:
    """Enumerate the legal configurations on this hardware.

    Args:
        fix: dimension → its only value, as text (`{"zero_stage": "3"}`).
        vary: dimension → the values to consider, as text; also those that would be dropped as not
            worth a trial, such as compile on CPU.

    Raises:
        ConfigError: an unknown dimension or value, one that cannot run here, or a global batch
            that the ranks do not divide.
    """
    micro_batches = legal_micro_batches(global_batch_size, ranks)
    known = {**DIMENSIONS, "micro_batch_size": micro_batches}
    share = global_batch_size // ranks
    choices = parse_choices(known, NOT_SEARCHED, share=share, fix=fix, vary=vary)
    drops = {
        (name, value): drop
        for name, values in known.items()
        for value in values
        if (drop := _drop(name, value, hardware, profile, ranks)) is not None
    }
    values = {name: _chosen(name, known[name], choices, drops) for name in known}
    configs = _enumerate(values, choices, ranks, share, threads_per_rank)
    return Space(
        configs=configs,
        dimensions=_applying(configs, choices),
        dropped=_explain(known, values, choices, drops),
        ranks=ranks,
        global_batch_size=global_batch_size,
        threads_per_rank=threads_per_rank,
    )


def _drop(
    name: str, value: Value, hardware: Hardware, profile: ModelProfile, ranks: int
) -> _Drop | None:
    if name == "zero_stage" and value != 0 and ranks == 1:
        return _Drop("one rank has nothing to shard its state over", possible=False)
    if name == "reduce_dtype" and value != "fp32" and ranks == 1:
        return _Drop("one rank sends no gradients", possible=False)
    if name == "precision" and value == "fp16" and not hardware.fp16_arithmetic:
        return _Drop(f"{hardware.device_name} has no fp16 arithmetic", possible=True)
    if name == "precision" and value == "bf16" and not hardware.bf16_arithmetic:
        return _Drop(f"{hardware.device_name} has no bf16 arithmetic", possible=True)
    if name == "activation_checkpointing" and value != "none" and not profile.block_count:
        return _Drop("the model has no blocks to checkpoint", possible=False)
    if name == "compile" and value and hardware.compiler is None:
        return _Drop("torch.compile finds no C++ compiler here", possible=False)
    if name == "compile" and value and hardware.device == "cpu":
        return _Drop(
            "compiling takes long on CPU and seldom gains; --vary compile=on,off tries it",
            possible=True,
        )
    if name == "micro_batch_size" and profile.activation_bytes:
        smallest = min(profile.activation_bytes)
        if int(value) < smallest:
            return _Drop(f"the model failed below {smallest} samples in its profile", False)
    return None


def _chosen(
    name: str,
    known: tuple[Value, ...],
    choices: Choices,
    drops: Mapping[tuple[str, Value], _Drop],
) -> tuple[Value, ...]:
    asked = choices.values.get(name)
    if asked is None:
        kept = tuple(value for value in known if (name, value) not in drops)
        if not kept:
            reason = next(drop.reason for (other, _), drop in drops.items() if other == name)
            raise ConfigError(f"no {name} is left to try: {reason}; use a larger global batch size")
        return kept
    for value in asked:
        drop = drops.get((name, value))
        if drop is not None and not drop.possible:
            raise ConfigError(f"{name}={show(value)} cannot run here: {drop.reason}")
    return asked


def _enumerate(
    values: Mapping[str, tuple[Value, ...]],
    choices: Choices,
    ranks: int,
    share: int,
    threads_per_rank: int,
) -> tuple[TrainConfig, ...]:
    found: dict[TrainConfig, TrainConfig] = {}
    for point in itertools.product(*values.values()):
        settings: dict[str, Any] = dict(zip(values, point, strict=True))
        config = TrainConfig(
            ranks=ranks,
            gradient_accumulation_steps=share // settings["micro_batch_size"],
            threads_per_rank=threads_per_rank,
            **settings,
        )
        representative = canonical(config)
        # Where the user excluded the representative itself, the member they asked for stands.
        asked = all(
            getattr(representative, name) in chosen for name, chosen in choices.values.items()
        )
        found.setdefault(representative, representative if asked else config)
    return tuple(found.values())


def _applying(configs: Sequence[TrainConfig], choices: Choices) -> tuple[Dimension, ...]:
    dimensions = []
    for name in DIMENSIONS:
        taken = tuple(dict.fromkeys(getattr(config, name) for config in configs))
        if len(taken) > 1 or name in choices.values or name == "micro_batch_size":
            dimensions.append(Dimension(name=name, values=taken))
    return tuple(dimensions)


def _explain(
    known: Mapping[str, tuple[Value, ...]],
    values: Mapping[str, tuple[Value, ...]],
    choices: Choices,
    drops: Mapping[tuple[str, Value], _Drop],
) -> dict[str, str]:
    explained: dict[str, str] = {}
    for name in known:
        if name in choices.values:
            continue
        left_out = [value for value in known[name] if value not in values[name]]
        if left_out and len(values[name]) == 1:
            reasons = dict.fromkeys(drops[name, value].reason for value in left_out)
            explained[name] = "; ".join(reasons)
        else:
            explained.update(
                {f"{name}={show(value)}": drops[name, value].reason for value in left_out}
            )
    if "reduce_dtype" not in explained and values["precision"] == ("fp32",):
        explained["reduce_dtype"] = "gradients travel in fp32 where the precision is fp32"
    return explained
