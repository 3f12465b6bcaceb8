"""Where every byte of one rank goes: the engine's own steps, replayed in arithmetic.

The replay walks through the moments of a traced micro-batch, and does with numbers what DDP, FSDP2
and the process group do with tensors. Where the sum of all terms is largest is the peak.

Sources: ZeRO (Rajbhandari et al., arXiv:1910.02054) for what is sharded at each stage;
torch/distributed/fsdp/_fully_shard/ (`_fsdp_param_group.py`, `_fsdp_collectives.py`) for when
groups gather, reduce and let go; torch/csrc/distributed/c10d/reducer.cpp for DDP's buckets;
ProcessGroupGloo.cpp for the copies that gloo makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.model_states import COMPUTE_BYTES
from autotune.model_trace import ModelTrace, TracedParameter, arithmetic, timeline_key
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
_MASTER_BYTES = 4


@dataclass(frozen=True)
class Entry:
    """One term at the peak."""

    name: str
    bytes: float
    tier: str
    """Where the bytes lie: `device` or `host`. Offloading a term changes this column."""


@dataclass(frozen=True)
class Ledger:
    """What one rank holds at its peak, and at which point of an optimizer step that is."""

    entries: tuple[Entry, ...]
    """Terms above zero."""
    segment: str

    @property
    def peak_bytes(self) -> float:
        """Allocated bytes at the peak, over all tiers."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def terms(self) -> dict[str, float]:
        """Name → bytes."""
        return {entry.name: entry.bytes for entry in self.entries}


def ledger(trace: ModelTrace, config: TrainConfig) -> Ledger:
    """The ledger of the rank that holds most (rank 0, whose shards are never the smaller ones).

    Raises:
        KeyError: the trace lacks the timeline of this arithmetic and checkpointing.
    """
    timeline = trace.timelines[timeline_key(arithmetic(config), config.activation_checkpointing)]
    if config.ranks == 1:
        replay: _Replay = _Replay(trace, config)
    elif config.zero_stage == 0:
        replay = _Replicated(trace, config)
    else:
        replay = _Sharded(trace, config)
    replay.start_step()
    # Between the first micro-batch and the last all are alike.
    count = min(3, config.gradient_accumulation_steps)
    for index in range(count):
        replay.start_micro_batch(first=index == 0, last=index == count - 1)
        for moment in timeline.moments:
            replay.advance(moment)
    replay.step_optimizer()
    tier = "host" if trace.device == "cpu" else "device"
    return Ledger(
        entries=tuple(
            Entry(name, size, tier) for name in TERMS if (size := replay.peak.get(name, 0.0)) > 0
        ),
        segment=replay.segment,
    )


def shard_elements(parameter: TracedParameter, ranks: int) -> int:
    """Elements of rank 0's shard, padding included: chunks of dimension 0, the first the largest.

    FSDP2 pads every shard to the size of the first (`FSDPParam._init_sharded_param`).
    """
    return -(-parameter.rows // ranks) * parameter.row_elements


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


class _Replay:
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
        self._place = "start of the step"
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
            self.local_elements(item) * item.element_bytes
            for item in self.parameters
            if item.trainable
        )

    # One optimizer step.

    def start_step(self) -> None:
        """The last step's gradients live until this one clears them."""
        self.held[GRADIENTS] = self.final_gradient_bytes()
        self.observe("start of the step")
        self.held[GRADIENTS] = 0.0

    def start_micro_batch(self, *, first: bool, last: bool) -> None:
        self.first, self.last = first, last
        self._place = "start of forward"

    def advance(self, moment: Moment) -> None:
        """Account for the operations up to `moment`, then for what the engine does at it."""
        size = self.config.micro_batch_size
        for line in moment.before:
            self._set_live(line.at(size))
            self.observe(self._place)
        self._set_live(moment.live.at(size))
        match moment.kind:
            case "forward":
                self._place = f"forward of {self._name(moment.index)}"
                self.begin_forward(moment.index)
            case "forwarded":
                self._place = f"after {self._name(moment.index)}, forward"
                self.end_forward(moment.index)
            case "loss":
                self._place = "loss, backward"
                self.begin_root_backward()
            case "backward":
                self._place = f"backward of {self._name(moment.index)}"
                self.begin_backward(moment.index)
            case "backwarded":
                self._place = f"after {self._name(moment.index)}, backward"
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

    def _set_live(self, sizes: Sequence[float]) -> None:
        for name, size in zip(CATEGORIES, sizes, strict=True):
            self.held[name] = size

    def _name(self, group: int) -> str:
        return self.trace.groups[group]

    def _step_temporaries(self) -> float:
        step = self.trace.step
        trainable = [item for item in self.parameters if item.trainable]
        local = [self.local_elements(item) * item.element_bytes for item in trainable]
        if not local or not step.temporary_bytes:
            return 0.0
        whole = [item.bytes for item in trainable]
        if step.temporary_bytes <= 4 * step.largest_bytes:
            return step.temporary_bytes * max(local) / step.largest_bytes
        return step.temporary_bytes * sum(local) / sum(whole)


