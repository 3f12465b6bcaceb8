"""The tuner: finds the fastest configuration of `runtime` that fits a model into this hardware.

This package itself imports nothing, so that `autotune --help` stays quick.
"""

__version__ = "0.1.0"
