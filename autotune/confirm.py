"""Runs the leaders again, side by side, until their figures can be relied on."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.ranking import CONFIRMED_PROCESSES, fresh_confirmations, is_confirmed, leaders
from autotune.records import Ranked
from autotune.session import Session
from runtime.config import TrainConfig
from runtime.measurement import Outcome

LEADERS = 3
"""Configurations that are confirmed, at most, beside the baselines."""

WITHIN = 0.1
"""A leader is this close to the best (relative): single runs of one configuration differ by
as much."""

MOST_PROCESSES = 8
"""Of one configuration; a machine that needs more is too noisy to decide."""

HALF_WIDTH = 0.05
"""The best's interval is narrow enough within this, as a share of its figure."""

FAR_FROM_NARROW = (5, 0.15)
"""Processes, and the half-width above which three more would not make the interval narrow."""


def confirm(session: Session) -> None:
    """Run the leaders and the baselines in fresh processes, in turn, so that the machine's drift
    meets all alike: at least three each, the best up to eight until its interval is narrow.

    Rounds alternate their direction. What an interval still leaves open is noted.
    """
    round_number = 0
    while due := _due(session):
        for config in due if round_number % 2 == 0 else reversed(due):
            if session.trial_seconds(config) > session.time_left():
                session.note(
                    "the time budget ended before the leaders were confirmed: "
                    "their figures rest on fewer than three fresh runs each"
                    if not _settled(session)
                    else "the time budget ended before the best's interval was narrow"
                )
                _note_noise(session)
                return
            session.measure(config, "confirm")
        round_number += 1
    _note_noise(session)


def _due(session: Session) -> list[TrainConfig]:
    """What the next round runs: first all that lack runs, then what is still open."""
    first = [
        config
        for config in _contenders(session)
        if _attempts(session, config) < CONFIRMED_PROCESSES
    ]
    if first:
        return first
    standing = session.standing()
    best, runner_up = standing.best, standing.runner_up
    if best is None or not is_confirmed(best) or session.objective == "memory":
        return []
    interval = best.samples_per_second
    if interval.relative_half_width <= HALF_WIDTH:
        return []
    processes, width = FAR_FROM_NARROW
    if interval.processes >= processes and interval.relative_half_width > width:
        return []
    again = [best]
    if runner_up is not None and is_confirmed(runner_up) and _close(runner_up, best):
        again.append(runner_up)
    return [item.config for item in again if _attempts(session, item.config) < MOST_PROCESSES]


def _contenders(session: Session) -> list[TrainConfig]:
    """Leaders that are being confirmed, or are good enough to be; then the baselines."""
    standing = session.standing()
    baselines = [item.config for item in (standing.plain, standing.own) if item is not None]
    order = leaders(
        session.records,
        objective=session.objective,
        memory_limit_bytes=session.memory_limit_bytes,
    )
    most = 1 if session.objective == "memory" else LEADERS
    begun = [item for item in order if _attempts(session, item.config)]
    places = most - sum(item.config not in baselines for item in begun)
    fresh = [
        item
        for item in order
        if not _attempts(session, item.config)
        and (item is order[0] or (_close(item, order[0]) and session.objective == "throughput"))
    ]
    # Whoever leads is confirmed, even after others: a resumed search may have found better.
    chosen = [*begun, *fresh[: max(places, int(bool(fresh) and fresh[0] is order[0]))]]
    return list(dict.fromkeys([*(item.config for item in chosen), *baselines]))


def _close(item: Ranked, best: Ranked) -> bool:
    return item.samples_per_second.value >= best.samples_per_second.value * (1 - WITHIN)


def _attempts(session: Session, config: TrainConfig) -> int:
    return sum(record.config == config for record in fresh_confirmations(session.records))


def _settled(session: Session) -> bool:
    best = session.standing().best
    return best is not None and is_confirmed(best)


def _note_noise(session: Session) -> None:
    for text in _noise(session):
        session.note(text)


def _noise(session: Session) -> Iterator[str]:
    standing = session.standing()
    best = standing.best
    if best is None:
        return
    width = best.samples_per_second.relative_half_width
    if width > HALF_WIDTH and session.objective == "throughput":
        yield (
            f"this machine is too noisy to decide within {HALF_WIDTH:.0%}: a fresh run of the best "
            f"is expected within ±{width:.0%} of its figure "
            f"({best.samples_per_second.processes} runs)"
        )
    for record in session.records:
        outcome = record.measurement.outcome
        if record.role == "confirm" and outcome is not Outcome.OK:
            yield f"{record.config.label()} ran once, and once again was {outcome.value}"
