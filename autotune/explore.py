"""The parts of a search before its confirmation: baselines first, then trial after trial."""

from __future__ import annotations

import math

from autotune.candidates import HOPELESS
from autotune.memory import MemoryModel
from autotune.records import Objective, Untried
from autotune.sampler import WORTH_TRYING, SpaceSampler
from autotune.session import Session
from autotune.space import canonical, legal_micro_batches
from autotune.study import STORAGE_ERRORS, cause
from autotune.surrogate import expected_improvement
from autotune.units import format_bytes, format_seconds
from runtime.config import TrainConfig
from runtime.errors import ConfigError
from runtime.measurement import Outcome

_LIKELY = 0.5
"""A plain micro-batch is tried where it fits with at least this probability."""

_CONFIRMATION_SHARE = 0.4
_CONFIRMATION_RUNS = 9
"""Of a time budget, what the confirmation of three configurations takes, and at most this share,
is kept for it."""


def measure_plain(session: Session) -> None:
    """Find the largest power-of-two micro-batch at which plain training fits, and measure it.

    Memory predictions say where to begin; a run out of memory steps down, and what was learned
    from a run that fits may step up again.
    """
    sizes = _plain_sizes(session)
    while sizes:
        fits, failed = _plain_outcomes(session)
        open_sizes = [size for size in sizes if max(fits, default=0) < size]
        open_sizes = [size for size in open_sizes if size < min(failed, default=size + 1)]
        chances = {
            size: session.predict(_plain(session, size)).fit_probability for size in open_sizes
        }
        likely = [size for size, chance in chances.items() if chance >= _LIKELY]
        if not likely and not fits:
            likely = [size for size, chance in chances.items() if chance >= HOPELESS][:1]
        if not likely:
            break
        config = _plain(session, max(likely))
        if not _time_for(session, config):
            return
        outcome = session.measure(config, "plain").measurement.outcome
        if outcome not in (Outcome.OK, Outcome.OUT_OF_MEMORY):
            if config.micro_batch_size == min(sizes) or fits:
                return
            # Perhaps only this micro-batch fails: the smallest tells.
            session.measure(_plain(session, min(sizes)), "plain")
            return
    fits, _ = _plain_outcomes(session)
    if not fits:
        session.note(
            "the plain configuration (stage 0, fp32, no checkpointing) fits at no micro-batch, "
            f"so there is no speed-up over it to state: it needs "
            f"{session.memory.needs(_plain(session, min(sizes)))}"
        )


def measure_own(session: Session, own: TrainConfig | None) -> None:
    """Measure the user's own configuration, unless an earlier session has."""
    if own is None:
        return
    config = own_config(session, own)
    done = any(record.role == "own" and record.config == config for record in session.records)
    if not done and _time_for(session, config):
        record = session.measure(config, "own")
        if record.measurement.outcome is not Outcome.OK:
            session.note(
                f"your own configuration ({config.label()}) did not run: "
                f"{record.measurement.outcome.value}: {record.measurement.reason}"
            )


def own_config(session: Session, own: TrainConfig) -> TrainConfig:
    """The user's configuration, as the space has it where it does.

    Raises:
        ConfigError: it is of other ranks, or of another global batch.
    """
    space = session.space
    if (own.ranks, own.global_batch_size) != (space.ranks, space.global_batch_size):
        raise ConfigError(
            "your own configuration must have the search's ranks and global batch size "
            f"({space.ranks} and {space.global_batch_size}), "
            f"but has {own.ranks} and {own.global_batch_size}"
        )
    if own.threads_per_rank is None:
        own = own.model_copy(update={"threads_per_rank": space.threads_per_rank})
    return space.find(own) or own


def explore(session: Session, sampler: SpaceSampler) -> str:
    """Ask, run, learn, tell, until there is a reason to stop; returns the reason."""
    candidates = session.candidates
    while True:
        if session.trials_left() <= 0:
            return f"--max-trials {session.max_trials} was reached"
        if not candidates.any_open():
            if not _verify_that_nothing_fits(session):
                return "every configuration that is expected to fit was run"
            continue
        if sampler.nothing_worth_trying():
            return (
                "no untried configuration is expected to gain "
                f"{WORTH_TRYING:.0%} on the best (expected improvement x probability of fitting)"
            )
        try:
            opened = session.store.ask()
        except STORAGE_ERRORS as error:
            return f"the study cannot be written: {cause(error)}"
        if not _time_for(session, opened.config):
            session.store.abandon(opened, "the time budget leaves too little for it")
            return "the time budget leaves too little for another run"
        session.measure(opened.config, "search", race=True, opened=opened)


