"""The degrees of parallelism of a training job, and the mesh that they make.

The idea: a job has degrees (data, context, tensor, pipeline, expert). Each axis name means one way to
walk the ranks, whatever view it is asked in, so all names are axes over one root mesh, and any set of
names that do not overlap is a mesh. Views (``dense``, ``sparse``, ``dataloading``) are then no more than
named lists of axes; a table that users extend.

The rule of expert parallelism is TorchTitan's: ``ep`` is no factor of the world, it borrows ranks from
``dp_shard * cp * tp``. (HyperParallel has it as a factor; there is one meaning here.)
Ranks are numbered with ``pp`` outermost and ``tp`` innermost, so that the axis that talks most has
neighbours.

Not taken: one mesh per view (TorchTitan's), which makes the groups of equal axes again and again, and in
which a name's meaning depends on the view found first.
"""

# ruff: noqa: SLF001 - meshes are made from axes, which is no business of users

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

import torch
import torch.distributed as dist

from . import axes
from .axes import Axis
from .errors import ParallelDimsError
from .mesh import DeviceMesh, init_device_mesh

if TYPE_CHECKING:
    from .arguments import BackendChoice

__all__ = ["ParallelDims", "SeqLenDivisor", "unflatten_mesh"]

Names: TypeAlias = str | Sequence[str]

_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
"""The degrees whose product is the world."""

VIEWS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dataloading": ("pp", "batch", "cp", "tp"),
        "dense": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
        "dense_fsdp": ("pp", "dp_replicate", "fsdp", "tp"),
        "spmd": ("pp", "dp", "cp", "tp"),
        "sparse": ("pp", "dp_replicate", "efsdp", "ep", "etp"),
    }
)
"""The views that every `ParallelDims` has, outermost axis first."""

_ALWAYS = frozenset({"fsdp", "dp_shard"})
"""Axes that exist at size 1 too: `fully_shard` at degree 1 still sets up mixed precision."""

_CONFIG_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dp_replicate": ("dp_replicate", "data_parallel_replicate_degree"),
        "dp_shard": ("dp_shard", "data_parallel_shard_degree", "dp"),
        "cp": ("cp", "context_parallel_degree"),
        "tp": ("tp", "tensor_parallel_degree"),
        "pp": ("pp", "pipeline_parallel_degree"),
        "ep": ("ep", "expert_parallel_degree"),
        "etp": ("etp", "expert_tensor_parallel_degree"),
        "ulysses_degree": ("ulysses_degree",),
    }
)
"""Where `ParallelDims.from_config` looks for each degree."""


