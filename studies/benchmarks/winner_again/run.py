"""Does a search's winner reach the throughput that its report states, when it is run again?

Searches studies/gpt/model.py on 2 ranks in a fresh folder, then runs `best.json` ten times, each in
fresh processes, and counts the runs within the report's interval.

    python studies/benchmarks/winner_again/run.py

Writes raw.csv and table.md beside this file. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

HERE = Path(__file__).resolve().parent
MODEL_FILE = HERE.parents[1] / "gpt" / "model.py"
REPEATS = 10


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = _autotune("search", str(MODEL_FILE), "--ranks", "2", "--out", folder)
        best = f"{folder}/best.json"
        again = _autotune("measure", str(MODEL_FILE), "--config", best, "--repeats", str(REPEATS))
    stated = found["best"]["samples_per_second"]
    runs = pd.DataFrame({"run": range(1, REPEATS + 1), "samples_per_second": again["runs"]})
    runs["within"] = runs["samples_per_second"].between(stated["low"], stated["high"])
    runs.to_csv(HERE / "raw.csv", index=False, float_format="%.3f")
    half_width = (stated["high"] - stated["low"]) / 2 / stated["value"]
    memory = psutil.virtual_memory().total / 2**30
    text = (
        "| winner | stated samples/s | interval | half-width | re-runs within | search seconds |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        f"| `{found['best']['label']}` | {stated['value']:.1f} "
        f"| {stated['low']:.1f} to {stated['high']:.1f} | {half_width:.1%} "
        f"| {runs['within'].sum()} of {REPEATS} | {found['seconds']:.0f} |\n\n"
        f"{platform.machine()}, {psutil.cpu_count()} cores, {memory:.0f} GiB, "
        f"Python {platform.python_version()}; 2 ranks of 1 thread.\n"
    )
    (HERE / "table.md").write_text(text, encoding="utf-8")
    print(text)


def _autotune(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "autotune", *arguments, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


if __name__ == "__main__":
    main()
