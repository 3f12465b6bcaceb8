"""What a model is sharded, checkpointed and compiled by: its blocks, found in the module tree.

Nothing here touches a process group; `runtime.data_parallel` applies what is decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from runtime.errors import UnsupportedModelError
from runtime.precision import batch_norms

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_SIZE_GROUPS = 8
"""Groups by size hold at most 1 / `_SIZE_GROUPS` of the parameters, where modules can be split."""
_NEGLIGIBLE = 0.02
"""A module with less than this share of the parameters stays in the root's group."""


def find_blocks(
    model: nn.Module, block_classes: tuple[type[nn.Module], ...] | None = None
) -> list[nn.Module]:
    """The modules that are sharded, checkpointed and compiled one by one, in tree order.

    They are, first that exists: the instances of `block_classes`; the repeated blocks (siblings
    of one class in a `ModuleList`, `ModuleDict` or `Sequential`); the model's parts, grouped by
    size. None lies inside another, and each holds parameters. Empty where the model is one piece.

    Raises:
        UnsupportedModelError: the model holds no module of `block_classes`.
    """
    if block_classes is not None:
        blocks = _outermost(model, lambda module: isinstance(module, block_classes))
        if not blocks:
            names = ", ".join(item.__name__ for item in block_classes)
            raise UnsupportedModelError(
                "block_classes must name classes of modules in the model, "
                f"but {type(model).__name__} holds no {names}"
            )
        return blocks
    return _repeated_blocks(model) or _parts_by_size(model)


def separable(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The `blocks` that share no parameter with a module outside of them.

    A shared (tied) parameter must lie in one group, so a block that shares one stays in the
    root's group.
    """
    blocks = list(blocks)
    home: dict[int, nn.Module] = {}
    inside: set[int] = set()
    shared: set[nn.Module] = set()
    for block in blocks:
        for parameter in block.parameters():
            other = home.setdefault(id(parameter), block)
            if other is not block:
                shared |= {other, block}
        inside.update(id(module) for module in block.modules())
    for module in model.modules():
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                if id(parameter) in home:
                    shared.add(home[id(parameter)])
    return [block for block in blocks if block not in shared]


def replicated_parameters(
    model: nn.Module, groups: Iterable[nn.Module], *, lowered: bool
) -> set[nn.Parameter]:
    """Parameters that cannot be shards: each rank holds them whole and reduces their gradients.

    They are 0-dim parameters (`fully_shard` refuses them); trainable parameters whose dtype is
    not their group's most common one (a group reduces one dtype); and, where the groups are
    `lowered`, the parameters of batch norms (which keep fp32 statistics).
    """
    whole = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    if lowered:
        for module in batch_norms(model):
            whole.update(module.parameters(recurse=False))
    for group in _parameters_by_group(model, groups):
        trainable = [item for item in group if item.requires_grad and item not in whole]
        sizes: Counter[object] = Counter()
        for parameter in trainable:
            sizes[parameter.dtype] += parameter.numel()
        if len(sizes) > 1:
            common = sizes.most_common(1)[0][0]
            whole.update(item for item in trainable if item.dtype != common)
    return whole


def module_names(model: nn.Module, modules: Iterable[nn.Module]) -> list[str]:
    """The names of `modules` in `model`."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in modules]


def _parameters_by_group(
    model: nn.Module, groups: Iterable[nn.Module]
) -> Iterator[list[nn.Parameter]]:
    grouped: set[int] = set()
    for group in groups:
        parameters = list(group.parameters())
        grouped.update(id(parameter) for parameter in parameters)
        yield parameters
    yield [parameter for parameter in model.parameters() if id(parameter) not in grouped]


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    composite, leaves = _repeated_classes(model)
    total = _size(model)
    blocks = _outermost(model, lambda module: type(module) in composite)
    if blocks:
        sizes: Counter[type] = Counter()
        for block in blocks:
            sizes[type(block)] += _size(block)
        largest = max(sizes.values())
        # A repeated stem or adapter beside the real blocks only adds collectives.
        blocks = [block for block in blocks if sizes[type(block)] >= largest / 10]
        return [inner for block in blocks for inner in _split_stage(block, total)]
    blocks = _outermost(model, lambda module: type(module) in leaves)
    return blocks if sum(map(_size, blocks)) >= total / 2 else []


def _split_stage(block: nn.Module, total: int) -> list[nn.Module]:
    """`block`, or the blocks repeated within it where it holds most of the model (Swin stages)."""
    if _size(block) <= total / 2:
        return [block]
    composite, _ = _repeated_classes(block)
    inner = _outermost(block, lambda module: type(module) in composite)
    return inner if len(inner) > 1 else [block]


def _repeated_classes(model: nn.Module) -> tuple[set[type], set[type]]:
    """Classes repeated as siblings: those built of modules, and those that are leaves."""
    composite: set[type] = set()
    leaves: set[type] = set()
    for container in model.modules():
        if not isinstance(container, _CONTAINERS):
            continue
        # Not `children()`, which names a block that is registered again only once.
        children = [
            child for child in container._modules.values() if child is not None and _size(child)
        ]
        for cls, count in Counter(map(type, children)).items():
            if issubclass(cls, _CONTAINERS):
                continue
            built = any(type(child) is cls and _has_parts(child) for child in children)
            # One block in a ModuleList is a repeated block with a depth of one.
            if built and (count > 1 or isinstance(container, nn.ModuleList)):
                composite.add(cls)
            elif not built and count > 1:
                leaves.add(cls)
    return composite, leaves


def _parts_by_size(model: nn.Module) -> list[nn.Module]:
    total = _size(model)
    parts: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            size = _size(child)
            if size < total * _NEGLIGIBLE:
                continue
            callable_part = type(child).forward is not nn.Module.forward
            # torch's own modules may read their children's parameters without calling them.
            own = type(child).__module__.startswith("torch.nn") and not isinstance(
                child, _CONTAINERS
            )
            splittable = _has_parts(child) and not own
            if callable_part and (size <= total / _SIZE_GROUPS or not splittable):
                if all(child is not part for part in parts):
                    parts.append(child)
            else:
                visit(child)

    if total:
        visit(model)
    return parts


def _outermost(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if wanted(child) and _size(child):
                found.setdefault(id(child), child)
            else:
                visit(child)

    visit(model)
    inner = {
        id(module) for block in found.values() for module in block.modules() if module is not block
    }
    return [block for key, block in found.items() if key not in inner]


def _has_parts(module: nn.Module) -> bool:
    return any(_size(child) for child in module.children())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