class SeqLenDivisor(int):
    """What a sequence length must be divisible by: a number, and a function for the exact case.

    As a number it is TorchTitan's, the safe one, ``tp * 2 * cp``. Called, it says what the given
    features need: sequence parallelism cuts by ``tp``, a head-tail balancer by ``2 * cp``.

    Example:
        >>> from hp_mesh import ParallelDims
        >>> dims = ParallelDims(cp=2, tp=4, dp_shard=1, world_size=8)
        >>> (
        ...     dims.seq_len_divisor == 16,
        ...     dims.seq_len_divisor(sequence_parallel=False, cp_balancer=True),
        ... )
        (True, 4)
    """

    _cp: int
    _tp: int

    def __new__(cls, *, cp: int, tp: int) -> Self:
        """Make the number."""
        self = super().__new__(cls, tp * 2 * cp)
        self._cp = cp
        self._tp = tp
        return self

    def __call__(self, *, sequence_parallel: bool, cp_balancer: bool) -> int:
        """Return what the sequence length must be divisible by.

        Args:
            sequence_parallel: whether activations are sharded by sequence over ``tp``.
            cp_balancer: whether context parallelism gives each rank a head and a tail chunk.
        """
        by_cp = self._cp * (2 if cp_balancer and self._cp > 1 else 1)
        return by_cp * (self._tp if sequence_parallel else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """The degrees of a job, checked, and the meshes they make.

    Raises:
        ParallelDimsError: (a `ValueError`) lists every rule the degrees break, each with the nearest
            legal value.

    Example:
        >>> from hp_mesh import ParallelDims
        >>> dims = ParallelDims(dp_replicate=2, tp=2, world_size=8)
        >>> dims.dp_shard, dims.seq_len_divisor
        (2, 4)
        >>> mesh = dims.build_mesh("cpu", init_backend=False)
        >>> mesh
        DeviceMesh((dp_replicate=2, dp_shard=2, tp=2), 'cpu', stride=(4, 2, 1))
        >>> mesh["dp"].shape, dims.get_optional_mesh("cp")
        ((4,), None)
    """

    dp_replicate: int = 1
    """Replicas of the whole model: DDP, or the outer degree of HSDP."""
    dp_shard: int = -1
    """Ranks that parameters are sharded over; -1 for what the other degrees leave of the world."""
    cp: int = 1
    """Context parallel: ranks that a sequence is split over."""
    tp: int = 1
    """Tensor parallel."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert parallel; borrowed from ``dp_shard * cp * tp``."""
    etp: int = 1
    """Tensor parallel inside an expert: 1 or ``tp``."""
    ulysses_degree: int | None = None
    """Part of ``cp`` that exchanges heads and not blocks: gives the axes ``ring`` and ``ulysses``."""
    world_size: int = 1
    """Ranks of the job."""
    views: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Further views: name to axes, outermost first; see `with_view`."""
    extra_axes: Mapping[str, Axis] = field(default_factory=dict, hash=False)
    """Further axes, made by `with_view`."""
    _built: dict[str, object] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Infer dp_shard and check all rules."""
        if self.dp_shard == -1:
            rest = self.dp_replicate * self.cp * self.tp * self.pp
            if rest > 0 and self.world_size % rest == 0:
                object.__setattr__(self, "dp_shard", max(self.world_size // rest, 1))
        violations = list(_violations(self))
        if violations:
            shown = "\n".join(f"  - {violation}" for violation in violations)
            message = f"These parallel degrees do not fit:\n{shown}"
            raise ParallelDimsError(message, violations=violations)

    @classmethod
    def from_config(cls, config: object, world_size: int) -> ParallelDims:
        """Return the degrees of a configuration.

        Args:
            config: a mapping or an object with attributes: TorchTitan's
                (``data_parallel_shard_degree``, ...), or ours (``dp_shard``, ...; the older ``dp`` is
                read as dp_shard). What is missing keeps its default.
            world_size: ranks of the job.

        Example:
            >>> from hp_mesh import ParallelDims
            >>> ParallelDims.from_config({"tensor_parallel_degree": 2}, world_size=4).dp_shard
            2
        """
        degrees: dict[str, int] = {}
        for degree, keys in _CONFIG_KEYS.items():
            for key in keys:
                value = (
                    config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
                )
                if value is not None:
                    degrees[degree] = int(value)
                    break
        ulysses = degrees.pop("ulysses_degree", None)
        return cls(**degrees, ulysses_degree=ulysses, world_size=world_size)  # type: ignore[arg-type]  # ints only

    # Degrees.

    @property
    def degrees(self) -> Mapping[str, int]:
        """The size of every axis, by name."""
        return MappingProxyType({name: axis.size for name, axis in self._axes().items()})

    @property
    def dp_size(self) -> int:
        """Ranks that see different data: ``dp_replicate * dp_shard``."""
        return self.dp_replicate * self.dp_shard

    @property
    def non_dp_size(self) -> int:
        """Ranks that work on the same data: ``cp * tp * pp``."""
        return self.cp * self.tp * self.pp

    @property
    def non_data_parallel_size(self) -> int:
        """`non_dp_size` in TorchTitan's spelling."""
        return self.non_dp_size

    @property
    def dp_enabled(self) -> bool:
        """Whether there is data parallelism of any kind."""
        return self.dp_size > 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether the model is replicated."""
        return self.dp_replicate > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded by data parallelism."""
        return self.dp_shard > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split."""
        return self.cp > 1

    @property
    def dp_cp_enabled(self) -> bool:
        """Whether the loss is a mean over several ranks' tokens."""
        return self.dp_enabled or self.cp_enabled

    @property
    def fsdp_enabled(self) -> bool:
        """Whether parameters are sharded over several ranks by FSDP."""
        return self.dp_shard_enabled or self.cp_enabled

    @property
    def tp_enabled(self) -> bool:
        """Whether there is tensor parallelism."""
        return self.tp > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether there are several pipeline stages."""
        return self.pp > 1

    @property
    def ep_enabled(self) -> bool:
        """Whether experts are spread over ranks."""
        return self.ep > 1

    @property
    def etp_enabled(self) -> bool:
        """Whether experts are split."""
        return self.etp > 1

    @property
    def seq_len_divisor(self) -> SeqLenDivisor:
        """What a sequence length must be divisible by; call it for the exact case."""
        return SeqLenDivisor(cp=self.cp, tp=self.tp)

    # Meshes.

    def build_mesh(
        self,
        device_type: str | None = None,
        *,
        init_backend: bool = True,
        backend_override: Mapping[int | str, BackendChoice] | None = None,
    ) -> DeviceMesh:
        """Return the root mesh: the axes of the dense view that are larger than 1, pp outermost.

        It knows the other axes by name too: ``mesh["fsdp"]``, ``mesh["dp"]``, ``mesh["loss"]``. Making
        it makes no process group; equal degrees give the same mesh.

        Args:
            device_type: the kind of device; by default the accelerator, or the host if there is none.
            init_backend: False for a mesh without process groups, which needs no `torch.distributed`.
            backend_override: as in `init_device_mesh`.

        Raises:
            ParallelDimsError: (a `ValueError`) if the world that runs has another size.
        """
        device_type = device_type or self._device_type()
        names = [name for name in _DENSE if self.degrees[name] > 1] or ["dp_shard"]
        if init_backend and dist.is_initialized() and dist.get_world_size() != self.world_size:
            violation = f"world_size={self.world_size}, but torch.distributed runs {dist.get_world_size()} ranks"
            raise ParallelDimsError(
                f"These parallel degrees do not fit: {violation}.", violations=[violation]
            )
        mesh = init_device_mesh(
            device_type,
            tuple(self.degrees[name] for name in names),
            mesh_dim_names=tuple(names),
            rank_list=range(self.world_size),
            init_backend=init_backend,
            backend_override=backend_override,
        )
        self._built.update(
            device_type=device_type, init_backend=init_backend, backend_override=backend_override
        )
        for name, axis in self._axes().items():
            if name not in names and self._exists(name, axis):
                mesh._name_axis(name, axis)
        return mesh

    @property
    def world_mesh(self) -> DeviceMesh:
        """The root mesh; built on first use."""
        known = self._built
        override = known.get("backend_override")
        return self.build_mesh(
            init_backend=bool(known.get("init_backend", True)),
            backend_override=override if isinstance(override, Mapping) else None,
        )

    def get_optional_mesh(
        self, dims: Names, *, include_singleton_axes: bool = False
    ) -> DeviceMesh | None:
        """Return the mesh of the named axes, or None if one of them is disabled.

        Args:
            dims: an axis, several axes outermost first, or a view.
            include_singleton_axes: take disabled axes as axes of size 1.

        Raises:
            ParallelDimsError: (a `ValueError`) for unknown names, axes that overlap, or another order.
        """
        names = self._resolve(dims, singletons="keep" if include_singleton_axes else "none")
        return None if names is None else self._slice(names)

    def get_mesh(self, dims: Names) -> DeviceMesh:
        """Return the mesh of the named axes; of a view, the axes that are enabled.

        Raises:
            ParallelDimsError: (a `ValueError`) for unknown or disabled names, axes that overlap, or
                another order.

        Example:
            >>> from hp_mesh import ParallelDims
            >>> dims = ParallelDims(dp_shard=4, tp=2, ep=4, world_size=8)
            >>> _ = dims.build_mesh("cpu", init_backend=False)
            >>> dims.get_mesh("sparse").mesh_dim_names, dims.get_mesh(["fsdp", "tp"]).shape
            (('efsdp', 'ep'), (4, 2))
        """
        names = self._resolve(dims, singletons="error")
        return self._slice(names or ())

    def get_activated_mesh(self, dims: Names) -> DeviceMesh | None:
        """Return the mesh of those of the named axes that are enabled, or None if none is."""
        names = self._resolve(dims, singletons="drop")
        return self._slice(names) if names else None

    def get_all_one_dimensional_meshes(self) -> dict[str, DeviceMesh]:
        """Return the 1-D mesh of every axis that is larger than 1, by name."""
        return {
            name: self._slice((name,))
            for name, axis in self._axes().items()
            if axis.size > 1 and self._exists(name, axis)
        }

    def with_view(self, name: str, view: Mapping[str, int] | Sequence[str]) -> ParallelDims:
        """Return these degrees with a further view.

        Args:
            name: of the view.
            view: names of axes that exist, outermost first; or new axes with their sizes, whose product
                is the world, for a part of the model with degrees of its own.

        Raises:
            ParallelDimsError: (a `ValueError`) if the sizes do not multiply to the world, or a name
                means another axis already.

        Example:
            >>> from hp_mesh import ParallelDims
            >>> dims = ParallelDims(dp_shard=4, tp=2, world_size=8)
            >>> dims = dims.with_view("vision", {"vision_dp": 8})
            >>> _ = dims.build_mesh("cpu", init_backend=False)
            >>> dims.get_mesh("vision_dp").shape
            (8,)
        """
        known = self._axes()
        violations: list[str] = []
        extra: dict[str, Axis] = {}
        if name in known:
            violations.append(f"{name!r} is the name of an axis; give the view another name")
        if isinstance(view, Mapping):
            sizes = tuple(view.values())
            if math.prod(sizes) != self.world_size or min(sizes, default=0) < 1:
                violations.append(
                    f"the sizes {dict(view)} multiply to {math.prod(sizes)}, not to "
                    f"world_size={self.world_size}"
                )
            else:
                extra = dict(zip(view, axes.row_major(sizes), strict=True))
                violations += [
                    f"axis {key!r} is already {known[key].digits}, not {axis.digits}"
                    for key, axis in extra.items()
                    if key in known and known[key] != axis
                ]
        else:
            violations += [
                f"there is no axis {key!r}; there are {_listed(known)}"
                for key in view
                if key not in known
            ]
        if violations:
            raise ParallelDimsError(
                f"The view {name!r} does not fit: {'; '.join(violations)}.", violations=violations
            )
        return replace(
            self,
            views={**self.views, name: tuple(view)},
            extra_axes={**self.extra_axes, **{k: a for k, a in extra.items() if k not in known}},
        )

    def validate_against_model(self, model: object, seq_len: int | None = None) -> None:
        """Check that a model's sizes can be split by these degrees.

        Args:
            model: a model (with ``config``, ``cfg`` or ``args``) or its configuration. Sizes it does not
                tell are not checked.
            seq_len: of the training samples.

        Raises:
            ParallelDimsError: (a `ValueError`) lists every size that does not divide.

        Example:
            >>> from types import SimpleNamespace
            >>> from hp_mesh import ParallelDims
            >>> dims = ParallelDims(tp=4, world_size=4)
            >>> dims.validate_against_model(SimpleNamespace(num_attention_heads=8), seq_len=64)
        """
        violations = list(_model_violations(self, _configuration(model), seq_len))
        if violations:
            shown = "\n".join(f"  - {violation}" for violation in violations)
            raise ParallelDimsError(
                f"The model does not fit these parallel degrees:\n{shown}", violations=violations
            )

    def summary(self) -> str:
        """Return the degrees and the grid of ranks as text.

        Example:
            >>> from hp_mesh import ParallelDims
            >>> print(ParallelDims(tp=2, world_size=2).summary().splitlines()[0])
            world 2 = pp 1 * dp_replicate 1 * dp_shard 1 * cp 1 * tp 2
        """
        degrees = self.degrees
        lines = [
            f"world {self.world_size} = "
            + " * ".join(f"{name} {degrees[name]}" for name in _DENSE),
            f"experts: efsdp {degrees['efsdp']} * ep {self.ep} * etp {self.etp}",
            (
                f"batch {degrees['batch']}, loss over {degrees['loss']}, fsdp over {degrees['fsdp']}, "
                f"sequence length divisible by {int(self.seq_len_divisor)}"
            ),
            "",
        ]
        names = tuple(name for name in _DENSE if degrees[name] > 1) or ("dp_shard",)
        grid = DeviceMesh(
            "cpu",
            torch.arange(self.world_size, device="cpu").view([degrees[name] for name in names]),
            mesh_dim_names=names,
            _init_backend=False,
            _rank=_rank_or_none(),
        )
        return "\n".join([*lines, grid.draw()])

    # How it is done.

    def _axes(self) -> dict[str, Axis]:
        """Return every axis by name."""
        pp, replicate, shard, cp, tp = axes.row_major(
            (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)
        )
        pool = self.dp_shard * self.cp * self.tp
        experts = (pool // (self.ep * self.etp), self.ep, self.etp)
        *_, efsdp, ep, etp = axes.row_major((self.pp, self.dp_replicate, *experts))
        batch = axes.merge((replicate, shard))
        found = {
            "pp": pp,
            "dp_replicate": replicate,
            "dp_shard": shard,
            "cp": cp,
            "tp": tp,
            "batch": batch,
            "dp": batch,
            "fsdp": axes.merge((shard, cp)),
            "loss": axes.merge((batch, cp)),
            "efsdp": efsdp,
            "ep": ep,
            "etp": etp,
        }
        if self.ulysses_degree is not None:
            ring, ulysses = axes.split(cp, (self.cp // self.ulysses_degree, self.ulysses_degree))
            found.update(ring=ring, ulysses=ulysses)
        return {**found, **self.extra_axes}

    def _exists(self, name: str, axis: Axis) -> bool:
        if name == "efsdp":
            return self.ep > 1 or self.etp > 1
        return axis.size > 1 or name in _ALWAYS

    def _resolve(
        self, dims: Names, *, singletons: Literal["none", "error", "drop", "keep"]
    ) -> tuple[str, ...] | None:
        known = self._axes()
        all_views = {**VIEWS, **self.views}
        names = (dims,) if isinstance(dims, str) else tuple(dims)
        if len(names) == 1 and names[0] in all_views:
            exists = [n for n in all_views[names[0]] if self._exists(n, known[n])]
            return all_views[names[0]] if singletons == "keep" else tuple(exists)
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            asked = f"{unknown[0]!r}" if unknown else "no axis"
            violation = (
                f"There is no mesh axis {asked}; there are {_listed(known)}, and the views "
                f"{_listed(all_views)}."
            )
            raise ParallelDimsError(violation, violations=[violation])
        disabled = [name for name in names if not self._exists(name, known[name])]
        if disabled and singletons == "error":
            violation = (
                f"Mesh {', '.join(map(repr, names))} is not available: {_listed(disabled)} "
                f"{'is' if len(disabled) == 1 else 'are'} disabled (size 1). Set the degree to more than "
                "1, or use get_optional_mesh() or get_activated_mesh()."
            )
            raise ParallelDimsError(violation, violations=[violation])
        if disabled and singletons == "none":
            return None
        if singletons == "drop":
            names = tuple(name for name in names if name not in disabled)
        self._check_together(names, known)
        return names

    @staticmethod
    def _check_together(names: tuple[str, ...], known: Mapping[str, Axis]) -> None:
        picked = [known[name] for name in names]
        if len(set(names)) != len(names) or not axes.disjoint(picked):
            violation = (
                f"The axes {names} overlap: they would give some ranks two coordinates. Axes that share "
                "ranks, such as 'fsdp' and 'cp', cannot be in one mesh."
            )
            raise ParallelDimsError(violation, violations=[violation])
        order = sorted(
            (name for name in names if known[name].size > 1),
            key=lambda name: -known[name].leading_stride,
        )
        if order != [name for name in names if known[name].size > 1]:
            violation = f"The axes {names} must be given outermost first: {tuple(order)}."
            raise ParallelDimsError(violation, violations=[violation])

    def _slice(self, names: tuple[str, ...]) -> DeviceMesh:
        known = self._axes()
        root = self.world_mesh
        return root._derive(
            tuple(known[name] for name in names),
            names,
            tuple(root._config_of(known[name]) for name in names),
        )

    def _device_type(self) -> str:
        known = self._built.get("device_type")
        if isinstance(known, str):
            return known
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type


_DENSE = VIEWS["dense"]


def _violations(dims: ParallelDims) -> list[str]:
    """Return every rule that the degrees break."""
    found: list[str] = []
    for name in (*_DEGREES, "ep", "etp", "world_size"):
        value: object = getattr(dims, name)
        infer = name == "dp_shard" and value == -1
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and not infer):
            also = "-1 (infer) or " if name == "dp_shard" else ""
            found.append(f"{name} must be {also}an int >= 1, got {value!r}")
    shard = dims.dp_shard
    if found:
        return found
    world = dims.world_size
    others = dims.dp_replicate * dims.cp * dims.tp * dims.pp
    product = f"dp_replicate({dims.dp_replicate}) * cp({dims.cp}) * tp({dims.tp}) * pp({dims.pp})"
    if shard == -1:
        found.append(
            f"dp_shard=-1 needs {product} = {others} to divide world_size={world}; "
            f"{_change_one(dims, world)}"
        )
        return found
    if others * shard != world:
        fit = (
            f"dp_shard={world // others} fits" if world % others == 0 else _change_one(dims, world)
        )
        found.append(
            f"{product} * dp_shard({shard}) = {others * shard} must be world_size={world}; {fit}"
        )
    pool = shard * dims.cp * dims.tp
    if dims.etp not in {1, dims.tp}:
        found.append(f"etp must be 1 or tp={dims.tp}, got {dims.etp}")
    elif pool % (dims.ep * dims.etp):
        found.append(
            f"ep({dims.ep}){f' * etp({dims.etp})' if dims.etp > 1 else ''} must divide "
            f"dp_shard * cp * tp = {pool}; nearest ep: {_nearest(dims.ep, pool // math.gcd(pool, dims.etp))}"
        )
    ulysses = dims.ulysses_degree
    if ulysses is not None and (ulysses < 1 or dims.cp % ulysses):
        found.append(
            f"ulysses_degree must divide cp={dims.cp}, got {ulysses}; nearest: "
            f"{_nearest(ulysses, dims.cp)}"
        )
    return found


def _change_one(dims: ParallelDims, world: int) -> str:
    """Say which single degree, changed to which values, would make the others divide *world*."""
    others = dims.dp_replicate * dims.cp * dims.tp * dims.pp
    options: list[str] = []
    for name in ("tp", "cp", "pp", "dp_replicate"):
        value = int(getattr(dims, name))
        rest = others // value
        if world % rest == 0 and value > 1:
            options.append(f"{name}={_nearest(value, world // rest)}")
    if not options:
        return f"the degrees must multiply to a divisor of {world}"
    return f"nearest: {' or '.join(options)}"


def _nearest(value: int, whole: int) -> str:
    """Return the divisors of *whole* next to *value*, as text."""
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    below = [n for n in divisors if n < value][-1:]
    above = [n for n in divisors if n > value][:1]
    return " or ".join(str(n) for n in below + above)


def _listed(names: object) -> str:
    return ", ".join(repr(name) for name in names) if isinstance(names, Sequence | Mapping) else ""


def _rank_or_none() -> int:
    """Return the rank to mark in a drawing; -1 marks none."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "-1"))


_HEADS = ("num_attention_heads", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "n_experts")
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers")


def _configuration(model: object) -> object:
    for name in ("config", "cfg", "args"):
        found = getattr(model, name, None)
        if found is not None:
            return found
    return model


def _read(config: object, names: Sequence[str]) -> tuple[str, int] | None:
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return name, value
    return None


def _model_violations(dims: ParallelDims, config: object, seq_len: int | None) -> list[str]:
    found: list[str] = []
    heads = _read(config, _HEADS)
    if heads and heads[1] % dims.tp:
        found.append(
            f"{heads[0]}={heads[1]} must be divisible by tp={dims.tp}; nearest tp: "
            f"{_nearest(dims.tp, heads[1])}"
        )
    kv = _read(config, _KV_HEADS)
    if kv and kv[1] % dims.tp and dims.tp % kv[1]:
        found.append(
            f"{kv[0]}={kv[1]} must be divisible by tp={dims.tp}, or divide it (heads are then "
            f"replicated); nearest tp: {_nearest(dims.tp, kv[1])}"
        )
    experts = _read(config, _EXPERTS)
    if experts and experts[1] % dims.ep:
        found.append(
            f"{experts[0]}={experts[1]} must be divisible by ep={dims.ep}; nearest ep: "
            f"{_nearest(dims.ep, experts[1])}"
        )
    layers = _read(config, _LAYERS)
    if layers and layers[1] < dims.pp:
        found.append(f"{layers[0]}={layers[1]} must be at least pp={dims.pp}")
    if seq_len is not None and seq_len % (dims.cp * dims.tp):
        step = dims.cp * dims.tp
        found.append(
            f"seq_len={seq_len} must be divisible by cp * tp = {step}; nearest: "
            f"{seq_len // step * step or step} or {(seq_len // step + 1) * step}"
        )
    return found


def unflatten_mesh(
    world_mesh: DeviceMesh, dim_names: Sequence[str], dim_degrees: Sequence[int]
) -> DeviceMesh:
    """Return the first axis of *world_mesh* cut into the named axes; axes of size 1 cost no group.

    Example:
        >>> from hp_mesh import init_device_mesh, unflatten_mesh
        >>> world = init_device_mesh(
        ...     "cpu", (8,), mesh_dim_names=("world",), rank_list=range(8), init_backend=False
        ... )
        >>> unflatten_mesh(world, ("dp", "cp", "tp"), (4, 1, 2)).shape
        (4, 1, 2)
    """
    return world_mesh.unflatten(0, dim_degrees, dim_names)
