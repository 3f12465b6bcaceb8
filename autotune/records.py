"""The records that travel from hop to hop of a search, and their JSON form.

Plain frozen dataclasses without torch; `dump` and `load` turn any of them into JSON values and
back, checked by pydantic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter

from runtime.config import TrainConfig
from runtime.measurement import Measurement

Objective = Literal["throughput", "memory"]
Role = Literal["plain", "own", "search", "confirm"]
Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The machine that the search runs on, as far as configurations depend on it."""

    device: Literal["cpu", "cuda"]
    device_name: str
    device_count: int
    """CUDA devices; 0 on a CPU host."""
    cores: int
    """CPU cores that this process may use."""
    host_memory_bytes: int
    """What may be used: the smaller of the control group's limit and the memory available."""
    device_memory_bytes: int
    """Of one CUDA device; 0 on a CPU host."""
    fp16_arithmetic: bool
    bf16_arithmetic: bool
    compiler: str | None
    """Path of the C++ compiler that torch.compile needs on CPU; None where there is none."""
    python: str
    torch: str
    platform: str


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """What one model is like. Bytes are those of the whole, unsharded model in fp32 masters."""

    parameter_count: int
    """Shared (tied) parameters counted once."""
    trainable_parameter_count: int
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    block_class: str | None
    """Class of the repeated blocks that are sharded and checkpointed; None where none repeats."""
    block_count: int
    largest_block_bytes: int
    """fp32 parameter bytes of the largest group that stage 3 gathers at once."""
    root_bytes: int
    """fp32 parameter bytes outside all blocks."""
    optimizer: str
    optimizer_state_bytes: int
    """After one step of the whole model."""
    tokens_per_sample: int | None
    global_batch_size: int | None = None
    """What the model file asks for; None where it says nothing."""
    activation_bytes: dict[int, int] = field(default_factory=dict)
    """Micro-batch size → peak live bytes of forward and backward (fp32, no checkpointing) above
    parameters, gradients, optimizer states and the batch. Measured in one real run for each."""
    micro_batch_seconds: dict[int, float] = field(default_factory=dict)
    """Micro-batch size → seconds of forward and backward (fp32, no checkpointing), measured."""
    halves_difference: float | None = None
    """Largest relative difference between the gradient of one batch and the mean of its halves'
    gradients; about 1e-6 where the loss is a mean over independent samples, None if not known."""
    stochastic: bool = False
    """Two passes over the same batch gave different losses (dropout, sampling)."""
    notes: tuple[str, ...] = ()
    """Sentences for the report: what could not be measured, and why."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is expected of a configuration before it runs; the figures are those of one rank."""

    allocated_bytes: float
    reserved_bytes: float
    reserved_deviation_bytes: float
    """Standard deviation of the prediction of `reserved_bytes`."""
    fit_probability: float
    """That the reserved peak stays below the memory limit."""
    terms: dict[str, float] = field(default_factory=dict)
    """Named parts of `allocated_bytes`."""
    step_seconds: float | None = None
    """None until enough has been measured to predict it."""
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure with the interval in which a fresh run's figure is expected to lie."""

    value: float
    low: float
    high: float
    level: float
    """Probability that a fresh run lies within [low, high]."""
    processes: int
    """Fresh process groups that it was computed from."""

    @property
    def relative_half_width(self) -> float:
        """Half of the interval's width, as a share of the figure."""
        return (self.high - self.low) / 2 / self.value


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One finished run of one configuration."""

    number: int
    role: Role
    config: TrainConfig
    prediction: Prediction | None
    """As it was before the run."""
    measurement: Measurement
    eligible: bool = True
    """Whether it may win: it is of the space that was searched. A baseline need not be."""


@dataclass(frozen=True, kw_only=True)
class Untried:
    """A configuration that was not run, and the one reason."""

    config: TrainConfig
    reason: str
    prediction: Prediction | None = None


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A configuration with the throughput that its runs amount to."""

    config: TrainConfig
    samples_per_second: Interval
    measurements: tuple[Measurement, ...]
    in_turn: bool = False
    """The runs are of the last confirmation, in which leaders and baselines ran side by side."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """All that a search found; everything it writes is drawn from this."""

    model_file: str
    model_hash: str
    study_name: str
    command: str
    """The command line that runs this search again."""
    started_at: str
    """ISO 8601, UTC."""
    seconds: float
    """Wall-clock seconds spent, over all sessions of the study."""
    objective: Objective
    global_batch_size: int
    ranks: int
    memory_limit_bytes: int
    """Of one rank, compared with the reserved peak."""
    hardware: Hardware
    profile: ModelProfile
    trials: tuple[TrialRecord, ...]
    untried: tuple[Untried, ...]
    dropped_dimensions: dict[str, str]
    """Dimension → why it is not searched here."""
    best: Ranked | None
    """None where nothing fits or nothing was measured."""
    runner_up: Ranked | None
    plain: Ranked | None
    """Stage 0, fp32, no checkpointing, the largest power-of-two micro-batch that fits."""
    own: Ranked | None
    """The user's own configuration, where one was given."""
    stopped_because: str
    """One line: why the search ended, and what that leaves open."""
    notes: tuple[str, ...] = ()


def dump(record: Any) -> Any:
    """`record` as JSON values (dict, list, str, numbers, None)."""
    return _adapter(type(record)).dump_python(record, mode="json")


def load(kind: type[Record], data: Any) -> Record:
    """The inverse of `dump`; raises pydantic.ValidationError where `data` has another shape."""
    record: Record = _adapter(kind).validate_python(data)
    return record


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:  # building one takes a millisecond, and a search has thousands
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]
