"""The statistics of a search: how sure a figure is, and when another step is not worth its time.

Two sources of scatter are kept apart. Within one process, steps scatter around their median; an
order-statistic interval needs no assumption about how. Between fresh processes the medians
themselves scatter (one configuration in eight processes: 459 to 557 ms), which no number of steps
in one process shows; the figure that a user will see again is stated with the interval in which a
*fresh* process lies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from autotune.records import Interval

LEVEL = 0.95
"""Probability that the intervals state, where no other is given."""

SINGLE_PROCESS_DEVIATION = 0.07
"""Standard deviation of log throughput between processes that is assumed where fewer than three
were run: medians from 459 to 557 ms in eight processes, a range of 0.19, over 2.85 (the expected
range of eight normal variables, in standard deviations)."""

NARROW = 0.02
"""A process has shown what it can once its median's interval is within this share of it."""

MARGIN = 0.1
"""How much slower than the best a run must be, beyond its own scatter, to be given up: another
process of the same configuration can differ by as much."""

CLEARLY_SLOWER = 1.5
"""Steps this many times slower than the best settle the matter after two of them."""

MAX_STEPS = 30
ENOUGH_SECONDS = 4.0
"""A process that has timed this long, and three steps, ends: more would only measure this process
better, and the scatter between processes is the larger."""


