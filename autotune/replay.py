"""One rank's optimizer step, replayed with numbers for tensors: one rank alone, or DDP.

The replay walks through the moments of a traced micro-batch and keeps count of what the engine
holds; where the sum of all terms is largest is the peak. Source of DDP's part:
torch/csrc/distributed/c10d/reducer.cpp. `autotune.replay_sharded` holds FSDP2's.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.model_states import COMPUTE_BYTES
from autotune.model_trace import ModelTrace, TracedParameter
from autotune.timeline import CATEGORIES, Moment
from runtime.config import TrainConfig

PARAMETERS = "parameters"
GATHERED = "gathered parameters"
GATHER_BUFFERS = "gather buffers"
GRADIENTS = "gradients"
BUCKETS = "gradient buckets"
REDUCE_BUFFERS = "reduce buffers"
OPTIMIZER = "optimizer states"
OPTIMIZER_TEMPORARIES = "optimizer temporaries"
BATCH = "batch"
TERMS = (
    PARAMETERS,
    GATHERED,
    GATHER_BUFFERS,
    GRADIENTS,
    BUCKETS,
    REDUCE_BUFFERS,
    OPTIMIZER,
    OPTIMIZER_TEMPORARIES,
    BATCH,
    *CATEGORIES,
)
"""Every term of a ledger, in the order of display."""

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
"""DDP's limits, of its first bucket and of the others."""
MASTER_BYTES = 4


class Replay:
    """One rank alone; the base of the others."""

    def __init__(self, trace: ModelTrace, config: TrainConfig) -> None:
        self.trace = trace
        self.config = config
        self.parameters = trace.parameters
        self.held: dict[str, float] = dict.fromkeys(TERMS, 0.0)
        self.peak: dict[str, float] = {}
        self.segment = ""
        self.first = self.last = True
        self._peak_bytes = -1.0
        self.place = "start of the step"
        self.held[PARAMETERS] = trace.buffer_bytes + self.parameter_bytes()
        self.held[OPTIMIZER] = self.state_bytes()
        if trace.device != "cpu":
            fixed, per_sample = trace.batch_bytes
            self.held[BATCH] = fixed + per_sample * config.micro_batch_size

    # What is held, by term.

    def local_elements(self, parameter: TracedParameter) -> int:
        """Elements of `parameter` that this rank keeps at rest."""
        return parameter.elements

    def parameter_bytes(self) -> float:
        """Master parameters: ZeRO's P_os shards them from stage 1."""
        return sum(self.local_elements(item) * item.element_bytes for item in self.parameters)

    def state_bytes(self) -> float:
        """Optimizer states, shards from stage 1; step counters whole."""
        return sum(
            self.local_elements(item) * item.state_element_bytes + item.state_extra_bytes
            for item in self.parameters
        )

    def final_gradient_bytes(self) -> float:
        """Gradients as the optimizer takes them, of the masters' dtype."""
        return sum(
            self.local_elements(item) * item.element_bytes for item in self.parameters if item.used
        )

    def lingering_bytes(self) -> float:
        """The largest buffer that the process group may free after the peak or before it."""
        return 0.0

    # One optimizer step.

    def start_step(self) -> None:
        """The last step's gradients live until this one clears them."""
        self.held[GRADIENTS] = self.final_gradient_bytes()
        self.observe("start of the step")
        self.held[GRADIENTS] = 0.0

    def start_micro_batch(self, *, first: bool, last: bool) -> None:
        self.first, self.last = first, last
        self.place = "start of forward"

    def advance(self, moment: Moment) -> None:
        """Account for the operations up to `moment`, then for what the engine does at it."""
        size = self.config.micro_batch_size
        for line in moment.before:
            self.set_live(line.at(size))
            self.observe(self.place)
        self.set_live(moment.live.at(size))
        match moment.kind:
            case "forward":
                self.place = f"forward of {self._name(moment.index)}"
                self.begin_forward(moment.index)
            case "forwarded":
                self.place = f"after {self._name(moment.index)}, forward"
                self.end_forward(moment.index)
            case "loss":
                self.place = "loss, backward"
                self.begin_root_backward()
            case "backward":
                self.place = f"backward of {self._name(moment.index)}"
                self.begin_backward(moment.index)
            case "backwarded":
                self.place = f"after {self._name(moment.index)}, backward"
                self.end_backward(moment.index)
            case "gradient":
                self.add_gradient(moment.index)
            case "end":
                self.end_micro_batch()

    def step_optimizer(self) -> None:
        """Clipping scales in place; the step's temporaries come on top of all that is held."""
        self.held[OPTIMIZER_TEMPORARIES] = self._step_temporaries()
        self.observe("optimizer step")

    def observe(self, segment: str, extra: float = 0.0, term: str = REDUCE_BUFFERS) -> None:
        """Compare what is held now, and `extra` bytes of `term`, with the peak so far."""
        total = sum(self.held.values()) + extra
        if total > self._peak_bytes:
            self._peak_bytes = total
            self.peak = dict(self.held)
            self.peak[term] += extra
            self.segment = segment

    def begin_forward(self, group: int) -> None: ...

    def end_forward(self, group: int) -> None: ...

    def begin_root_backward(self) -> None: ...

    def begin_backward(self, group: int) -> None: ...

    def end_backward(self, group: int) -> None: ...

    def end_micro_batch(self) -> None: ...

    def add_gradient(self, index: int) -> None:
        """Kept as it is, or added in place to what earlier micro-batches left."""
        if self.first:
            self.held[GRADIENTS] += self.parameters[index].bytes

    def set_live(self, sizes: Sequence[float]) -> None:
        for name, size in zip(CATEGORIES, sizes, strict=True):
            self.held[name] = size

    def _name(self, group: int) -> str:
        return self.trace.groups[group]

    def _step_temporaries(self) -> float:
        step = self.trace.step
        trainable = [item for item in self.parameters if item.used]
        local = [self.local_elements(item) * item.element_bytes for item in trainable]
        if not local or not step.temporary_bytes:
            return 0.0
        whole = [item.bytes for item in trainable]
        if step.temporary_bytes <= 4 * step.largest_bytes:
            return step.temporary_bytes * max(local) / step.largest_bytes
        return step.temporary_bytes * sum(local) / sum(whole)


