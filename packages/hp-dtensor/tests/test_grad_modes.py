"""With gradients, without, in inference mode and under autocast torch hands over other operators; the values are the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd

R = Replicate()
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
PROGRAMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear": lambda x, w: F.linear(x, w, w[0]),
    "matmul": torch.matmul,
    "einsum": lambda x, w: torch.einsum("bij,jk->bik", x, w),
    "bmm": lambda x, w: torch.bmm(x, x.mT) * w.sum(),
    "layer norm": lambda x, w: F.layer_norm(x, (4,), w[0]),
    "rms norm": lambda x, w: F.rms_norm(x, (4,), w[1]),
    "bare rms norm": lambda x, _: F.rms_norm(x, (4,)),
    "group norm": lambda x, _: F.group_norm(x, 3),
    "batch norm": lambda x, _: F.batch_norm(x, None, None, training=True),
    "instance norm": lambda x, _: F.instance_norm(x),
    "attention": lambda x, _: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "softmax": lambda x, _: F.softmax(x, 1),
    "cross entropy": lambda x, _: F.cross_entropy(x.flatten(0, 1), torch.arange(6) % 4),
    "views": lambda x, _: x.detach().transpose(0, 1).reshape(3, -1).chunk(2, -1)[1],
    "in place": lambda x, w: x.clone().add_(1).mul_(w.sum()).detach_(),
    "a slice": lambda x, _: x.clone()[1:, 1:].mul_(2)[..., 0],
    "dropout": lambda x, _: F.dropout(x, 0.5, training=False),
    "embedding": lambda _, w: F.embedding(torch.tensor([[0, 3], [1, 1]]), w),
    "convolution": lambda x, w: F.conv1d(x, w[:2, :3].unsqueeze(-1)),
    "pooling": lambda x, _: F.avg_pool1d(x, 2),
    "gate": lambda x, w: F.silu(x @ w) * F.glu(x.repeat(1, 1, 2)),
    "statistics": lambda x, _: x.std(1) + torch.linalg.vector_norm(x, dim=1),
    "order": lambda x, _: x.topk(2, 1).values + x.cumsum(1)[:, :2],
}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@spmd(world_size=4)
@pytest.mark.parametrize("mode", list(MODES))
def test_a_program_gives_the_same_in_every_mode(mode: str) -> None:
    """Blocks of models, on cut batches, sequences and features and on addends, against whole tensors in the same mode."""
    mesh = init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 3, 4, generator=generator), torch.randn(4, 4, generator=generator)
    bound = {"rtol": 5e-2, "atol": 5e-2} if mode == "autocast" else {"rtol": 1e-4, "atol": 1e-5}
    for layout in ([Shard(0), R], [Shard(1), Shard(2)], [Partial(), Shard(1)]):
        for name, program in PROGRAMS.items():
            with MODES[mode]():
                want = program(x, w)
                got = program(
                    distribute_tensor(x, mesh, layout), distribute_tensor(w, mesh, [Shard(0), R])
                )
                assert got.dtype == want.dtype, (name, layout)
                torch.testing.assert_close(
                    _whole(got), want, **bound, msg=lambda m, case=(name, layout): f"{case}: {m}"
                )
