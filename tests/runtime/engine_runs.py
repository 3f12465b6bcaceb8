"""What engine tests run in the ranks, and the plain single-process loop they are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from runtime.config import TrainConfig
from runtime.data_parallel import Agreement
from runtime.engine import Engine, create_engine
from runtime.errors import UnsupportedModelError
from runtime.model_spec import Batch, ModelSpec, split_batch
from runtime.model_state import BufferWatch, broadcast_state, named_state
from runtime.optim import check_optimizer, clip_gradients
from tests.runtime.models import SPECS, Gpt, cross_entropy, make_spec, tokens
from tests.runtime.optimizers import OPTIMIZERS

CPU = torch.device("cpu")


def global_batch(spec: ModelSpec, size: int, step: int) -> Batch:
    """The samples of one optimizer step, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(1000 + step)
        return spec.make_batch(size)


def micro_batches(spec: ModelSpec, config: TrainConfig, step: int, rank: int) -> list[Batch]:
    size = config.global_batch_size
    parts = split_batch(global_batch(spec, size, step), size, size // config.micro_batch_size)
    steps = config.gradient_accumulation_steps
    return parts[rank * steps : (rank + 1) * steps]


def plain_loop(name: str, config: TrainConfig, steps: int) -> dict[str, Any]:
    """Plain PyTorch in fp32, one process, over the same micro-batches."""
    torch.set_num_threads(1)  # more only wait for each other on models this small
    spec = SPECS[name]()
    torch.manual_seed(0)
    model = spec.build_model()
    optimizer = spec.build_optimizer(model)
    size = config.global_batch_size
    count = size // config.micro_batch_size
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        parts = split_batch(global_batch(spec, size, step), size, count)
        total = 0.0
        for part in parts:
            loss = spec.compute_loss(model, part) / count
            loss.backward()
            total += loss.item()
        trainable = [item for item in model.parameters() if item.requires_grad]
        if config.gradient_clipping is not None:
            norm = nn.utils.clip_grad_norm_(trainable, config.gradient_clipping)
            norms.append(norm.item())
        optimizer.step()
        losses.append(total)
    return {"losses": losses, "norms": norms, "parameters": whole_parameters(model)}


def settings(**changes: Any) -> dict[str, Any]:
    """The JSON of a `TrainConfig`: two ranks, two micro-batches of two, unless changed."""
    base = {"ranks": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
    return {**base, **changes}


def assert_same(ours: dict[str, Any], plain: dict[str, Any], rtol: float = 1e-5) -> None:
    """Losses, norms and final parameters agree."""
    np.testing.assert_allclose(ours["losses"], plain["losses"], rtol=rtol)
    if plain["norms"] and ours["norms"]:
        np.testing.assert_allclose(ours["norms"], plain["norms"], rtol=rtol * 10)
    for name, value in plain["parameters"].items():
        np.testing.assert_allclose(
            ours["parameters"][name], value, rtol=rtol * 10, atol=rtol * 10, err_msg=name
        )


def train(name: str, config: dict[str, Any], steps: int, device: str = "cpu") -> dict[str, Any]:
    """Train in this rank, for its rank's share of each global batch."""
    torch.set_num_threads(1)
    torch.manual_seed(77)  # create_engine must not depend on where the generator stands
    spec = SPECS[name]()
    train_config = TrainConfig(**config)
    rank = dist.get_rank() if dist.is_initialized() else 0
    engine = create_engine(spec, train_config, torch.device(device))
    losses, norms, skipped = [], [], 0
    for step in range(steps):
        result = engine.train_step(micro_batches(spec, train_config, step, rank))
        loss = result.loss.clone()
        if train_config.ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / train_config.ranks)
        norms.append(None if result.gradient_norm is None else result.gradient_norm.item())
        skipped += result.skipped
    output = {
        "losses": losses,
        "norms": norms,
        "skipped": skipped,
        "parameters": whole_parameters(engine.model),
        "buffers": {key: value.tolist() for key, value in engine.model.named_buffers()},
        "held": engine.held_bytes(),
        "groups": group_names(engine),
    }
    engine.close()
    return output


def group_names(engine: Engine) -> list[str]:
    return [
        name
        for name, module in engine.model.named_modules()
        if type(module).__name__.startswith("FSDP")
    ]


def whole_parameters(model: nn.Module) -> dict[str, Any]:
    return {
        name: whole(item).detach().float().clone().numpy()
        for name, item in model.named_parameters()
    }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def random_numbers(config: dict[str, Any]) -> list[float]:
    create_engine(SPECS["gpt"](), TrainConfig(**config), CPU).close()
    return torch.rand(3).tolist()


def build_by_rank(config: dict[str, Any]) -> None:
    spec = make_spec(lambda: Gpt(depth=2 + dist.get_rank()), tokens)
    create_engine(spec, TrainConfig(**config), CPU)


def overflow_on_rank_1(config: dict[str, Any]) -> dict[str, list[Any]]:
    """Three steps; in the second, the loss of one micro-batch on rank 1 is infinite."""
    base = SPECS["scaled"]()
    train_config = TrainConfig(**config)

    def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
        return base.compute_loss(model, batch[:2]) * batch[2][0]

    def make_batch(size: int) -> Batch:
        return (*base.make_batch(size), torch.ones(size))

    spec = make_spec(base.build_model, make_batch, compute_loss)
    engine = create_engine(spec, train_config, CPU)
    output: dict[str, list[Any]] = {"skipped": [], "moved": [], "scales": [], "norms": []}
    for step in range(3):
        batches = micro_batches(spec, train_config, step, dist.get_rank())
        if step == 1 and dist.get_rank() == 1:
            batches[0][2][:] = torch.inf
        before = whole_parameters(engine.model)
        result = engine.train_step(batches)
        after = whole_parameters(engine.model)
        output["skipped"].append(result.skipped)
        output["moved"].append(any((before[name] != after[name]).any() for name in before))
        output["scales"].append(engine.scaler.get_scale())
        output["norms"].append(result.gradient_norm)
    return output


def refuse_skipping_blocks(config: dict[str, Any], skip: int) -> None:
    """Blocks that the probe's forward calls, and of which rank 1 skips one in its second step."""
    base = SPECS["gpt"]()

    def compute_loss(model: Gpt, batch: Batch) -> Tensor:
        kept = [block for index, block in enumerate(model.blocks) if index != model.skip]
        x = model.embed(batch[0]) + model.table
        for block in kept:
            x = block(x)
        return cross_entropy(model.head(model.norm(x)), batch[1])

    def build_model() -> nn.Module:
        model = base.build_model()
        model.skip = -1
        return model

    spec = make_spec(build_model, base.make_batch, compute_loss)
    train_config = TrainConfig(**config)
    engine = create_engine(spec, train_config, CPU)
    engine.train_step(micro_batches(spec, train_config, 0, dist.get_rank()))
    engine.model.skip = skip if dist.get_rank() == 1 else -1
    engine.train_step(micro_batches(spec, train_config, 1, dist.get_rank()))


def probe_by_data(config: dict[str, Any], names: list[str]) -> dict[str, list[str]]:
    """The names of the groups of each spec."""
    groups = {}
    for name in names:
        engine = create_engine(SPECS[name](), TrainConfig(**config), CPU)
        groups[name] = group_names(engine)
        engine.close()
    return groups


def clip_mixed(max_norm: float) -> dict[str, Any]:
    """Our clipping of uneven shards and whole tensors, and torch's of the same tensors whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (1, 2), (5,), (4, 4), ())]
    mixed: list[nn.Parameter] = []
    for index, parameter in enumerate(plain):
        parameter.grad = torch.randn_like(parameter)
        value, gradient = parameter.detach().clone(), parameter.grad.clone()
        if index < 3:
            value = distribute_tensor(value, mesh, [Shard(0)])
            gradient = distribute_tensor(gradient, mesh, [Shard(0)])
        mixed.append(nn.Parameter(value))
        mixed[-1].grad = gradient
    plain.append(nn.Parameter(torch.zeros(2)))
    mixed.append(nn.Parameter(torch.zeros(2)))  # without a gradient
    ours = clip_gradients(mixed, max_norm)
    theirs = nn.utils.clip_grad_norm_(plain, max_norm)
    return {
        "norms": (ours.item(), theirs.item()),
        "gradients": [
            (whole(a.grad).tolist(), b.grad.tolist())
            for a, b in zip(mixed[:5], plain[:5], strict=True)
        ],
    }


def check_optimizers(names: list[str]) -> dict[str, str]:
    """The refusal of each optimizer of `tests.runtime.optimizers` on shards; empty if none."""
    return {name: refusal(OPTIMIZERS[name], sharded=True) for name in names}


def refusal(build: Any, *, sharded: bool) -> str:
    spec = make_spec(SPECS["gpt"]().build_model, tokens, build_optimizer=build)
    try:
        check_optimizer(spec, spec.build_model(), sharded=sharded)
    except UnsupportedModelError as error:
        return str(error)
    return ""


def train_with(optimizer: str, config: dict[str, Any], steps: int) -> list[float]:
    base = SPECS["scaled"]()
    spec = make_spec(base.build_model, base.make_batch, build_optimizer=OPTIMIZERS[optimizer])
    train_config = TrainConfig(**config)
    engine = create_engine(spec, train_config, CPU)
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for step in range(steps):
        batches = micro_batches(spec, train_config, step, rank)
        loss = engine.train_step(batches).loss.clone()
        if train_config.ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss.item() / train_config.ranks)
    return losses


def broadcast_buffers() -> dict[str, Any]:
    """A model whose ranks differ everywhere, after `broadcast_state` and a watched change."""
    rank = dist.get_rank()
    model = nn.Linear(2, 2)
    model.register_buffer("flag", torch.tensor(rank == 0))
    model.register_buffer("table", torch.full((2, 3), rank, dtype=torch.bfloat16), persistent=False)
    model.register_buffer("strided", torch.full((3, 2), rank).T)
    model.register_buffer("expanded", torch.tensor([float(rank)]).expand(3), persistent=False)
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("phase", torch.full((1,), 1j * rank))
    torch.manual_seed(rank)
    nn.init.normal_(model.weight)
    broadcast_state(model)
    state = {name: item.tolist() for name, item in named_state(model)}

    agreement = Agreement(2, BufferWatch(model))
    flags = [agreement.reach(bytearray([rank, 0]))]
    if rank == 1:
        model.table += 5  # only rank 1's changes: it is taken back
    flags.append(agreement.reach(bytearray([0, 0])))
    return {"state": state, "flags": flags, "table": model.table.tolist()}
