"""The job of one rank of a trial: build, train, and report each step until it is ended."""

from __future__ import annotations

import random
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from runtime.config import TrainConfig, parse_config
from runtime.engine import create_engine
from runtime.limits import reserved_peak, reset_peak
from runtime.meter import batch_bytes, measured_step, timed_step, timed_steps, tokens_per_sample
from runtime.model_spec import Batch, ModelSpec, load_model_spec
from runtime.rank import RankContext

POOL_BYTES = 64 * 2**20
"""Synthetic batches made ahead of the clock, at most; steps then take them in turn."""


def measure_job(payload: dict[str, Any], context: RankContext) -> None:
    """Report `imported`, `built`, then `step` for each optimizer step, `max_steps` at most.

    `payload` holds the path `model_file`, the TrainConfig `config`, and `max_steps`. The first
    two steps are warm-up (`timed` false): the first creates the optimizer states, the second has
    its allocations recorded and is followed by the report `memory`. The parent ends the run by
    ending the processes, so a step's report never waits for an answer.
    """
    spec = load_model_spec(Path(payload["model_file"]))
    config = parse_config(payload["config"], source="the trial's configuration")
    context.report("imported")

    start = time.perf_counter()
    engine = create_engine(spec, config, context.device)
    batches = make_batches(spec, config, context.rank)
    startup_peak_bytes = reserved_peak(context.memory_baseline)
    context.report(
        "built",
        seconds=time.perf_counter() - start,
        tokens_per_sample=tokens_per_sample(batches[0][0], config.micro_batch_size),
    )
    try:
        warm_up = timed_step(engine, batches[0], context.device)
        context.report("step", timed=False, **asdict(warm_up))
        warm_up, memory = measured_step(
            engine, batches[-1], context, startup_peak_bytes=startup_peak_bytes
        )
        context.report("step", timed=False, **asdict(warm_up))
        context.report("memory", **asdict(memory))
        reset_peak(context.memory_baseline)
        for step in islice(timed_steps(engine, batches, context.device), payload["max_steps"]):
            peak = reserved_peak(context.memory_baseline)
            context.report("step", timed=True, reserved_peak_bytes=peak, **asdict(step))
    finally:
        engine.close()


def make_batches(spec: ModelSpec, config: TrainConfig, rank: int) -> list[list[Batch]]:
    """Global batches of synthetic data for this rank: one at least, two where they fit the pool.

    Each rank draws its own samples; a global batch that exceeds the pool repeats its first
    micro-batches.
    """
    seed_everything(1 + rank)
    first = spec.make_batch(config.micro_batch_size)
    size = max(1, batch_bytes(first))
    wanted = 2 * config.gradient_accumulation_steps
    pool = [first]
    while len(pool) < wanted and (len(pool) + 1) * size <= POOL_BYTES:
        pool.append(spec.make_batch(config.micro_batch_size))
    steps = config.gradient_accumulation_steps
    batches = [
        [pool[(start + index) % len(pool)] for index in range(steps)] for start in (0, steps)
    ]
    return batches if len(pool) > steps else batches[:1]


def seed_everything(seed: int) -> None:
    """Seed every generator that a model file may draw from."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)
