"""One rank's optimizer step at stages 1 to 3: what FSDP2 gathers, reduces and lets go, and when.

Source: torch/distributed/fsdp/_fully_shard/ (`_fsdp_param_group.py`, `_fsdp_collectives.py`,
`_fsdp_state.py`); for the copies that gloo makes, torch/csrc/distributed/c10d/ProcessGroupGloo.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.model_states import COMPUTE_BYTES
from autotune.model_trace import ModelTrace, TracedParameter
from autotune.replay import (
    GATHER_BUFFERS,
    GATHERED,
    GRADIENTS,
    MASTER_BYTES,
    REDUCE_BUFFERS,
    Replay,
)
from autotune.timeline import CATEGORIES
from runtime.config import TrainConfig


def shard_elements(parameter: TracedParameter, ranks: int) -> int:
    """Elements of rank 0's shard, padding included: chunks of dimension 0, the first the largest.

    FSDP2 pads every shard to the size of the first (`FSDPParam._init_sharded_param`).
    """
    return -(-parameter.rows // ranks) * parameter.row_elements


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


class Sharded(Replay):
    """Stages 1 to 3: FSDP2."""

    def __init__(self, trace: ModelTrace, config: TrainConfig) -> None:
        self._lowered = config.precision != "fp32"
        self._compute = COMPUTE_BYTES[config.precision]
        self._reduce = self._compute if config.reduce_dtype == "compute" else MASTER_BYTES
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

    def final_gradient_bytes(self) -> float:
        """The shards of one group's gradients are one flat tensor, unused ones included."""
        used = [item for item in self.parameters if item.used]
        groups = {item.group for item in used if not item.is_whole(lowered=self._lowered)}
        whole = sum(item.bytes for item in used if item.is_whole(lowered=self._lowered))
        return whole + sum(
            self._groups[group].reduce_elements / self.config.ranks * MASTER_BYTES
            for group in groups
        )

    def lingering_bytes(self) -> float:
        """gloo's clone of a reduce-scatter input, which its thread frees when it next runs."""
        if not self._host_copies:
            return 0.0
        width = self._width_of_reduce()
        return float(max(group.reduce_elements * width for group in self._groups))

    def start_micro_batch(self, *, first: bool, last: bool) -> None:
        super().start_micro_batch(first=first, last=last)
        self._order = []
        for group in self._groups:
            group.reduced = False
        self.set_live((0.0,) * len(CATEGORIES))
        self._gather_in_forward(self._root)

    def begin_forward(self, group: int) -> None:
        self._gather_in_forward(self._groups[group])

    def end_forward(self, group: int) -> None:
        if self.config.zero_stage == 3:
            self._let_go(self._groups[group])
        if self._groups[group].indices:
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
        self.place = "end of backward"
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
        self.observe(self.place, group.copy_in_bytes + own, GATHER_BUFFERS)
        group.pending = True

    def _copy_out(self, group: _Group) -> None:
        if not group.pending:
            return
        group.gathered = True
        self.held[GATHERED] += group.whole_bytes
        self.observe(self.place)

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
            self.observe(self.place)
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
        self.observe(self.place, copied)
        # `foreach_reduce` still refers to the last gradient when it clears the others.
        last = gradients.get(group.last_trainable or 0, 0.0)
        self.held[GRADIENTS] -= sum(gradients.values()) - last
        group.gradients.clear()
        group.accumulated.clear()
        out = shard * self._width_of_reduce()
        clone = self._reducing if self._host_copies else 0.0  # gloo reduces a clone of the input
        self.observe(self.place, out + clone)
        master = shard * MASTER_BYTES
        if self._width_of_reduce() != MASTER_BYTES:
            self.observe(self.place, out + master)
        if group.holds_shards:
            self.observe(self.place, master)
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
        return self._reduce if self._lowered else MASTER_BYTES