class Replicated(Replay):
    """Stage 0: DDP with `gradient_as_bucket_view`.

    The buckets live for good; a gradient is copied into its bucket as soon as it is complete, in
    the last micro-batch, and stays a tensor of its own in those before.
    """

    def __init__(self, trace: ModelTrace, config: TrainConfig) -> None:
        super().__init__(trace, config)
        self._bucket_of: dict[int, int] = {}
        self._bucket_bytes: list[int] = []
        for number, members in enumerate(bucket_sizes(self.parameters)):
            self._bucket_of.update(dict.fromkeys(members, number))
            self._bucket_bytes.append(sum(self.parameters[item].bytes for item in members))
        self._members = [0] * len(self._bucket_bytes)
        for index, number in self._bucket_of.items():
            self._members[number] += self.parameters[index].used  # DDP finds the others beforehand
        self._missing = list(self._members)
        self.held[BUCKETS] = float(sum(self._bucket_bytes))
        self._compressed = config.precision != "fp32" and config.reduce_dtype == "compute"

    def final_gradient_bytes(self) -> float:
        """Views of the buckets."""
        return 0.0

    def start_micro_batch(self, *, first: bool, last: bool) -> None:
        super().start_micro_batch(first=first, last=last)
        self._missing = list(self._members)

    def add_gradient(self, index: int) -> None:
        if not self.last:
            super().add_gradient(index)
            return
        if not self.first:
            self.held[GRADIENTS] -= self.parameters[index].bytes
        bucket = self._bucket_of[index]
        self._missing[bucket] -= 1
        if not self._missing[bucket] and self._compressed:
            # The copy that travels; all of them may still be on their way at the end.
            narrow = COMPUTE_BYTES[self.config.precision] / MASTER_BYTES
            self.held[REDUCE_BUFFERS] += self._bucket_bytes[bucket] * narrow
            self.observe(self.place)

    def end_micro_batch(self) -> None:
        self.held[REDUCE_BUFFERS] = 0.0


def bucket_sizes(parameters: Sequence[TracedParameter]) -> list[list[int]]:
    """DDP's gradient buckets: indices into `parameters`, in order of registration.

    One list for each dtype is filled up to a limit and closed
    (`compute_bucket_assignment_by_size`).
    """
    limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES]
    buckets: list[list[int]] = []
    open_buckets: dict[int, tuple[list[int], int, int]] = {}
    for index, parameter in enumerate(parameters):
        if not parameter.trainable:
            continue
        width = parameter.element_bytes
        members, size, limit = open_buckets.get(width, ([], 0, 0))
        members.append(index)
        size += parameter.bytes
        if size >= limits[limit]:
            buckets.append(members)
            members, size, limit = [], 0, min(limit + 1, len(limits) - 1)
        open_buckets[width] = (members, size, limit)
    return buckets + [members for members, _, _ in open_buckets.values() if members]
