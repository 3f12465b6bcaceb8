"""Search results as a real search would leave them, from a small cost model and a seed."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

from autotune.records import (
    Hardware,
    Interval,
    ModelProfile,
    Prediction,
    Ranked,
    Role,
    SearchResult,
    TrialRecord,
    Untried,
)
from runtime.config import TrainConfig
from runtime.measurement import Measurement, Outcome, RankMemory

MIB = 2**20
LIMIT = 900 * MIB
PARAMETER_BYTES = 43_300_000
GLOBAL_BATCH = 64
TRACEBACK = """Traceback (most recent call last):
  File "/home/ada/gpt/model.py", line 71, in forward
    attention = self.attention(x, mask=mask)
  File "/home/ada/gpt/model.py", line 44, in attention
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask & "<causal>")
TypeError: unsupported operand type(s) for &: 'Tensor' and 'str' <script>alert(1)</script>
"""
CAUSE = "TypeError: unsupported operand type(s) for &: 'Tensor' and 'str' <script>alert(1)</script>"


def config(micro_batch_size: int = 4, **fields: object) -> TrainConfig:
    """A legal configuration of the global batch on 2 ranks (or `ranks`)."""
    ranks = int(str(fields.get("ranks", 2)))
    values: dict[str, object] = {
        "ranks": ranks,
        "micro_batch_size": micro_batch_size,
        "gradient_accumulation_steps": max(1, GLOBAL_BATCH // ranks // micro_batch_size),
        "threads_per_rank": 1,
    }
    return TrainConfig.model_validate(values | fields)


def memory_of(cfg: TrainConfig) -> RankMemory:
    shards = cfg.ranks
    parameters = PARAMETER_BYTES // (shards if cfg.zero_stage == 3 else 1)
    if 1 <= cfg.zero_stage < 3 and cfg.precision != "fp32":
        parameters = PARAMETER_BYTES // shards + PARAMETER_BYTES // 2
    gradients = PARAMETER_BYTES // (shards if cfg.zero_stage >= 2 else 1)
    optimizer = 2 * PARAMETER_BYTES // (shards if cfg.zero_stage >= 1 else 1)
    per_sample = {"none": 41, "selective": 27, "full": 11}[cfg.activation_checkpointing] * MIB
    width = 1.0 if cfg.precision == "fp32" else 0.62
    other = int(18 * MIB + per_sample * width * cfg.micro_batch_size)
    allocated = parameters + gradients + optimizer + other
    return RankMemory(
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
        allocated_peak_bytes=allocated,
        reserved_peak_bytes=int(allocated * 1.06 + 21 * MIB),
        startup_peak_bytes=2 * PARAMETER_BYTES,
    )


def seconds_of(cfg: TrainConfig) -> float:
    """Seconds of one optimizer step."""
    compute = (
        0.021 * GLOBAL_BATCH / cfg.ranks / {"fp32": 1.0, "bf16": 1.38, "fp16": 0.8}[cfg.precision]
    )
    compute *= {"none": 1.0, "selective": 1.13, "full": 1.31}[cfg.activation_checkpointing]
    compute *= 1 + 0.55 / cfg.micro_batch_size
    accumulation = cfg.gradient_accumulation_steps
    gathers = (0.0, 0.03, 0.03, 0.03 * accumulation)[cfg.zero_stage]
    reduces = (0.05, 0.03, 0.02 * accumulation, 0.02 * accumulation)[cfg.zero_stage]
    narrow = 0.6 if cfg.reduce_dtype == "compute" and cfg.precision != "fp32" else 1.0
    optimizer = 0.06 if cfg.zero_stage == 0 else 0.034
    return compute + (gathers + reduces * narrow) * (cfg.ranks > 1) + optimizer


def prediction_of(cfg: TrainConfig, generator: random.Random) -> Prediction:
    memory = memory_of(cfg)
    other = memory.other_bytes * generator.uniform(0.9, 1.08)
    terms = {
        "parameters": float(memory.parameter_bytes),
        "gradients": float(memory.gradient_bytes),
        "optimizer": float(memory.optimizer_bytes),
        "activations": other * 0.93,
        "communication": other * 0.07,
    }
    allocated = sum(terms.values())
    reserved = allocated * 1.07 + 20 * MIB
    seconds = seconds_of(cfg) * generator.uniform(0.9, 1.12)
    return Prediction(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        reserved_deviation_bytes=40 * MIB,
        fit_probability=min(1.0, max(0.0, 0.5 + (LIMIT - reserved) / (160 * MIB))),
        terms=terms,
        step_seconds=seconds,
        step_seconds_low=seconds * 0.88,
        step_seconds_high=seconds * 1.14,
    )


def measurement_of(
    cfg: TrainConfig,
    generator: random.Random,
    *,
    noise: float = 0.02,
    outcome: Outcome | None = None,
    limit: int = LIMIT,
) -> Measurement:
    """What running `cfg` would have given; out of memory above `limit` unless told otherwise."""
    memory = memory_of(cfg)
    if outcome is None:
        outcome = Outcome.OK if memory.charged_peak_bytes <= limit else Outcome.OUT_OF_MEMORY
    common = {"global_batch_size": cfg.global_batch_size, "ranks": cfg.ranks}
    times = {"startup_seconds": 0.07, "build_seconds": 0.31, "total_seconds": 6.2}
    reasons = {
        Outcome.OUT_OF_MEMORY: f"rank 1 asked for 42 MiB above its limit of {limit // MIB} MiB",
        Outcome.TIMED_OUT: "no end after 120 s: every process was ended",
        Outcome.CRASHED: CAUSE,
        Outcome.NOT_FINITE: "the loss of step 3 is nan",
    }
    if outcome is not Outcome.OK:
        crashed = outcome is Outcome.CRASHED
        return Measurement(
            outcome=outcome,
            reason=reasons[outcome],
            traceback=TRACEBACK if crashed else "",
            failed_rank=1 if outcome is not Outcome.TIMED_OUT else None,
            **common,
            **times,
        )
    process = generator.gauss(1, noise / 2)
    steps = [seconds_of(cfg) * process * generator.gauss(1, noise) for _ in range(14)]
    other_rank = replace(memory, reserved_peak_bytes=memory.reserved_peak_bytes - 3 * MIB)
    return Measurement(
        outcome=outcome,
        step_seconds=tuple(steps),
        losses=tuple(6.9 - 0.11 * step for step in range(16)),
        tokens_per_sample=256,
        memory=(memory, other_rank)[: cfg.ranks],
        **common,
        **times,
    )


def hardware(**fields: object) -> Hardware:
    values: dict[str, object] = {
        "device": "cpu",
        "device_name": "AMD EPYC 9B14",
        "device_count": 0,
        "cores": 2,
        "host_memory_bytes": 22 * 2**30,
        "device_memory_bytes": 0,
        "fp16_arithmetic": False,
        "bf16_arithmetic": True,
        "compiler": "/usr/bin/g++",
        "python": "3.11.9",
        "torch": "2.13.0+cpu",
        "platform": "Linux-6.1.0-x86_64-with-glibc2.36",
    }
    return Hardware(**(values | fields))  # type: ignore[arg-type]


def profile(**fields: object) -> ModelProfile:
    values: dict[str, object] = {
        "parameter_count": PARAMETER_BYTES // 4,
        "trainable_parameter_count": PARAMETER_BYTES // 4,
        "parameter_bytes": PARAMETER_BYTES,
        "trainable_bytes": PARAMETER_BYTES,
        "buffer_bytes": 1_200,
        "block_class": "Block",
        "block_count": 6,
        "largest_block_bytes": 7_080_000,
        "root_bytes": 800_000,
        "optimizer": "AdamW",
        "optimizer_state_bytes": 2 * PARAMETER_BYTES,
        "tokens_per_sample": 256,
        "activation_bytes": {1: 59 * MIB, 2: 100 * MIB},
        "micro_batch_seconds": {1: 0.033, 2: 0.054},
        "halves_difference": 1.2e-6,
    }
    return ModelProfile(**(values | fields))  # type: ignore[arg-type]


def ranked(measurements: list[Measurement], cfg: TrainConfig, half_width: float) -> Ranked:
    rates = sorted(m.samples_per_second or 0.0 for m in measurements)
    value = rates[len(rates) // 2]
    return Ranked(
        config=cfg,
        samples_per_second=Interval(
            value=value,
            low=value * (1 - half_width),
            high=value * (1 + half_width),
            level=0.9,
            processes=len(measurements),
        ),
        measurements=tuple(measurements),
        in_turn=len(measurements) >= 3,
    )


def search_result(
    *, seed: int = 0, ranks: int = 2, half_width: float = 0.021, own: bool = True, size: int = 26
) -> SearchResult:
    """About `size` trials of every outcome, leaders confirmed, thousands left untried."""
    generator = random.Random(seed)
    stages = (0, 1, 2, 3) if ranks > 1 else (0,)
    space = [
        config(
            micro,
            ranks=ranks,
            zero_stage=stage,
            precision=precision,
            reduce_dtype=reduce,
            activation_checkpointing=checkpointing,
        )
        for micro, stage, precision, reduce, checkpointing in product(
            (1, 2, 4, 8, 16, 32),
            stages,
            ("fp32", "bf16"),
            ("fp32", "compute"),
            ("none", "selective", "full"),
        )
        if not (precision == "fp32" and reduce == "compute")
    ]
    fits = [cfg for cfg in space if memory_of(cfg).charged_peak_bytes <= LIMIT]
    by_speed = sorted(fits, key=seconds_of)
    best, second = by_speed[0], by_speed[1]
    plain = max(
        (
            cfg
            for cfg in fits
            if cfg.zero_stage == 0
            and cfg.precision == "fp32"
            and cfg.activation_checkpointing == "none"
        ),
        key=lambda cfg: cfg.micro_batch_size,
    )
    mine = config(
        4, ranks=ranks, zero_stage=stages[-1], precision="bf16", activation_checkpointing="full"
    )
    chosen: list[tuple[Role, TrainConfig, Outcome | None]] = [("plain", plain, None)]
    if own:
        chosen.append(("own", mine, None))
    others = [cfg for cfg in space if cfg not in (plain, mine, best, second)]
    too_large = [cfg for cfg in others if cfg not in fits]
    picks = generator.sample([cfg for cfg in others if cfg in fits], min(size, len(fits)) - 12)
    picks += generator.sample(too_large, 4)
    neighbours = [
        plain.model_copy(update={"precision": "bf16"}),
        best.model_copy(update={"activation_checkpointing": plain.activation_checkpointing}),
        best.model_copy(update={"precision": "fp32", "reduce_dtype": "fp32"}),
    ]
    forced = dict(
        zip(range(4, 10), [Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.NOT_FINITE], strict=False)
    )
    chosen += [("search", cfg, forced.get(i)) for i, cfg in enumerate(picks)]
    chosen += [
        ("search", cfg, None)
        for cfg in dict.fromkeys((*neighbours, best, second))
        if cfg not in {c for _, c, _ in chosen}
    ]
    chosen += [("confirm", cfg, None) for _ in range(2) for cfg in (best, second, plain)]
    if own:
        chosen += [("confirm", mine, None)] * 2

    trials, seen = [], {}
    for number, (role, cfg, outcome) in enumerate(chosen):
        measured = measurement_of(cfg, generator, outcome=outcome)
        if (
            outcome is None
            and measured.outcome is Outcome.OK
            and role == "search"
            and number % 5 == 3
        ):
            measured = replace(measured, step_seconds=measured.step_seconds[:4], stopped_early=True)
        seen.setdefault(cfg, []).append(measured)
        trials.append(
            TrialRecord(
                number=number,
                role=role,
                config=cfg,
                measurement=measured,
                prediction=prediction_of(cfg, generator),
            )
        )
    untried = [_untried(cfg, generator) for cfg in space if cfg not in seen]
    return SearchResult(
        model_file="studies/gpt/model.py",
        model_hash="4be1c9a0" * 8,
        study_name="gpt",
        command=f"autotune search studies/gpt/model.py --ranks {ranks} --memory-limit 900MiB",
        started_at="2026-11-30T10:12:05+00:00",
        seconds=176.4,
        objective="throughput",
        global_batch_size=GLOBAL_BATCH,
        ranks=ranks,
        memory_limit_bytes=LIMIT,
        hardware=hardware(),
        profile=profile(),
        trials=tuple(trials),
        untried=tuple(untried),
        dropped_dimensions={"compile": "off on CPU unless asked for with --vary compile=on,off"},
        best=ranked(seen[best], best, half_width),
        runner_up=ranked(seen[second], second, half_width),
        plain=ranked(seen[plain], plain, half_width),
        own=ranked(seen[mine], mine, half_width) if own else None,
        stopped_because="no untried configuration is predicted to be more than 2% faster",
    )


def nothing_fits(limit: int = 60 * MIB) -> SearchResult:
    """Every trial out of memory: the smallest configuration needs more than the limit."""
    generator = random.Random(1)
    result = search_result()
    trials = tuple(
        replace(
            trial,
            number=number,
            measurement=measurement_of(
                trial.config, generator, outcome=Outcome.OUT_OF_MEMORY, limit=limit
            ),
        )
        for number, trial in enumerate(result.trials[:3])
    )
    return replace(
        result,
        trials=trials,
        best=None,
        runner_up=None,
        plain=None,
        own=None,
        memory_limit_bytes=limit,
        stopped_because="no configuration fits the memory limit",
    )


def nothing_measured() -> SearchResult:
    """Interrupted before the first trial ended."""
    return replace(
        search_result(),
        trials=(),
        best=None,
        runner_up=None,
        plain=None,
        own=None,
        stopped_because="interrupted",
    )


def one_trial() -> SearchResult:
    """The plain configuration alone, in one process."""
    result = search_result()
    first = result.trials[0]
    alone = ranked([first.measurement], first.config, 0.19)
    return replace(result, trials=(first,), best=alone, plain=alone, runner_up=None, own=None)


def _untried(cfg: TrainConfig, generator: random.Random) -> Untried:
    prediction = prediction_of(cfg, generator)
    if prediction.fit_probability < 0.05:
        gib = prediction.reserved_bytes / 2**30
        reason = f"predicted to need {gib:.2f} GiB of {LIMIT / 2**30:.2f} GiB"
    else:
        reason = "predicted to be slower than the best by more than its uncertainty"
    return Untried(config=cfg, reason=reason, prediction=prediction)