class _Replicated(_Replay):
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
        for number in self._bucket_of.values():
            self._members[number] += 1
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
            narrow = COMPUTE_BYTES[self.config.precision] / _MASTER_BYTES
            self.held[REDUCE_BUFFERS] += self._bucket_bytes[bucket] * narrow
            self.observe(self._place)

    def end_micro_batch(self) -> None:
        self.held[REDUCE_BUFFERS] = 0.0


@dataclass
class _Group:
    """What FSDP2 gathers and reduces together, in bytes; `gathered` and the rest are state."""

    indices: list[int]
    whole_bytes: float = 0.0
    """All of its parameters, padded, in the compute dtype."""
    copy_in_bytes: float = 0.0
    """This rank's shards in the compute dtype, where that is not the masters'."""
    reduce_elements: int = 0
    """Of its trainable parameters, padded."""
    largest_elements: int = 0
    last_trainable: int | None = None
    gathered: bool = False
    pending: bool = False
    """Its flat gather buffer has arrived and waits to be copied out."""
    reduced: bool = False
    """In this backward pass."""
    holds_shards: bool = False
    """Of gradients, from an earlier micro-batch."""
    gradients: dict[int, float] = field(default_factory=dict)
    """Parameter → bytes of its unsharded gradient."""
    accumulated: dict[int, float] = field(default_factory=dict)
    """The same in the reduce dtype, kept from earlier micro-batches (stage 1)."""