def nothing_fits(session: Session) -> str:
    """Why there is no answer: what the smallest configuration needs, and what would help."""
    smallest = session.memory.smallest(session.space.configs)
    prediction = session.predict(smallest)
    parts = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in sorted(prediction.terms.items(), key=lambda item: -item[1])
        if size >= 0.01 * prediction.allocated_bytes
    )
    enough = prediction.reserved_bytes + 2 * prediction.reserved_deviation_bytes
    ranks = "" if session.space.ranks == 1 else "; more ranks hold smaller shards"
    return (
        f"nothing fits into {format_bytes(session.memory_limit_bytes)} a rank: the smallest "
        f"configuration ({smallest.label()}) needs about "
        f"{format_bytes(prediction.reserved_bytes)} ({parts}); "
        f"--memory-limit {format_bytes(enough).replace(' ', '')} would let it run{ranks}"
    )


def untried(session: Session, stopped_because: str) -> list[Untried]:
    """Every configuration that was not run, each with its reason."""
    candidates = session.candidates
    mean, deviation = candidates.posterior()
    best = candidates.best
    gains = None if best is None else expected_improvement(mean, deviation, best)
    found = []
    for index, config in enumerate(candidates.configs):
        if candidates.is_tried(index):
            continue
        chance = candidates.fit_probability(index)
        if chance < HOPELESS:
            reason = _does_not_fit(session.memory, config, session.memory_limit_bytes)
        elif gains is not None and gains[index] * chance < WORTH_TRYING:
            reason = _cannot_win(session.objective, float(mean[index]), best or 0.0)
        else:
            reason = f"not reached: {stopped_because}"
        found.append(Untried(config=config, reason=reason, prediction=session.predict(config)))
    return found


def _does_not_fit(memory: MemoryModel, config: TrainConfig, limit: int) -> str:
    return f"does not fit: needs {memory.needs(config)}; the limit is {format_bytes(limit)}"


def _cannot_win(objective: Objective, log_cost: float, log_best: float) -> str:
    cost, best = math.exp(log_cost), math.exp(log_best)
    if objective == "memory":
        return f"cannot win: predicted {format_bytes(cost)}, the best has {format_bytes(best)}"
    predicted, least = format_seconds(cost), format_seconds(best)
    return f"cannot win: predicted {predicted} a step, the best takes {least}"


def _verify_that_nothing_fits(session: Session) -> bool:
    """Run the smallest configuration where predictions alone say that nothing fits.

    False where that is known, or something did fit.
    """
    if any(record.measurement.outcome is Outcome.OK for record in session.records):
        return False
    left = [
        config
        for index, config in enumerate(session.candidates.configs)
        if not session.candidates.is_tried(index)
    ]
    smallest = session.memory.smallest(session.space.configs)
    if smallest not in left or not _time_for(session, smallest):
        return False
    session.measure(smallest, "search")
    return True


def _plain(session: Session, micro_batch_size: int) -> TrainConfig:
    space = session.space
    config = TrainConfig(
        ranks=space.ranks,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=space.global_batch_size // space.ranks // micro_batch_size,
        threads_per_rank=space.threads_per_rank,
    )
    return space.find(config) or canonical(config)


def _plain_sizes(session: Session) -> list[int]:
    """Powers of two among the legal micro-batch sizes, ascending."""
    legal = legal_micro_batches(session.space.global_batch_size, session.space.ranks)
    smallest = min(session.store.header.profile.activation_bytes, default=1)
    return [size for size in legal if size & (size - 1) == 0 and size >= smallest]


def _plain_outcomes(session: Session) -> tuple[list[int], list[int]]:
    """Micro-batch sizes of plain runs that ended well, and of those that did not."""
    plain = [record for record in session.records if record.role == "plain"]
    fits = [r.config.micro_batch_size for r in plain if r.measurement.outcome is Outcome.OK]
    failed = [r.config.micro_batch_size for r in plain if r.measurement.outcome is not Outcome.OK]
    return fits, failed


def _time_for(session: Session, config: TrainConfig) -> bool:
    """Whether a run of `config` is expected to end in time, its confirmation included."""
    budget = session.time_budget_seconds
    if budget is None:
        return True
    run = session.trial_seconds(config)
    confirmation = min(_CONFIRMATION_RUNS * run, _CONFIRMATION_SHARE * budget)
    kept = confirmation if session.records else 0.0
    return run <= session.time_left() - kept
