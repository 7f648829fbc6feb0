"""A gated delta net with its heads shared out, against the whole layer on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import Shard
from hp_mesh import DeviceMesh, init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import GatedDeltaNetParallel, PlanError, UnsupportedModuleError, parallelize_module
from hp_tp.testing import check_plan
from torch import Tensor, nn

WIDTH = 12


class GatedNorm(nn.Module):
    """A norm over the features of a head, gated."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return x * scale * self.weight * F.silu(gate)


class GatedDeltaNet(nn.Module):
    """Qwen3.5's linear attention, token by token: what its parts are called, and what it computes."""

    def __init__(self, key_heads: int, value_heads: int, key: int = 3, value: int = 4) -> None:
        super().__init__()
        self.num_k_heads, self.num_v_heads = key_heads, value_heads
        self.head_k_dim, self.head_v_dim = key, value
        self.key_dim, self.value_dim = key_heads * key, value_heads * value
        channels = 2 * self.key_dim + self.value_dim
        self.in_proj_qkv = nn.Linear(WIDTH, channels, bias=False)
        self.in_proj_z = nn.Linear(WIDTH, self.value_dim, bias=False)
        self.in_proj_b = nn.Linear(WIDTH, value_heads, bias=False)
        self.in_proj_a = nn.Linear(WIDTH, value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, 3, groups=channels, padding=2, bias=False)
        self.dt_bias = nn.Parameter(torch.rand(value_heads))
        self.A_log = nn.Parameter(torch.rand(value_heads))
        self.norm = GatedNorm(value)
        self.out_proj = nn.Linear(self.value_dim, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        mixed = self.conv1d(self.in_proj_qkv(x).transpose(1, 2))[..., :length]
        q, k, v = (
            F.silu(mixed)
            .transpose(1, 2)
            .split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        )
        q, k = (F.normalize(t.reshape(batch, length, -1, self.head_k_dim), dim=-1) for t in (q, k))
        v = v.reshape(batch, length, -1, self.head_v_dim)
        share = self.num_v_heads // self.num_k_heads
        q, k = q.repeat_interleave(share, 2), k.repeat_interleave(share, 2)
        beta = self.in_proj_b(x).sigmoid()
        decay = (-self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)).exp()
        state = x.new_zeros(batch, self.num_v_heads, self.head_k_dim, self.head_v_dim)
        outs = []
        for t in range(length):
            state = state * decay[:, t, :, None, None]
            seen = (state * k[:, t, :, :, None]).sum(-2)
            update = (v[:, t] - seen) * beta[:, t, :, None]
            state = state + k[:, t, :, :, None] * update[:, :, None, :]
            outs.append((state * q[:, t, :, :, None]).sum(-2))
        z = self.in_proj_z(x).reshape(batch, length, -1, self.head_v_dim)
        out = self.norm(torch.stack(outs, 1), z).reshape(batch, length, -1)
        return self.out_proj(out)  # type: ignore[no-any-return]  # modules return Any


def tp(size: int) -> DeviceMesh:
    """A mesh of one axis, and the same random numbers on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


@pytest.mark.parametrize("sizes", [(2, 4, 3, 4), (2, 2, 3, 3), (4, 4, 2, 3)])
@pytest.mark.parametrize("scattered", [False, True])
@spmd(world_size=2, timeout=60)
def test_heads_shared_out_equal_one_device(
    sizes: tuple[int, int, int, int], scattered: bool
) -> None:
    """Output, gradient of the input and of every parameter, with grouped heads, equal blocks and unequal ones."""
    mesh = tp(2)
    cut = Shard(1) if scattered else None
    style = GatedDeltaNetParallel(input_layouts=cut, output_layouts=cut)
    x = torch.randn(2, 6, WIDTH)
    check_plan(GatedDeltaNet(*sizes), mesh, style, x, given=(cut,), output=cut)


@spmd(world_size=2, timeout=60)
def test_each_rank_holds_its_part() -> None:
    """At rest a rank holds half of every weight but the norm's, in the order of the single device."""
    layer: Any = GatedDeltaNet(2, 4)
    whole = copy.deepcopy(layer)
    parallelize_module(layer, tp(2), GatedDeltaNetParallel())
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name
        share = 1 if name.startswith("norm") else 2
        assert parameter.to_local().numel() * share == parameter.numel(), name


@spmd(world_size=2, timeout=60)
def test_heads_that_do_not_divide_are_refused() -> None:
    """The error says which degrees do; so are other modules, and a second time."""
    mesh = tp(2)
    with pytest.raises(
        PlanError, match=r"3 key heads and 6 value heads .* degrees that can: \[1, 3\]"
    ):
        parallelize_module(GatedDeltaNet(3, 6), mesh, GatedDeltaNetParallel())
    with pytest.raises(UnsupportedModuleError, match=r"has no .*in_proj_qkv"):
        parallelize_module(nn.Linear(2, 2), mesh, GatedDeltaNetParallel())
    layer = GatedDeltaNet(2, 2)
    parallelize_module(layer, mesh, GatedDeltaNetParallel())
    with pytest.raises(PlanError, match="shared out already"):
        parallelize_module(layer, mesh, GatedDeltaNetParallel())


@spmd(world_size=2, timeout=120)
def test_transformers_layer_equals_one_device() -> None:
    """The layer of Qwen3.5 as the library has it, with more value heads than key heads."""
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    mesh = tp(2)
    config = modeling.Qwen3_5TextConfig(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        layer_types=["linear_attention"],
    )
    layer = modeling.Qwen3_5GatedDeltaNet(config, 0)
    check_plan(layer, mesh, GatedDeltaNetParallel(), torch.randn(2, 6, WIDTH))
