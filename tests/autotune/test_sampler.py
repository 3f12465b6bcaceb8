import itertools
import math
import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
import pytest
from scipy import integrate, stats

from autotune.candidates import HOPELESS, Candidates
from autotune.records import Objective, Prediction
from autotune.sampler import SAMPLERS, WORTH_TRYING, PredictiveSampler, make_sampler
from autotune.study import quiet_optuna
from autotune.surrogate import StepTimeRegression, expected_improvement
from runtime.config import TrainConfig
from runtime.errors import ConfigError
from tests.autotune.factories import LIMIT, memory_of, seconds_of
from tests.autotune.tables import exact_prediction, record_of, space_of, timed

SPACE = space_of()


def candidates_of(objective: Objective = "throughput", **changes: Any) -> Candidates:
    arguments: dict[str, Any] = {
        "objective": objective,
        "memory_limit_bytes": LIMIT,
        "predict": exact_prediction,
        **changes,
    }
    return Candidates(arguments.pop("configs", SPACE.configs), **arguments)


def run(name: str, trials: int, seed: int = 0) -> tuple[list[TrainConfig], Candidates]:
    """Ask and tell over the cost table; the configurations in their order."""
    quiet_optuna()
    candidates = candidates_of()
    sampler = make_sampler(name, candidates, seed)
    study = optuna.create_study(sampler=sampler, direction="maximize")
    order = []
    for _ in range(trials):
        trial = study.ask()
        for parameter, choices in candidates.parameters.choices.items():
            trial.suggest_categorical(parameter, choices)
        config = candidates.parameters.find(trial.params)
        assert config is not None, f"{name} proposed what is not legal: {trial.params}"
        order.append(config)
        measurement = timed(config, seconds_of)
        assert measurement.samples_per_second is not None
        trial.set_constraint("memory", float(memory_of(config).charged_peak_bytes - LIMIT))
        study.tell(trial, measurement.samples_per_second)
        candidates.observe(record_of(config, measurement))
    return order, candidates


@pytest.mark.parametrize("name", SAMPLERS)
class TestEverySampler:
    def test_proposes_legal_configurations_that_fit_and_never_one_twice(self, name: str) -> None:
        order, _ = run(name, 16)
        assert len(set(order)) == len(order)
        assert set(order) <= set(SPACE.configs)
        assert all(memory_of(config).charged_peak_bytes <= LIMIT for config in order)

    def test_proposes_the_same_from_the_same_seed(self, name: str) -> None:
        assert run(name, 13, seed=3)[0] == run(name, 13, seed=3)[0]

    def test_goes_through_all_that_fit(self, name: str) -> None:
        configs = space_of(zero_stage="1", precision="bf16", reduce_dtype="fp32").configs
        quiet_optuna()
        candidates = candidates_of(configs=configs)
        sampler = make_sampler(name, candidates, 0)
        study = optuna.create_study(sampler=sampler, direction="maximize")
        seen = set()
        while candidates.any_open():
            trial = study.ask()
            for parameter, choices in candidates.parameters.choices.items():
                trial.suggest_categorical(parameter, choices)
            config = candidates.parameters.find(trial.params)
            assert config is not None
            seen.add(config)
            study.tell(trial, 1 / seconds_of(config))
            candidates.observe(record_of(config, timed(config, seconds_of)))
        assert seen == {
            config for config in configs if memory_of(config).charged_peak_bytes <= LIMIT
        }


def test_random_and_tpe_depend_on_the_seed() -> None:
    assert run("random", 8, seed=1)[0] != run("random", 8, seed=2)[0]
    assert run("tpe", 8, seed=1)[0] != run("tpe", 8, seed=2)[0]


def test_an_unknown_sampler_is_refused_with_the_valid_names() -> None:
    with pytest.raises(ConfigError, match="predictive, tpe, gp, random, brute-force, but got 'x'"):
        make_sampler("x", candidates_of(), 0)


