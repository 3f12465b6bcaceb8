"""`TrainConfig`: the one description of how to train, and its JSON form.

Every file that the tool writes for a trainer is derived from one `TrainConfig`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.errors import ConfigError

ZeroStage = Literal[0, 1, 2, 3]
Precision = Literal["fp32", "bf16", "fp16"]
ReduceDtype = Literal["fp32", "compute"]
ActivationCheckpointing = Literal["none", "selective", "full"]

_Count = Annotated[int, Field(ge=1, strict=True)]


class TrainConfig(BaseModel):
    """How one model is trained, on every rank alike. Immutable; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="TrainConfig")

    ranks: _Count = Field(default=1, description="Data-parallel ranks (processes).")
    micro_batch_size: _Count = Field(
        default=1, description="Samples in one forward and backward pass of one rank."
    )
    gradient_accumulation_steps: _Count = Field(
        default=1, description="Micro-batches of one rank in one optimizer step."
    )
    zero_stage: ZeroStage = Field(
        default=0,
        description=(
            "What is sharded over the ranks at rest: 0 nothing, 1 optimizer states and master "
            "parameters, 2 also gradients, 3 also parameters."
        ),
    )
    precision: Precision = Field(
        default="fp32",
        description="Arithmetic of forward and backward; master parameters stay fp32.",
    )
    reduce_dtype: ReduceDtype = Field(
        default="fp32",
        description=(
            "Dtype in which gradients travel between ranks: fp32, or the compute dtype of "
            "`precision`. The same thing where precision is fp32."
        ),
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        default="none",
        description=(
            "Activations recomputed in backward: none, selective (keeps the outputs of matrix "
            "products), or full (keeps only the inputs of each block)."
        ),
    )
    compile: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="Compile each block with torch.compile."
    )
    gradient_clipping: Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)] | None = (
        Field(default=1.0, description="Largest global gradient norm (2-norm); null clips nothing.")
    )
    threads_per_rank: _Count | None = Field(
        default=None, description="CPU threads of one rank; null divides the cores by the ranks."
    )

    @property
    def global_batch_size(self) -> int:
        """Samples in one optimizer step over all ranks."""
        return self.ranks * self.micro_batch_size * self.gradient_accumulation_steps

    def label(self) -> str:
        """A short name for tables and logs, such as `z2 mb4x8 bf16/fp32 ckpt=full`."""
        parts = [
            f"z{self.zero_stage}",
            f"mb{self.micro_batch_size}x{self.gradient_accumulation_steps}",
            self.precision
            if self.precision == "fp32"
            else f"{self.precision}/{self.precision if self.reduce_dtype == 'compute' else 'fp32'}",
        ]
        if self.activation_checkpointing != "none":
            parts.append(f"ckpt={self.activation_checkpointing}")
        if self.compile:
            parts.append("compile")
        return " ".join(parts)


def load_config(path: Path) -> TrainConfig:
    """Read a `TrainConfig` from a JSON file.

    Raises:
        ConfigError: the file is missing, is not JSON, or breaks the schema; one line for each
            wrong key.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # json.JSONDecodeError, or bytes that are not UTF-8
        raise ConfigError(f"{path} must be JSON: {error}") from error
    return parse_config(data, source=str(path))


def parse_config(data: Any, *, source: str) -> TrainConfig:
    """Validate `data` (parsed JSON) as a `TrainConfig`; `source` names it in errors.

    Raises:
        ConfigError: one line for each wrong key, with the value met and the rule.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold a JSON object, but got {type(data).__name__}")
    try:
        return TrainConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(source, item) for item in error.errors())) from error


def _explain(source: str, item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        valid = ", ".join(TrainConfig.model_fields)
        return f"{source}: unknown key {key!r}; the keys are {valid}"
    rule = item["msg"][0].lower() + item["msg"][1:]
    return f"{source}: {key}: {rule}, but got {item['input']!r}"


def save_config(config: TrainConfig, path: Path) -> None:
    """Write `config` as indented JSON with every key, defaults included."""
    path.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")


def config_schema() -> dict[str, Any]:
    """The JSON Schema of `TrainConfig`."""
    return TrainConfig.model_json_schema()