class _Sharded(_Replay):
    """Stages 1 to 3: FSDP2."""

    def __init__(self, trace: ModelTrace, config: TrainConfig) -> None:
        self._lowered = config.precision != "fp32"
        self._compute = COMPUTE_BYTES[config.precision]
        self._reduce = self._compute if config.reduce_dtype == "compute" else _MASTER_BYTES
        super().__init__(trace, config)
        self._host_copies = trace.device == "cpu"  # gloo's
        self._groups = self._grouped()
        self._root = self._groups[-1]
        self._order: list[int] = []
        self._retained = 0.0
        """The last flat gather buffer, kept until the next is copied out (forward only)."""
        self._reducing = 0.0
        """The last reduce-scatter input, kept until the next group reduces."""

    def local_elements(self, parameter: TracedParameter) -> int:
        if parameter.is_whole(lowered=self._lowered):
            return parameter.elements
        return shard_elements(parameter, self.config.ranks)

    def start_micro_batch(self, *, first: bool, last: bool) -> None:
        super().start_micro_batch(first=first, last=last)
        self._order = []
        for group in self._groups:
            group.reduced = False
        self._set_live((0.0,) * len(CATEGORIES))
        self._gather_in_forward(self._root)

    def begin_forward(self, group: int) -> None:
        self._gather_in_forward(self._groups[group])

    def end_forward(self, group: int) -> None:
        if self.config.zero_stage == 3:
            self._let_go(self._groups[group])
        self._order.append(group)

    def begin_root_backward(self) -> None:
        """The loss is there: the root's forward ends, its backward begins."""
        self.held[GATHER_BUFFERS] -= self._retained
        self._retained = 0.0
        self._prefetch()

    def begin_backward(self, group: int) -> None:
        self._gather(self._groups[group])
        self._copy_out(self._groups[group])
        self._free_flat(self._groups[group])
        if self._order and self._order[-1] == group:
            self._order.pop()
        self._prefetch()

    def add_gradient(self, index: int) -> None:
        parameter = self.parameters[index]
        if parameter.is_whole(lowered=self._lowered):
            super().add_gradient(index)
            return
        group = self._groups[parameter.group]
        if index not in group.gradients:
            size = float(parameter.elements * self._width(parameter))
            group.gradients[index] = size
            self.held[GRADIENTS] += size

    def end_backward(self, group: int) -> None:
        self._post_backward(self._groups[group])

    def end_micro_batch(self) -> None:
        """The root reduces last, after the groups whose inputs need no gradient."""
        self._place = "end of backward"
        for group in (self._root, *self._groups[:-1]):
            if not group.reduced:
                self._post_backward(group)
        self.held[REDUCE_BUFFERS] -= self._reducing
        self._reducing = 0.0
        for group in self._groups:
            self._free_flat(group)

    # Gathering.

    def _gather_in_forward(self, group: _Group) -> None:
        self._gather(group)
        if not group.pending:
            return
        self.held[GATHER_BUFFERS] -= self._retained
        self._retained = group.whole_bytes
        self._copy_out(group)
        group.pending = False

    def _gather(self, group: _Group) -> None:
        """Into one flat buffer, from a copy of the shards in the compute dtype.

        gloo gathers into a flat buffer of its own first (`AsyncAllgatherWork`).
        """
        if group.gathered or group.pending or not group.indices:
            return
        self.held[GATHER_BUFFERS] += group.whole_bytes
        own = group.whole_bytes if self._host_copies else 0.0
        self.observe(self._place, group.copy_in_bytes + own, GATHER_BUFFERS)
        group.pending = True

    def _copy_out(self, group: _Group) -> None:
        if not group.pending:
            return
        group.gathered = True
        self.held[GATHERED] += group.whole_bytes
        self.observe(self._place)

    def _free_flat(self, group: _Group) -> None:
        if group.pending:
            self.held[GATHER_BUFFERS] -= group.whole_bytes
            group.pending = False

    def _let_go(self, group: _Group) -> None:
        if group.gathered:
            self.held[GATHERED] -= group.whole_bytes
            group.gathered = False

    def _prefetch(self) -> None:
        """The group whose forward came before is gathered while this one's backward runs."""
        if self._order:
            self._gather(self._groups[self._order[-1]])

    # Reducing.

    def _post_backward(self, group: _Group) -> None:
        group.reduced = True
        for index in list(group.accumulated):
            self.held[GRADIENTS] -= group.gradients.pop(index, 0.0)
        if self.config.zero_stage == 1 and not self.last:
            self._accumulate(group)
            return
        self._zero_unused(group)
        if self.config.zero_stage == 3 or self.last:
            self._let_go(group)
        self._reduce_scatter(group)

    def _accumulate(self, group: _Group) -> None:
        """Unreduced gradients are kept in the reduce dtype where the compute dtype is another."""
        if not self._lowered or self._reduce == self._compute:
            return
        for index, size in group.gradients.items():
            wide = float(self.parameters[index].elements * self._reduce)
            group.accumulated[index] = wide
            self.held[GRADIENTS] += wide
            self.observe(self._place)
            self.held[GRADIENTS] -= size
        group.gradients.clear()

    def _zero_unused(self, group: _Group) -> None:
        for index in group.indices:
            parameter = self.parameters[index]
            seen = index in group.gradients or index in group.accumulated
            if parameter.trainable and not seen:
                size = float(parameter.elements * self._width(parameter))
                group.gradients[index] = size
                self.held[GRADIENTS] += size

    def _reduce_scatter(self, group: _Group) -> None:
        self.held[REDUCE_BUFFERS] -= self._reducing
        self._reducing = 0.0
        if not group.reduce_elements:
            return
        gradients = {**group.gradients, **group.accumulated}
        shard = group.reduce_elements / self.config.ranks
        self._reducing = float(group.reduce_elements * self._width_of_reduce())
        self.held[REDUCE_BUFFERS] += self._reducing
        # Where the dtypes differ, `_chunk_cat` copies one gradient after the other.
        differs = bool(group.gradients) and self._width_of_reduce() != self._compute
        copied = group.largest_elements * self._compute if differs and self._host_copies else 0.0
        self.observe(self._place, copied)
        # `foreach_reduce` still refers to the last gradient when it clears the others.
        last = gradients.get(group.last_trainable or 0, 0.0)
        self.held[GRADIENTS] -= sum(gradients.values()) - last
        group.gradients.clear()
        group.accumulated.clear()
        out = shard * self._width_of_reduce()
        clone = self._reducing if self._host_copies else 0.0  # gloo reduces a clone of the input
        self.observe(self._place, out + clone)
        master = shard * _MASTER_BYTES
        if self._width_of_reduce() != _MASTER_BYTES:
            self.observe(self._place, out + master)
        if group.holds_shards:
            self.observe(self._place, master)
        else:
            group.holds_shards = True
            self.held[GRADIENTS] += master
        self.held[GRADIENTS] -= last

    def _grouped(self) -> list[_Group]:
        groups = [_Group([]) for _ in range(len(self.trace.groups) + 1)]
        for index, item in enumerate(self.parameters):
            if item.is_whole(lowered=self._lowered):
                continue
            group = groups[item.group]
            group.indices.append(index)
            local = shard_elements(item, self.config.ranks)
            padded = local * self.config.ranks
            width = self._width(item)
            group.whole_bytes += padded * width
            if width != item.element_bytes:
                group.copy_in_bytes += local * width
            if item.trainable:
                group.reduce_elements += padded
                group.largest_elements = max(group.largest_elements, padded)
                group.last_trainable = index
        return groups

    def _width(self, parameter: TracedParameter) -> int:
        """Bytes of an element as gathered, and of its unreduced gradient."""
        return self._compute if self._lowered and parameter.lowers else parameter.element_bytes

    def _width_of_reduce(self) -> int:
        return self._reduce if self._lowered else _MASTER_BYTES