def test_the_predictive_sampler_finds_the_best_within_ten_trials() -> None:
    fitting = [config for config in SPACE.configs if memory_of(config).charged_peak_bytes <= LIMIT]
    assert len(fitting) > 60
    optimum = min(map(seconds_of, fitting))
    order, _ = run("predictive", 10)
    assert min(map(seconds_of, order)) <= 1.01 * optimum


def _rough_table(seed: int) -> dict[TrainConfig, float]:
    """Step seconds of a machine drawn at random: effects that can be, interactions, and a rest."""
    generator = random.Random(seed)
    stages = [0.0] + [generator.gauss(0, 0.2) for _ in range(3)]
    bf16, reduce, slope = generator.gauss(0, 0.5), generator.gauss(0, 0.1), generator.gauss(0, 0.1)
    curve, gather = generator.gauss(0, 0.02), abs(generator.gauss(0, 0.5))
    full, share = generator.uniform(0.1, 0.4), generator.uniform(0, 1)
    table = {}
    for config in SPACE.configs:
        size = math.log2(config.micro_batch_size)
        total = stages[config.zero_stage] + slope * size + curve * size**2
        total += bf16 * (config.precision == "bf16") + reduce * (config.reduce_dtype == "compute")
        recomputed = {"none": 0.0, "selective": share * full, "full": full}
        total += recomputed[config.activation_checkpointing]
        total += gather * (config.zero_stage == 3) / config.micro_batch_size
        table[config] = math.exp(total + generator.gauss(0, 0.03))
    return table


def test_on_surprising_machines_it_stops_near_the_best() -> None:
    regrets, lengths = [], []
    for seed in range(12):
        table = _rough_table(seed)
        candidates = candidates_of()
        sampler = PredictiveSampler(candidates)
        study = optuna.create_study(sampler=sampler, direction="maximize")
        found = []
        while candidates.any_open() and not sampler.nothing_worth_trying() and len(found) < 30:
            config = candidates.configs[sampler.choose(study, None)]  # type: ignore[arg-type]
            found.append(table[config])
            candidates.observe(record_of(config, timed(config, table.__getitem__)))
        fitting = [
            seconds
            for config, seconds in table.items()
            if memory_of(config).charged_peak_bytes <= LIMIT
        ]
        regrets.append(min(found) / min(fitting) - 1)
        lengths.append(len(found))
    assert sorted(regrets)[6] <= 0.02
    assert sorted(regrets)[10] <= 0.06
    assert sorted(lengths)[6] <= 20


def test_it_stops_once_nothing_can_gain_one_percent() -> None:
    order, candidates = run("predictive", 30)
    sampler = PredictiveSampler(candidates)
    assert sampler.nothing_worth_trying()
    mean, deviation = candidates.posterior()
    assert candidates.best is not None
    left = expected_improvement(mean, deviation, candidates.best)
    assert max(left[i] for i in range(len(left)) if candidates.is_open(i)) < WORTH_TRYING
    assert len(order) < len(SPACE.configs)


def test_a_configuration_that_is_unlikely_to_fit_waits_for_a_better_chance() -> None:
    def doubtful(config: TrainConfig) -> Prediction:
        probability = 1.0 if config.micro_batch_size <= 2 else HOPELESS * 1.01
        return replace(exact_prediction(config), fit_probability=probability)

    candidates = candidates_of(predict=doubtful)
    sampler = PredictiveSampler(candidates)
    config = SPACE.configs[0]
    candidates.observe(record_of(config, timed(config, seconds_of)))
    study = optuna.create_study(sampler=sampler)
    chosen = candidates.configs[sampler.choose(study, None)]  # type: ignore[arg-type]
    assert chosen.micro_batch_size <= 2


