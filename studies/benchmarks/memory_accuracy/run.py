"""Is the predicted memory of a configuration what a trial of it measures?

Each model is traced once, without a trial. Then a fixed sample of configurations over all stages,
precisions, reduce dtypes, checkpointing, accumulation and 1, 2 and 4 ranks is predicted and
measured (`allocated_peak_bytes`: live tensor bytes of the rank with most).

    python studies/benchmarks/memory_accuracy/run.py [--models gpt bert] [--configs 24]

Writes raw.csv and table.md beside this file, and resumes: what raw.csv has measured of the same
model file is not measured again; predictions are always made afresh.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import platform
import random
from pathlib import Path

import pandas as pd
import psutil

from autotune.ledger import Ledger, ledger
from autotune.model_trace import ModelTrace
from autotune.records import load
from autotune.trial import TrialPlan, run_trial
from runtime.config import TrainConfig
from runtime.launch import Launcher

HERE = Path(__file__).resolve().parent
STUDIES = HERE.parents[1]
MODELS = {
    **{name: STUDIES / name / "model.py" for name in ("gpt", "seq2seq", "convnet")},
    **{path.stem: path for path in sorted((HERE / "models").glob("*.py"))},
}
KEYS = ["model", "model_hash", "config"]
PLAN = TrialPlan(max_steps=1, deadline_seconds=300.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--configs", type=int, default=24, help="configurations of each model")
    parser.add_argument("--raw", type=Path, default=HERE / "raw.csv")
    options = parser.parse_args()
    measured: dict[tuple[str, ...], dict[str, object]] = {}
    if options.raw.exists():
        for row in pd.read_csv(options.raw).to_dict("records"):
            measured[tuple(str(row[key]) for key in KEYS)] = row
    with Launcher(preload=["transformers"]) as launcher:
        for name in options.models:
            path = MODELS[name]
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            trace = traced(launcher, path)
            print(
                f"{name}: traced={trace.traced} in {trace.seconds:.1f} s {trace.reason}", flush=True
            )
            for config in sample(options.configs, name, bool(trace.groups)):
                key = (name, digest, config.model_dump_json())
                row = measured.get(key)
                if row is None:
                    row = {**dict(zip(KEYS, key, strict=True)), **measure(launcher, path, config)}
                    measured[key] = row
                row |= predicted(ledger(trace, config), row, trace)
                print(name, config.ranks, config.label(), row.get("error"), flush=True)
                write(list(measured.values()), options.raw)
    write(list(measured.values()), options.raw)
    if options.raw == HERE / "raw.csv":
        text = table(pd.DataFrame(measured.values()))
        (HERE / "table.md").write_text(text, encoding="utf-8")
        print(text)


def sample(count: int, model: str, has_blocks: bool) -> list[TrainConfig]:
    """`count` configurations, the same in every run; each of one to four ranks as often."""
    generator = random.Random(model)
    pools: dict[int, list[TrainConfig]] = {}
    for ranks in (1, 2, 4):
        pools[ranks] = [
            TrainConfig(
                ranks=ranks,
                zero_stage=stage,
                micro_batch_size=size,
                threads_per_rank=1,
                gradient_accumulation_steps=steps,
                precision=precision,
                reduce_dtype=reduce,
                activation_checkpointing=mode,
            )
            for stage, size, steps, (precision, reduce), mode in itertools.product(
                (0, 1, 2, 3) if ranks > 1 else (0,),
                (1, 2, 4, 8),
                (1, 2, 3),
                (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "compute"), ("fp16", "compute")),
                ("none", "selective", "full") if has_blocks else ("none",),
            )
            if ranks > 1 or reduce == "fp32" or precision == "fp16"
        ]
    for pool in pools.values():
        generator.shuffle(pool)
    # One rank has the fewest dimensions.
    turns = itertools.cycle((1, 2, 2, 4, 2, 4))
    return [pools[next(turns)].pop() for _ in range(count)]


def traced(launcher: Launcher, path: Path) -> ModelTrace:
    """The trace of the model, made in one rank."""
    with launcher.start(
        "autotune.trace:trace_job",
        {"model_file": str(path)},
        ranks=1,
        threads_per_rank=1,
        memory_limit_bytes=None,
        deadline_seconds=300.0,
    ) as group:
        records = [event.data["record"] for event in group.events() if event.name == "trace"]
    if not records:
        raise RuntimeError(f"{path}: {group.end}")
    return load(ModelTrace, records[0])


def measure(launcher: Launcher, path: Path, config: TrainConfig) -> dict[str, object]:
    """Outcome and bytes of one trial."""
    result = run_trial(
        launcher,
        path,
        config,
        threads_per_rank=1,
        memory_limit_bytes=None,
        plan=PLAN,
        keep_going=lambda seconds: False,
    )
    first = result.memory[0] if result.memory else None
    return {
        "outcome": result.outcome.value,
        "reason": result.reason,
        "skipped_steps": result.skipped_steps,
        "measured_bytes": result.allocated_peak_bytes,
        "parameter_bytes": first and first.parameter_bytes,
        "gradient_bytes": first and first.gradient_bytes,
        "optimizer_bytes": first and first.optimizer_bytes,
        "reserved_bytes": result.reserved_peak_bytes,
    }


def predicted(made: Ledger, row: dict[str, object], trace: ModelTrace) -> dict[str, object]:
    """The prediction beside the measurement in `row`."""
    measured = row["measured_bytes"]
    known = isinstance(measured, (int, float)) and measured > 0
    return {
        "predicted_bytes": round(made.peak_bytes),
        "segment": made.segment,
        "error": made.peak_bytes / float(str(measured)) - 1 if known else None,
        "traced": trace.traced,
        **{f"term {name}": round(size) for name, size in made.terms.items()},
    }


def write(rows: list[dict[str, object]], path: Path) -> None:
    """Replace `path` in one go, so that an interruption loses nothing."""
    part = path.with_suffix(".part")
    pd.DataFrame(rows).to_csv(part, index=False)
    part.replace(path)


def table(frame: pd.DataFrame) -> str:
    """Median and 95th percentile of the absolute error, of each model and of all."""
    frame = frame[frame["error"].notna()]
    # A skipped step leaves no optimizer states behind, so its peak is not that of training.
    skipped = frame["skipped_steps"].fillna(0) > 0
    frame = frame[~skipped]
    lines = [
        "| model | traced | configurations | median error | 95th percentile | worst |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    groups = [*frame.groupby("model", sort=False), ("all", frame)]
    for name, rows in groups:
        error = pd.to_numeric(rows["error"]).abs()
        traced_as = "yes" if bool(rows["traced"].all()) else "no"
        lines.append(
            f"| {name} | {traced_as} | {len(rows)} | {error.median():.1%} "
            f"| {error.quantile(0.95):.1%} | {error.max():.1%} |"
        )
    memory = psutil.virtual_memory().total / 2**30
    machine = (
        f"{platform.machine()}, {psutil.cpu_count()} cores, {memory:.0f} GiB, "
        f"Python {platform.python_version()}"
    )
    left_out = f"{int(skipped.sum())} runs whose fp16 steps were skipped are left out."
    return "\n".join(lines) + f"\n\nError: |predicted / measured - 1|. {left_out} {machine}.\n"


if __name__ == "__main__":
    main()
