"""The record of a traced model: everything from which the bytes of a configuration follow."""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.timeline import Timeline
from runtime.config import ActivationCheckpointing, Precision, TrainConfig


@dataclass(frozen=True, kw_only=True)
class TracedParameter:
    """One parameter, shared (tied) ones once; in the order of `model.parameters()`."""

    name: str
    rows: int
    """Size of the dimension that is sharded, the first; 1 for a 0-dim parameter."""
    row_elements: int
    element_bytes: int
    """As the user built it: 4 for fp32 masters."""
    trainable: bool
    used: bool
    """Some micro-batch gave it a gradient; the optimizer skips the others."""
    lowers: bool
    """A floating-point parameter wider than 2 bytes: gathered in the compute dtype."""
    group: int
    """Index into `ModelTrace.groups`; the number of groups for the root's own parameters."""
    whole: bool
    """Every rank holds it whole at stages 1 to 3 (0-dim, or of a dtype unlike its group's)."""
    whole_lowered: bool
    """The same in bf16 and fp16: parameters of batch norms too."""
    state_element_bytes: int = 0
    """Optimizer states of the parameter's shape: bytes for each of its elements."""
    state_extra_bytes: int = 0
    """Optimizer states of another shape (step counters), the same on every rank."""

    @property
    def elements(self) -> int:
        return self.rows * self.row_elements

    @property
    def bytes(self) -> int:
        return self.elements * self.element_bytes

    def is_whole(self, *, lowered: bool) -> bool:
        return self.whole_lowered if lowered else self.whole


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """The optimizer, and what its `step()` takes and frees again."""

    name: str
    temporary_bytes: int
    """For the whole, unsharded model."""
    largest_bytes: int
    """Of the largest trainable parameter: temporaries no more than a few of these are taken one
    parameter after another."""


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """Facts of one unsharded model, traced without memory, or run small."""

    parameters: tuple[TracedParameter, ...]
    buffer_bytes: int
    groups: tuple[str, ...]
    """Names of the modules that are sharded one by one."""
    timelines: dict[str, Timeline]
    """`timeline_key` → timeline. What could not be traced is missing, and `notes` say why."""
    step: StepTrace
    batch_bytes: tuple[float, float] = (0.0, 0.0)
    """Of one micro-batch: fixed, and for each sample. Counts where the device is not the host."""
    device: str = "cpu"
    traced: bool = True
    """False where the model ran on real tensors, since fake ones could not follow it."""
    reason: str = ""
    """Why it is not traced; empty where it is."""
    notes: tuple[str, ...] = field(default=())
    seconds: float = 0.0

    @property
    def parameter_bytes(self) -> int:
        return sum(item.bytes for item in self.parameters)

    @property
    def trainable_bytes(self) -> int:
        return sum(item.bytes for item in self.parameters if item.trainable)


ARITHMETICS = ("fp32", "autocast", "cast")
"""fp32; autocast over fp32 parameters (stage 0, one rank); parameters and the inputs of blocks in
the compute dtype (stages 1 to 3)."""


def arithmetic(config: TrainConfig) -> str:
    """Which of `ARITHMETICS` the engine uses for `config`."""
    if config.precision == "fp32":
        return "fp32"
    return "autocast" if config.ranks == 1 or config.zero_stage == 0 else "cast"


def timeline_key(kind: str, precision: Precision, checkpointing: ActivationCheckpointing) -> str:
    """The name of a timeline in `ModelTrace.timelines`: such as `cast bf16 full`, `fp32 none`."""
    name = kind if kind == precision else f"{kind} {precision}"
    return f"{name} {checkpointing}"