def test_memory_as_the_objective_goes_to_the_smallest_first() -> None:
    def sure(config: TrainConfig) -> Prediction:
        return replace(exact_prediction(config), reserved_deviation_bytes=1.0)

    candidates = candidates_of("memory", predict=sure)
    sampler = PredictiveSampler(candidates)
    study = optuna.create_study(sampler=sampler, direction="minimize")
    start = SPACE.configs[0]
    candidates.observe(record_of(start, timed(start, seconds_of)))
    chosen = candidates.configs[sampler.choose(study, None)]  # type: ignore[arg-type]
    least = min(memory_of(config).charged_peak_bytes for config in SPACE.configs)
    assert memory_of(chosen).charged_peak_bytes == least
    candidates.observe(record_of(chosen, timed(chosen, seconds_of)))
    assert sampler.nothing_worth_trying()


def test_the_first_choice_tells_more_than_most() -> None:
    candidates = candidates_of()
    study = optuna.create_study()
    chosen = PredictiveSampler(candidates).choose(study, None)  # type: ignore[arg-type]
    model = StepTimeRegression(SPACE.configs)
    mean_left = []
    for config in (SPACE.configs[chosen], *SPACE.configs[::9]):
        one = StepTimeRegression(SPACE.configs)
        one.observe(config, 1.0)
        mean_left.append(float(np.mean(one.posterior()[1] ** 2)))
    assert mean_left[0] <= sorted(mean_left)[len(mean_left) // 4]
    assert model.information().shape == (len(SPACE.configs),)


def test_choosing_among_ten_thousand_takes_under_50_ms() -> None:
    configs = [
        TrainConfig(
            ranks=2,
            micro_batch_size=size,
            zero_stage=stage,  # type: ignore[arg-type]
            precision=precision,  # type: ignore[arg-type]
            reduce_dtype=reduce,  # type: ignore[arg-type]
            activation_checkpointing=checkpointing,  # type: ignore[arg-type]
            compile=compiled,
        )
        for stage, precision, reduce, checkpointing, compiled, size in itertools.product(
            range(4),
            ("fp32", "bf16", "fp16"),
            ("fp32", "compute"),
            ("none", "selective", "full"),
            (False, True),
            range(1, 71),
        )
    ]
    assert len(configs) > 10_000
    candidates = candidates_of(configs=configs)
    sampler = PredictiveSampler(candidates)
    study = optuna.create_study(sampler=sampler)
    taken = []
    for _ in range(8):
        start = time.perf_counter()
        chosen = candidates.configs[sampler.choose(study, None)]  # type: ignore[arg-type]
        taken.append(time.perf_counter() - start)
        candidates.observe(record_of(chosen, timed(chosen, seconds_of)))
    assert min(taken[1:]) < 0.05  # the least disturbed by what else this machine does


def test_a_prediction_of_time_enters_as_the_prior() -> None:
    prior = {config: math.log(seconds_of(config)) for config in SPACE.configs}
    model = StepTimeRegression(SPACE.configs, prior.__getitem__)
    first = SPACE.configs[0]
    model.observe(first, 2 * seconds_of(first))  # the machine is twice as slow as predicted
    mean, _ = model.posterior()
    expected = np.array([math.log(2 * seconds_of(config)) for config in SPACE.configs])
    assert np.abs(mean - expected).max() < 0.15


def test_the_deviation_shrinks_with_runs_and_grows_with_surprises() -> None:
    def deviation(factor: float) -> float:
        model = StepTimeRegression(SPACE.configs)
        for index, config in enumerate(SPACE.configs[::12]):
            model.observe(config, seconds_of(config) * factor ** (-1) ** index)
        return float(np.mean(model.posterior()[1]))

    assert deviation(1.0) < float(np.mean(StepTimeRegression(SPACE.configs).posterior()[1]))
    assert deviation(3.0) > 2 * deviation(1.0)


@pytest.mark.parametrize(("mean", "deviation", "best"), [(0.0, 1.0, 0.5), (1.0, 0.2, 0.9)])
def test_expected_improvement_is_the_integral(mean: float, deviation: float, best: float) -> None:
    density = stats.norm(mean, deviation).pdf
    expected, _ = integrate.quad(lambda x: (best - x) * density(x), -10, best)
    value = expected_improvement(np.array([mean]), np.array([deviation]), best)
    assert value[0] == pytest.approx(expected, abs=1e-7)
