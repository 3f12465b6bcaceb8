"""What does one trial cost beyond building the model and training it?

Runs the same configuration of studies/gpt/model.py in turn through the fork server, as a search
does, and through a fresh `torchrun` of the same job. Overhead is the wall-clock time from the
request until every process has gone, less the seconds that the ranks spent building and training.

    python studies/benchmarks/trial_overhead/run.py [--trials 20] [--torchrun 5]

Writes raw.csv and table.md beside this file. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import psutil

from autotune.records import load
from autotune.trial import TrialPlan, run_trial
from runtime.config import TrainConfig
from runtime.launch import Launcher
from runtime.measurement import Measurement, Outcome

HERE = Path(__file__).resolve().parent
MODEL_FILE = HERE.parents[1] / "gpt" / "model.py"
RANKS = 2
STEPS = 3
CONFIG = TrainConfig(ranks=RANKS, micro_batch_size=2, zero_stage=2, threads_per_rank=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20, help="runs through the fork server")
    parser.add_argument("--torchrun", type=int, default=5, help="runs through torchrun")
    options = parser.parse_args()
    rows = []
    with Launcher() as launcher:
        for index in range(options.trials):
            rows.append({"launcher": "fork server", "run": index, **forked(launcher)})
            print(rows[-1], flush=True)
            if index * options.torchrun // options.trials > (index - 1) * options.torchrun // (
                options.trials
            ):
                rows.append({"launcher": "torchrun", "run": index, **torchrun()})
                print(rows[-1], flush=True)
    frame = pd.DataFrame(rows)
    frame.to_csv(HERE / "raw.csv", index=False, float_format="%.4f")
    # The first trial also waits for the fork server to import torch: shown, not hidden.
    first = frame[frame["launcher"] == "fork server"].iloc[[0]].assign(launcher="first trial")
    rest = frame.drop(first.index)
    table = (
        pd.concat([first, rest])
        .groupby("launcher", sort=False)["overhead_seconds"]
        .agg(runs="count", median="median", min="min", max="max")
    )
    lines = ["| launcher | runs | median s | min s | max s |", "| --- | --- | --- | --- | --- |"]
    for name, row in table.iterrows():
        lines.append(
            f"| {name} | {row['runs']:.0f} | {row['median']:.2f} | {row['min']:.2f} "
            f"| {row['max']:.2f} |"
        )
    text = "\n".join(lines) + f"\n\n{machine()}\n"
    (HERE / "table.md").write_text(text, encoding="utf-8")
    print(text)


def forked(launcher: Launcher) -> dict[str, float]:
    """One trial as a search runs it."""
    measurement = run_trial(
        launcher,
        MODEL_FILE,
        CONFIG,
        threads_per_rank=1,
        memory_limit_bytes=4 * 2**30,
        plan=TrialPlan(max_steps=STEPS),
        keep_going=lambda seconds: len(seconds) < STEPS,
    )
    return _row(measurement)


def torchrun() -> dict[str, float]:
    """The same job under a fresh `torchrun`."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "measurement.json"
        start = time.monotonic()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", str(HERE / "torchrun_job.py"), str(result)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
        total = time.monotonic() - start
        measurement = load(Measurement, json.loads(result.read_text(encoding="utf-8")))
    return _row(measurement, total)


def _row(measurement: Measurement, total_seconds: float | None = None) -> dict[str, float]:
    if measurement.outcome is not Outcome.OK:
        raise RuntimeError(f"{measurement.outcome.value}: {measurement.reason}")
    total = measurement.total_seconds if total_seconds is None else total_seconds
    spent = measurement.build_seconds + measurement.training_seconds
    return {
        "total_seconds": total,
        "build_seconds": measurement.build_seconds,
        "training_seconds": measurement.training_seconds,
        "overhead_seconds": total - spent,
    }


def machine() -> str:
    """One line about the machine that this ran on."""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{platform.machine()}, {psutil.cpu_count()} cores, {memory:.0f} GiB, "
        f"Python {platform.python_version()}; {RANKS} ranks of 1 thread, `{CONFIG.label()}`, "
        f"{STEPS + 2} optimizer steps a run"
    )


if __name__ == "__main__":
    main()
