"""The job of a trial's rank, started by torchrun: the same building and training, then one file."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from run import CONFIG, MODEL_FILE, STEPS

from autotune.records import dump
from runtime.engine import create_engine
from runtime.measure import make_batches
from runtime.measurement import Measurement, Outcome
from runtime.meter import timed_step
from runtime.model_spec import load_model_spec


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    spec = load_model_spec(MODEL_FILE)
    start = time.perf_counter()
    device = torch.device("cpu")
    engine = create_engine(spec, CONFIG, device)
    batches = make_batches(spec, CONFIG, dist.get_rank())
    build_seconds = time.perf_counter() - start
    steps = [timed_step(engine, batches[0], device) for _ in range(STEPS + 2)]
    engine.close()
    if dist.get_rank() == 0:
        measurement = Measurement(
            outcome=Outcome.OK,
            global_batch_size=CONFIG.global_batch_size,
            ranks=CONFIG.ranks,
            step_seconds=tuple(step.seconds for step in steps[2:]),
            build_seconds=build_seconds,
            training_seconds=sum(step.seconds for step in steps),
        )
        Path(sys.argv[1]).write_text(json.dumps(dump(measurement)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert "LOCAL_RANK" in os.environ, "start it with torchrun"
    main()
