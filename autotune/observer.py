"""What a search tells while it runs."""

from __future__ import annotations

from typing import Protocol

from autotune.records import Prediction, Ranked, Role, TrialRecord
from runtime.config import TrainConfig


class Observer(Protocol):
    """Told of each event of a search. One that raises ends it."""

    def on_phase(self, text: str) -> None:
        """A phase begins, such as `confirming the leaders`."""

    def on_note(self, text: str) -> None:
        """A sentence that the result's notes hold too."""

    def on_trial_start(self, config: TrainConfig, role: Role, prediction: Prediction) -> None:
        """A run begins."""

    def on_step(self, seconds: float) -> None:
        """The run has timed another optimizer step."""

    def on_trial_end(self, record: TrialRecord) -> None:
        """The run has ended, and is stored."""

    def on_best(self, ranked: Ranked) -> None:
        """The best so far, after each run that counts."""

    def on_time_left(self, seconds: float) -> None:
        """A rough guess of the seconds until the search ends."""


class Silent:
    """An observer that does nothing; a base for those that care about a few events."""

    def on_phase(self, text: str) -> None:
        """See `Observer`."""

    def on_note(self, text: str) -> None:
        """See `Observer`."""

    def on_trial_start(self, config: TrainConfig, role: Role, prediction: Prediction) -> None:
        """See `Observer`."""

    def on_step(self, seconds: float) -> None:
        """See `Observer`."""

    def on_trial_end(self, record: TrialRecord) -> None:
        """See `Observer`."""

    def on_best(self, ranked: Ranked) -> None:
        """See `Observer`."""

    def on_time_left(self, seconds: float) -> None:
        """See `Observer`."""
