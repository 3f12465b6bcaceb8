"""Which configuration to try next: Optuna samplers over the enumerated space.

Every sampler proposes a legal configuration that was not tried and is not hopeless; what a sampler
of Optuna's own proposes is mapped to the nearest such one. A further sampler is a `SpaceSampler`
and a line in `SAMPLERS`.
"""

from __future__ import annotations

import copy
import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from autotune.candidates import Candidates
from autotune.surrogate import expected_improvement
from runtime.errors import ConfigError

WORTH_TRYING = 0.01
"""Expected improvement on the best, relative, below which no further run is worth its time."""


class SpaceSampler(BaseSampler):
    """Chooses among `candidates`, which the search keeps up to date."""

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates

    @abstractmethod
    def choose(self, study: optuna.Study, trial: FrozenTrial) -> int:
        """Index of the candidate to run; at least one is left."""

    def nothing_worth_trying(self) -> bool:
        """Whether the rest of the candidates can be left untried, in this sampler's view."""
        return False

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """The parameters that vary; all are proposed together."""
        return dict(self.candidates.parameters.distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The parameters of the chosen candidate."""
        config = self.candidates.configs[self.choose(study, trial)]
        return self.candidates.parameters.of(config)

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Never reached: a parameter alone would not make a legal configuration."""
        raise RuntimeError(f"{param_name} is proposed with the others, or not at all")


class PredictiveSampler(SpaceSampler):
    """Largest expected improvement x probability of fitting; the first run, where nothing is
    known, is the one that tells most about the others."""

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> int:
        if self.candidates.best is None:
            return self._argmax(self.candidates.information())
        return self._argmax(self._improvement(self.candidates.best))

    def nothing_worth_trying(self) -> bool:
        if self.candidates.best is None:
            return False
        scores = self._improvement(self.candidates.best)
        return not any(score >= WORTH_TRYING for _, score in self._descending(scores))

    def _improvement(self, best: float) -> NDArray[np.float64]:
        mean, deviation = self.candidates.posterior()
        return expected_improvement(mean, deviation, best)

    def _argmax(self, scores: NDArray[np.float64]) -> int:
        best_index, best_score = -1, -1.0
        for index, score in self._descending(scores):
            if score > best_score:
                best_index, best_score = index, score
        return best_index

    def _descending(self, scores: NDArray[np.float64]) -> Iterable[tuple[int, float]]:
        """(index, score x probability of fitting), until no larger product can follow.

        Memory is predicted one configuration at a time, so only as many as can matter are.
        """
        largest = -1.0
        for index in np.argsort(-scores, kind="stable"):
            if scores[index] <= largest:
                return
            if self.candidates.is_open(int(index)):
                product = float(scores[index]) * self.candidates.fit_probability(int(index))
                largest = max(largest, product)
                yield int(index), product


class UniformSampler(SpaceSampler):
    """Any candidate with equal probability, by a seed and the trial's number."""

    def __init__(self, candidates: Candidates, seed: int) -> None:
        super().__init__(candidates)
        self._seed = seed

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> int:
        order = np.random.default_rng((self._seed, trial.number)).permutation(len(self.candidates))
        return self.candidates.first_open(order)


class BruteForceSampler(SpaceSampler):
    """One candidate after the other, the simplest first."""

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> int:
        return self.candidates.first_open(range(len(self.candidates)))


class ForeignSampler(SpaceSampler):
    """One of Optuna's samplers, its proposal mapped to the nearest candidate left."""

    def __init__(self, candidates: Candidates, foreign: BaseSampler) -> None:
        super().__init__(candidates)
        self._foreign = foreign

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> int:
        proposal = self._propose(study, trial)
        return self.candidates.first_open(self.candidates.nearest(proposal))

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._foreign.before_trial(study, trial)

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        self._foreign.after_trial(study, trial, state, values)

    def _propose(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        space = self._foreign.infer_relative_search_space(study, trial)
        proposal = dict(self._foreign.sample_relative(study, trial, space))
        seen = copy.copy(trial)
        for name, distribution in self.candidates.parameters.distributions.items():
            if name not in proposal:
                proposal[name] = self._foreign.sample_independent(study, seen, name, distribution)
            seen.params = dict(proposal)
        return proposal


def _tpe(candidates: Candidates, seed: int) -> SpaceSampler:
    return ForeignSampler(candidates, TPESampler(seed=seed))


def _gp(candidates: Candidates, seed: int) -> SpaceSampler:
    if importlib.util.find_spec("scipy") is None:  # Optuna would import it in mid-search
        raise ConfigError(
            "--sampler gp needs scipy: install autotune-zero[gp], or use another sampler"
        )
    return ForeignSampler(candidates, GPSampler(seed=seed, warn_independent_sampling=False))


SAMPLERS: dict[str, Callable[[Candidates, int], SpaceSampler]] = {
    "predictive": lambda candidates, seed: PredictiveSampler(candidates),
    "tpe": _tpe,
    "gp": _gp,
    "random": UniformSampler,
    "brute-force": lambda candidates, seed: BruteForceSampler(candidates),
}
"""Name, as `--sampler` takes it → the sampler for these candidates and this seed."""


def check_sampler(name: str) -> None:
    """
    Raises:
        ConfigError: no sampler has this name.
    """
    if name not in SAMPLERS:
        raise ConfigError(f"--sampler must be one of {', '.join(SAMPLERS)}, but got {name!r}")


def make_sampler(name: str, candidates: Candidates, seed: int) -> SpaceSampler:
    """The sampler called `name`.

    Raises:
        ConfigError: no sampler has this name, or it needs a package that is not installed.
    """
    check_sampler(name)
    return SAMPLERS[name](candidates, seed)
