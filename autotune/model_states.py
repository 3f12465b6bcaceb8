"""Bytes of one rank's model states and of what the engine gathers, by arithmetic.

A function a term, each with its formula; sizes in, bytes out. The ZeRO paper's table (Rajbhandari
et al., arXiv:1910.02054, Table 1) comes from the same terms given its own byte counts.
"""

from __future__ import annotations

from autotune.records import ModelProfile
from runtime.config import TrainConfig

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Precision → bytes of one element in forward and backward."""
_OPTIMIZER_SHARDED_FROM, _GRADIENTS_SHARDED_FROM, _PARAMETERS_SHARDED_FROM = 1, 2, 3


def optimizer_bytes(size: float, *, stage: int, ranks: int) -> float:
    """Optimizer states and master parameters: `size / ranks` from stage 1 (ZeRO, section 5.1)."""
    return _held(size, stage, ranks, _OPTIMIZER_SHARDED_FROM)


def gradient_bytes(size: float, *, stage: int, ranks: int) -> float:
    """Gradients kept between micro-batches: `size / ranks` from stage 2 (ZeRO, section 5.2)."""
    return _held(size, stage, ranks, _GRADIENTS_SHARDED_FROM)


def parameter_bytes(size: float, *, stage: int, ranks: int) -> float:
    """Parameters in the compute dtype: `size / ranks` at stage 3 (ZeRO, section 5.3)."""
    return _held(size, stage, ranks, _PARAMETERS_SHARDED_FROM)


def zero_model_states(
    parameters: float, *, stage: int, ranks: int, bytes_per_parameter: tuple[int, int, int]
) -> float:
    """Bytes of parameters, gradients and optimizer states of a model of so many `parameters`.

    `bytes_per_parameter` gives those three; for mixed-precision Adam the paper counts (2, 2, 12),
    the last of them master parameters, momentum and variance in fp32.
    """
    weights, gradients, optimizer = (count * parameters for count in bytes_per_parameter)
    return (
        parameter_bytes(weights, stage=stage, ranks=ranks)
        + gradient_bytes(gradients, stage=stage, ranks=ranks)
        + optimizer_bytes(optimizer, stage=stage, ranks=ranks)
    )


def model_state_terms(profile: ModelProfile, config: TrainConfig) -> dict[str, float]:
    """What one rank of this engine holds, name → bytes, in the last micro-batch's backward pass.

    Stage 0 keeps everything whole in fp32 (autocast). From stage 1 the fp32 master parameters are
    shards; stages 1 and 2 hold the parameters gathered, in the compute dtype, through the step.
    """
    stage, ranks = config.zero_stage, config.ranks
    master = optimizer_bytes(profile.parameter_bytes, stage=stage, ranks=ranks)
    return {
        "parameters": master + profile.buffer_bytes,
        "gradients": _gradients(profile, config),
        "optimizer": optimizer_bytes(profile.optimizer_state_bytes, stage=stage, ranks=ranks),
        "gathered parameters": _gathered(profile, config),
        "communication": _communication(profile, config),
    }


def absent_at_activation_peak(terms: dict[str, float], config: TrainConfig) -> float:
    """Bytes of `terms` that are not there yet when the activations are largest.

    Activations peak as the backward pass begins. Gradients that the step starts without, and the
    buffers that reduce them, then grow as the activations go, so the peak is the larger of the
    two, not the sum. DDP's buckets are there from the start; with several accumulation steps the
    gradients are, and from stage 2 so are the buffers of the reductions still in flight.
    """
    first = config.gradient_accumulation_steps == 1
    if config.ranks == 1:
        return terms["gradients"] if first else 0.0
    if config.zero_stage == 0:
        return 0.0
    if first:
        return terms["gradients"] + terms["communication"]
    return terms["communication"] if config.zero_stage == 1 else 0.0


def startup_bytes(profile: ModelProfile, config: TrainConfig) -> float:
    """Peak while the model is built: whole in fp32, as every rank builds it.

    Sharded below fp32, a first small forward gathers it once more in the compute dtype.
    """
    whole = float(profile.parameter_bytes + profile.buffer_bytes)
    if config.ranks > 1 and config.zero_stage > 0 and config.precision != "fp32":
        return whole + profile.parameter_bytes * COMPUTE_BYTES[config.precision] / 4
    return whole


def _gradients(profile: ModelProfile, config: TrainConfig) -> float:
    """Gradients held while the last micro-batch runs.

    At stage 1 they stay whole until the last micro-batch, in the reduce dtype, and then become
    fp32 shards one group at a time; with one accumulation step there is nothing to keep, so it
    equals stage 2. Shards are fp32 always, as the master parameters are.
    """
    stage, ranks = config.zero_stage, config.ranks
    whole = float(profile.trainable_bytes)
    if stage == 1 and config.gradient_accumulation_steps > 1:
        width = COMPUTE_BYTES[config.precision] if config.reduce_dtype == "compute" else 4
        return gradient_bytes(whole * width / 4, stage=stage, ranks=ranks)
    return gradient_bytes(whole, stage=2 if stage == 1 else stage, ranks=ranks)


def _gathered(profile: ModelProfile, config: TrainConfig) -> float:
    """Parameters held in the compute dtype beside the masters.

    Stage 3 holds the root's group, the block at work and the one fetched ahead. At stage 0 autocast
    keeps the narrow copy of each weight until the backward pass has used it.
    """
    narrow = COMPUTE_BYTES[config.precision] / 4
    if config.ranks == 1 or config.zero_stage == 0:
        return 0.0 if config.precision == "fp32" else profile.parameter_bytes * narrow
    if config.zero_stage < 3:
        return parameter_bytes(
            profile.parameter_bytes * narrow, stage=config.zero_stage, ranks=config.ranks
        )
    at_once = profile.root_bytes + min(2, profile.block_count) * profile.largest_block_bytes
    return min(profile.parameter_bytes, at_once) * narrow


def _communication(profile: ModelProfile, config: TrainConfig) -> float:
    """Buffers of the collectives that are in flight at once.

    DDP accumulates beside its buckets, then copies into them; with one accumulation step the
    gradients lie in the buckets. FSDP2 copies a group's gradients, in the compute dtype, into the
    input of a reduce-scatter in the reduce dtype.
    """
    if config.ranks == 1:
        return 0.0
    if config.zero_stage == 0:
        return float(profile.trainable_bytes) * (config.gradient_accumulation_steps > 1)
    compute = COMPUTE_BYTES[config.precision]
    reduce = compute if config.reduce_dtype == "compute" else 4
    group = max(profile.largest_block_bytes, profile.root_bytes) / 4
    return group * (compute + reduce)


def _held(size: float, stage: int, ranks: int, sharded_from: int) -> float:
    return size / ranks if stage >= sharded_from else float(size)
