"""A compiled program against the same program on whole tensors: values, placements and gradients, whatever layout comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd

R = Replicate()
Program = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PROGRAMS: dict[str, tuple[Program, list[Placement], list[Placement]]] = {
    "a sum that is still to be taken": (
        lambda x, w: (x.relu() @ w) * 2,
        [Shard(1)],
        [Shard(0)],
    ),
    "uneven rows": (lambda x, w: F.layer_norm(x @ w, (3,)).softmax(-1), [Shard(0)], [R]),
    "a number": (lambda x, w: (x @ w).square().mean(), [Shard(0)], [Shard(1)]),
    "addends in": (lambda x, w: (x.tanh() @ w)[1:4].flatten(), [Partial()], [R]),
}


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@spmd(world_size=2, timeout=120.0)
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_graph_has_the_values_and_gradients_of_one_device(name: str) -> None:
    """The gradient comes back as a replica, as pieces and as addends, also other ones than the output's own layout."""
    program, of_x, of_w = PROGRAMS[name]
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 6, generator=generator), torch.randn(6, 3, generator=generator)
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    alone = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    want = program(*alone)
    want.square().sum().backward()
    layouts: list[Placement] = [R, Partial()] if want.ndim == 0 else [R, Shard(0), Partial()]
    for layout in layouts:
        mine = [
            distribute_tensor(t, mesh, places).requires_grad_()
            for t, places in ((x, of_x), (w, of_w))
        ]
        eager, got = program(*mine), compiled(*mine)
        assert isinstance(got, DTensor)
        assert isinstance(eager, DTensor)
        assert got.placements == eager.placements
        torch.testing.assert_close(_whole(got.detach()), want.detach(), rtol=1e-4, atol=1e-5)
        seed = (2 * want).detach()
        got.backward(distribute_tensor(seed, mesh, [layout]))  # type: ignore[no-untyped-call]  # torch's own
        for p, q in zip(mine, alone, strict=True):
            torch.testing.assert_close(_whole(p.grad), q.grad, rtol=1e-4, atol=1e-5)
