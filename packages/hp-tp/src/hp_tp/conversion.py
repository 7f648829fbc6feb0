"""Between the two ways of saying how a model is laid out: plans of styles, and declarations.

A style says what to do with a kind of module, a declaration what its state, inputs and outputs are. Where one says what the
other can, it is turned into it: a declaration that describes a column- or row-parallel layer becomes that style, which
computes on local tensors, and any other becomes a style that carries it out. The other way round each style is written down
with all that it implies.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias, cast

from hp_dtensor import Partial, Placement, Replicate, Shard
from torch import nn

from hp_tp.declared import DeclaredParallel
from hp_tp.errors import PlanError
from hp_tp.norm import SequenceParallel
from hp_tp.plan import ParallelPlan, match_plan
from hp_tp.prepare import (
    NoParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from hp_tp.sharding import (
    LayoutLike,
    LocalMapConfig,
    ShardingConfig,
    SpmdType,
    as_layout,
    is_layout,
)
from hp_tp.style import ParallelStyle
from hp_tp.substitution import original_class
from hp_tp.tensor_parallel import ColwiseParallel, RowwiseParallel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor.parallel import ParallelStyle as TorchStyle

__all__ = ["configs_of_plan", "plan_of_configs", "style_of_config"]

ConfigPlan: TypeAlias = Mapping[str, ShardingConfig]
_R, _LAST = Replicate(), Shard(-1)


def plan_of_configs(
    model: nn.Module, configs: ConfigPlan, *, axis: str = "tp"
) -> dict[str, ParallelStyle]:
    """Return the plan that does what *configs* declare about *axis*.

    Args:
        model: the model, whose kinds of modules decide between styles.
        configs: paths, as in a plan, with a declaration each.
        axis: the axis that the plan will be applied on.

    Raises:
        UnmatchedKeyError: for paths that match nothing.

    Example:
        >>> from hp_dtensor import Shard
        >>> from hp_tp import ShardingConfig, plan_of_configs
        >>> from torch import nn
        >>> cut = ShardingConfig(
        ...     state_shardings={"weight": {"tp": Shard(0)}, "bias": {"tp": Shard(0)}}
        ... )
        >>> plan_of_configs(nn.Sequential(nn.Linear(4, 4)), {"0": cut})
        {'0': ColwiseParallel(input_layouts=None, output_layouts=None, use_local_output=False, blocks=1, fused=None)}
    """
    plan: dict[str, ParallelStyle] = {
        path: DeclaredParallel(config=config, axis=axis) for path, config in configs.items()
    }
    kinds: dict[str, set[type[nn.Module]]] = {}
    for match in match_plan(model, plan):
        kinds.setdefault(match.key, set()).add(original_class(match.module))
    for path, config in configs.items():
        if len(kinds.get(path, ())) == 1:
            (kind,) = kinds[path]
            plan[path] = style_of_config(kind, config, axis)
    return plan


def style_of_config(kind: type[nn.Module], config: ShardingConfig, axis: str) -> ParallelStyle:
    """Return the style that does what *config* declares about *axis*, for a module of class *kind*."""
    fallback = DeclaredParallel(config=config, axis=axis)
    if kind not in (nn.Linear, nn.Embedding) or config.local_map is not None:
        return fallback
    weight = _of(config.state_shardings.get("weight"), axis)
    source = _of((config.in_src_shardings or {}).get("input"), axis)
    wanted = _of((config.in_dst_shardings or {}).get("input"), axis)
    given, handed = (
        _of(cast("LayoutLike", out) if is_layout(out) else None, axis)
        for out in (config.out_src_shardings, config.out_dst_shardings)
    )
    by_rows = weight == (Shard(1) if kind is nn.Linear else Shard(0))
    if not by_rows and weight != (Shard(0) if kind is nn.Linear else Shard(1)):
        return fallback
    natural: Placement = Partial() if by_rows else _LAST
    takes = _LAST if by_rows and kind is nn.Linear else _R
    bias = _of(config.state_shardings.get("bias"), axis)
    known = (
        wanted in (None, takes)
        and given in (None, natural)
        and bias in (None, _R if by_rows else Shard(0))
        and all(name == "input" for name in (config.in_src_shardings or {}))
    )
    if not known:
        return fallback
    if by_rows:
        return RowwiseParallel(
            input_layouts=source,
            output_layouts=handed or natural,
            use_local_output=config.use_local_output,
        )
    return ColwiseParallel(
        input_layouts=source, output_layouts=handed, use_local_output=config.use_local_output
    )


def _of(layout: LayoutLike | None, axis: str) -> Placement | None:
    """What a layout says about *axis*, as a placement."""
    if layout is None:
        return None
    layout = as_layout(layout)
    spec = layout.partition_spec
    if (
        spec
        and spec[-1] is not None
        and axis in (spec[-1] if isinstance(spec[-1], tuple) else (spec[-1],))
    ):
        return _LAST
    kind = layout.per_axis_spmd_types().get(axis)
    if isinstance(kind, SpmdType):
        return Partial() if kind is SpmdType.P else None if kind is SpmdType.V else _R
    return kind


def configs_of_plan(
    model: nn.Module, plan: TorchStyle | ParallelPlan, *, axis: str = "tp"
) -> dict[str, ShardingConfig]:
    """Return a declaration for each module that *plan* gives a style, by its full name.

    Args:
        model: the model; the names of a forward's inputs and of a module's state are its.
        plan: as for :func:`parallelize_module`.
        axis: what the declarations call the axis.

    Raises:
        UnmatchedKeyError: for keys that match nothing.
        PlanError: for a style that says more than a declaration can, or two for one module.

    Example:
        >>> from hp_tp import ColwiseParallel, configs_of_plan
        >>> from torch import nn
        >>> configs = configs_of_plan(nn.Sequential(nn.Linear(4, 4)), {"0": ColwiseParallel()})
        >>> configs["0"].state_shardings
        {'weight': {'tp': Shard(dim=0)}, 'bias': {'tp': Shard(dim=0)}}
    """
    configs: dict[str, ShardingConfig] = {}
    for match in match_plan(model, plan):
        if match.path in configs:
            message = f"{match.path!r} has two styles in the plan; a module has one declaration"
            raise PlanError(message)
        configs[match.path] = _config_of(match.module, match.style, axis)
    return configs


def _config_of(module: nn.Module, style: TorchStyle, axis: str) -> ShardingConfig:
    if isinstance(style, DeclaredParallel):
        return style.config
    if isinstance(style, (ColwiseParallel, RowwiseParallel)) and isinstance(
        module, (nn.Linear, nn.Embedding)
    ):
        return _layer(module, style, axis)
    if isinstance(style, SequenceParallel):
        cut = {axis: Shard(style.sequence_dim)}
        first = _names(module)[0]
        return ShardingConfig(
            state_shardings=_replicas(module, axis),
            in_src_shardings={first: {axis: style.input_layouts or cut[axis]}},
            in_dst_shardings={first: cut},
            use_local_output=bool(style.use_local_output),
        )
    if isinstance(style, NoParallel):
        first = _names(module)[0]
        return ShardingConfig(
            state_shardings=_replicas(module, axis),
            in_src_shardings={first: {axis: style.input_layout or _R}},
            in_dst_shardings={first: {axis: style.desired_input_layout or _R}},
            out_dst_shardings={axis: style.output_layout or _R},
            use_local_output=style.use_local_output,
        )
    if isinstance(style, (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)):
        return _boundary(module, style, axis)
    message = (
        f"{type(style).__name__} on {type(module).__name__} has no declaration that says the same; give the module a "
        "ShardingConfig of its own"
    )
    raise PlanError(message)


def _layer(
    module: nn.Linear | nn.Embedding, style: ColwiseParallel | RowwiseParallel, axis: str
) -> ShardingConfig:
    linear, rows = isinstance(module, nn.Linear), isinstance(style, RowwiseParallel)
    if isinstance(style, ColwiseParallel) and style.blocks != 1:
        message = (
            f"blocks={style.blocks} of a column-parallel layer cannot be declared; keep the style"
        )
        raise PlanError(message)
    states: dict[str, LayoutLike] = {"weight": {axis: Shard(int(linear == rows))}}
    if linear and module.bias is not None:
        states["bias"] = {axis: _R if rows else Shard(0)}
    takes = _LAST if linear and rows else _R
    natural: Placement = Partial() if rows else _LAST
    return ShardingConfig(
        state_shardings=states,
        in_src_shardings={"input": {axis: style.input_layouts or takes}},
        in_dst_shardings={"input": {axis: takes}},
        # The rows that a rank looked up are addends of a kind of their own.
        out_src_shardings=None if rows and not linear else {axis: natural},
        out_dst_shardings={axis: style.output_layouts or (_R if rows else natural)},
        use_local_output=style.use_local_output,
    )


def _boundary(
    module: nn.Module,
    style: PrepareModuleInput | PrepareModuleOutput | PrepareModuleInputOutput,
    axis: str,
) -> ShardingConfig:
    sources: dict[str, LayoutLike | None] = {}
    targets: dict[str, LayoutLike | None] = {}
    local_input = False
    out: tuple[object, object] = (None, None)
    if not isinstance(style, PrepareModuleOutput):
        local_input = (
            style.use_local_output
            if isinstance(style, PrepareModuleInput)
            else style.use_local_input
        )
        names = _names(module)
        pairs = zip(
            _several(style.input_layouts), _several(style.desired_input_layouts), strict=True
        )
        given = dict(zip(names, pairs, strict=False))
        for name, label in (style.input_kwarg_layouts or {}).items():
            given[name] = (label, (style.desired_input_kwarg_layouts or {})[name])
        for name, (source, target) in given.items():
            if source is not None:
                sources[name] = {axis: source}
                targets[name] = {axis: target or source}
    if not isinstance(style, PrepareModuleInput):
        out = (
            _outputs(style.output_layouts, axis),
            _outputs(style.desired_output_layouts, axis),
        )
    local_output = not isinstance(style, PrepareModuleInput) and style.use_local_output
    return ShardingConfig(
        state_shardings=_own_replicas(module, axis),
        in_src_shardings=sources or None,
        in_dst_shardings=targets or None,
        out_src_shardings=out[0],
        out_dst_shardings=out[1],
        local_map=LocalMapConfig(in_grad_placements=targets) if local_input else None,
        use_local_output=local_output,
    )


def _several(layouts: object) -> Sequence[Placement | None]:
    if layouts is None:
        return ()
    return (
        (layouts,)
        if isinstance(layouts, Placement)
        else cast("Sequence[Placement | None]", layouts)
    )


def _outputs(layouts: object, axis: str) -> object:
    if isinstance(layouts, Placement):
        return {axis: layouts}
    entries = tuple(None if one is None else {axis: one} for one in _several(layouts))
    return entries[0] if len(entries) == 1 else entries


def _names(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _replicas(module: nn.Module, axis: str) -> dict[str, LayoutLike]:
    return {name: {axis: _R} for name, _ in (*module.named_parameters(), *module.named_buffers())}


def _own_replicas(module: nn.Module, axis: str) -> dict[str, LayoutLike]:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return {name: {axis: _R} for name, _ in own}
