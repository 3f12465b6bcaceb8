"""The space as Optuna sees it: categorical parameters, one for each field that varies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import CategoricalDistribution

from runtime.config import TrainConfig

_FOLLOWS = "gradient_accumulation_steps"
"""Given by the micro-batch size, since the global batch is fixed."""


class Parameters:
    """Translates between `TrainConfig` and Optuna's parameters, both ways."""

    def __init__(self, configs: Sequence[TrainConfig]) -> None:
        """`configs` are distinct, of one global batch size."""
        fields = [name for name in TrainConfig.model_fields if name != _FOLLOWS]
        values = {
            name: tuple(dict.fromkeys(getattr(config, name) for config in configs))
            for name in fields
        }
        self.choices = {name: taken for name, taken in values.items() if len(taken) > 1}
        """Field of `TrainConfig` → the values that it takes, in the order of the space."""
        self.distributions = {
            name: CategoricalDistribution(choices) for name, choices in self.choices.items()
        }
        self._configs = {self._key(self.of(config)): config for config in configs}

    def of(self, config: TrainConfig) -> dict[str, Any]:
        """The parameters of `config`. A value that the space does not take is left out, since
        Optuna refuses it: only a baseline outside the space has one."""
        return {
            name: getattr(config, name)
            for name, choices in self.choices.items()
            if getattr(config, name) in choices
        }

    def find(self, parameters: Mapping[str, Any]) -> TrainConfig | None:
        """The member of the space with these parameters; None where they are not legal together."""
        return self._configs.get(self._key(parameters))

    def _key(self, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(parameters.get(name) for name in self.choices)
