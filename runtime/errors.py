"""The errors that a user can cause. Each message states the rule, the value met, and what to do.

The command line prints the message alone (no traceback) and exits with `exit_code`.
"""

from __future__ import annotations


class UserError(Exception):
    """Something that the user gave is wrong; the message says what and how to mend it."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration file or value is not valid."""


class ModelFileError(UserError):
    """The model file breaks a rule of `runtime.model_spec`, or its own code raised.

    `detail` is the user's own traceback where their code raised, else empty.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class UnsupportedModelError(UserError):
    """The model cannot train under the asked configuration; names the parameter or module."""


class RunError(Exception):
    """Something failed while running, through no wrong use of the tool.

    `detail` is the traceback of the process that failed, where there is one.
    """

    exit_code = 1

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail
