"""What a finished search writes: best.json, trials.csv, report.html. One file a panel.

Each panel has a function that computes a small record and a function that draws it.
"""

from autotune.report.outputs import write_outputs

__all__ = ["write_outputs"]