def student_t_probability(t: float, degrees: int) -> float:
    """P(|T| <= t) for Student's t distribution with `degrees` >= 1 degrees of freedom.

    The finite series of Abramowitz & Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    if degrees < 1 or t < 0:
        raise ValueError(f"`degrees >= 1 and t >= 0` must hold, but got ({degrees=}, {t=}).")
    return _probability(math.atan(t / math.sqrt(degrees)), degrees)


def student_t_quantile(level: float, degrees: int) -> float:
    """The t with P(|T| <= t) = `level`: two-sided, 0 < `level` < 1.

    Found by bisection over atan(t / sqrt(degrees)), which is bounded and increases with t.
    """
    if degrees < 1 or not 0 < level < 1:
        raise ValueError(f"`0 < level < 1 <= degrees` must hold, but got ({level=}, {degrees=}).")
    low, high = 0.0, math.pi / 2
    for _ in range(64):
        middle = (low + high) / 2
        if _probability(middle, degrees) < level:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _probability(angle: float, degrees: int) -> float:
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2 == 1
    term = cosine if odd else 1.0
    total = term if degrees > 1 or not odd else 0.0
    for power in range(3 if odd else 2, degrees - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    if odd:
        return 2 / math.pi * (angle + sine * (total if degrees > 1 else 0.0))
    return sine * total


def median_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """An interval that covers the median with probability `level` or more, whatever the shape.

    Between the r-th smallest and the r-th largest value, with the largest r for which
    2 P(Binomial(n, 1/2) < r) <= 1 - level (David & Nagaraja, Order Statistics, 7.1).

    None where too few values are given: at 95%, fewer than six.
    """
    ordered = sorted(values)
    count = len(ordered)
    tail, rank = 0.0, 0
    while rank < count:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > 1 - level:
            break
        rank += 1
    if rank == 0:
        return None
    return ordered[rank - 1], ordered[count - rank]


def median_is_narrow(step_seconds: Sequence[float], tolerance: float = NARROW) -> bool:
    """Whether the median of the steps is known within ±`tolerance`, as a share of it."""
    interval = median_interval(step_seconds)
    if interval is None:
        return False
    low, high = interval
    return high - low <= 2 * tolerance * statistics.median(step_seconds)


def enough_steps(step_seconds: Sequence[float]) -> bool:
    """Whether this process has shown what it can: narrow, or as many steps as are worth it."""
    count = len(step_seconds)
    long = count >= 3 and math.fsum(step_seconds) >= ENOUGH_SECONDS
    return long or count >= MAX_STEPS or median_is_narrow(step_seconds)


def margin(step_seconds: Sequence[float]) -> float:
    """How much slower (relative) than the best a run must be to be given up, by its steps.

    `MARGIN` on a quiet machine, and twice the steps' robust scatter on a noisy one, up to a half:
    the median absolute deviation, as a share of the median, times 1.4826, which makes it the
    standard deviation of a normal variable (Hampel 1974).
    """
    median = statistics.median(step_seconds)
    deviation = statistics.median(abs(value - median) for value in step_seconds)
    return min(max(MARGIN, 2 * 1.4826 * deviation / median), CLEARLY_SLOWER - 1)


def cannot_win(
    step_seconds: Sequence[float], best_seconds: float | None, margin: float = MARGIN
) -> bool:
    """Whether a run with these steps can be given up against the best median so far.

    From the fifth step on, the lower end of the median's interval (one-sided 95%) must lie above
    the best by `margin`; before that every step must, and of two steps both by `CLEARLY_SLOWER`.
    One step decides nothing.
    """
    count = len(step_seconds)
    if best_seconds is None or count < 2:
        return False
    if count == 2:
        return min(step_seconds) > best_seconds * CLEARLY_SLOWER
    interval = median_interval(step_seconds, 0.9)
    low = min(step_seconds) if interval is None else interval[0]
    return low > best_seconds * (1 + margin)


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float | None:
    """Standard deviation of log throughput between processes, over several configurations.

    Each group holds the positive throughputs of one configuration. None where no group has two.
    """
    squares, degrees = 0.0, 0
    for group in groups:
        if len(group) >= 2:
            squares += statistics.variance(map(math.log, group)) * (len(group) - 1)
            degrees += len(group) - 1
    return math.sqrt(squares / degrees) if degrees else None


def fresh_run_interval(
    throughputs: Sequence[float], *, level: float = LEVEL, least_deviation: float = 0.0
) -> Interval:
    """Where the throughput of a fresh process lies, given those of k processes (all positive).

    On the logarithm: mean ± t(k-1) s sqrt(1 + 1/k), the prediction interval of one further
    observation (Hahn & Meeker, Statistical Intervals, 4.7); the figure is the geometric mean.

    Args:
        least_deviation: s is not taken below this. A few processes agree by luck sometimes, and a
            search that adds processes until they agree waits for that luck; the deviation pooled
            over the configurations measured beside it keeps the interval honest.

    With fewer than three processes s tells too little: `SINGLE_PROCESS_DEVIATION` and the normal
    quantile stand in.
    """
    logs = [math.log(value) for value in throughputs]
    count = len(logs)
    if not count:
        raise ValueError("`throughputs` must hold at least one value, but got none.")
    mean = math.fsum(logs) / count
    deviation = statistics.stdev(logs) if count >= 2 else 0.0
    if count >= 3:
        quantile = student_t_quantile(level, count - 1)
    else:
        quantile = statistics.NormalDist().inv_cdf((1 + level) / 2)
        deviation = max(deviation, SINGLE_PROCESS_DEVIATION)
    half = quantile * max(deviation, least_deviation) * math.sqrt(1 + 1 / count)
    return Interval(
        value=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
        level=level,
        processes=count,
    )


def paired_difference(
    first: Sequence[float], second: Sequence[float], level: float = LEVEL
) -> tuple[float, float]:
    """Mean and half-width of log(first / second), over rounds in which both were run in turn.

    The machine's drift is common to both runs of a round and cancels. The half-width is infinite
    with fewer than two rounds.
    """
    differences = [math.log(a / b) for a, b in zip(first, second, strict=True)]
    count = len(differences)
    if count < 2:
        return (differences[0] if differences else 0.0), math.inf
    quantile = student_t_quantile(level, count - 1)
    mean = math.fsum(differences) / count
    return mean, quantile * statistics.stdev(differences) / math.sqrt(count)
