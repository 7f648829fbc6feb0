"""Context parallelism of models of transformers, against the single device with whole sequences."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    ContextParallelError,
    PlanError,
    hugging_face_context_plan,
    hugging_face_plan,
    join_sequence,
    parallelize_module,
    split_sequence,
)
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

SIZES: dict[str, Any] = {
    "vocab_size": 34,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def build(name: str = "Llama", implementation: str = "sdpa", **changes: Any) -> Any:
    """A small model, equal on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation
        )
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model.train()


def whole(tensor: Any) -> torch.Tensor:
    """The whole of *tensor*."""
    return (tensor.full_tensor() if isinstance(tensor, TorchDTensor) else tensor).detach()


def check_model(name: str, cp: int, tp: int, method: Any, *, balanced: bool) -> None:
    """Compare logits, loss and the sum of the ranks' gradients with one device."""
    reference = build(name)
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    own = mesh["cp"]
    if tp > 1:
        parallelize_module(model, mesh["tp"], hugging_face_plan(model))
    parallelize_module(
        model, own, hugging_face_context_plan(model, method=method, balanced=balanced)
    )
    ids = torch.randint(0, 34, (2, 16))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    tolerance = {"rtol": 1e-4, "atol": 1e-5}

    expected = reference(input_ids=ids, use_cache=False).logits
    right = F.cross_entropy(expected.flatten(0, 1), labels.flatten())
    right.backward()

    pieces = [split_sequence(tensor, own, balanced=balanced) for tensor in (ids, labels)]
    logits = model(input_ids=pieces[0], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), pieces[1].flatten(), reduction="sum")
    loss = loss / (labels != -100).sum()
    loss.backward()
    joined = join_sequence(logits.detach(), own, balanced=balanced)
    torch.testing.assert_close(joined, expected.detach(), **tolerance)
    total = loss.detach().clone()
    torch.distributed.all_reduce(total, group=own.get_group())
    torch.testing.assert_close(total, right.detach(), **tolerance)
    rights = dict(reference.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        grad = whole(parameter.grad).clone()
        torch.distributed.all_reduce(grad, group=own.get_group())
        torch.testing.assert_close(
            grad,
            rights[parameter_name].grad,
            **tolerance,
            msg=lambda text, n=parameter_name: f"gradient of {n}: {text}",
        )


@pytest.mark.parametrize("size", [2, 4])
def test_pieces_of_sequences_give_what_whole_ones_do(size: int) -> None:
    """Logits, loss and gradients, in each way of exchanging keys, cut head and tail and contiguously."""

    @spmd(world_size=size, timeout=120)
    def run() -> None:
        for method in ("ring", "gather"):
            check_model("Llama", size, 1, method, balanced=True)
        if size == 2:
            check_model("Qwen3", size, 1, "ulysses", balanced=False)

    run()


@spmd(world_size=4, timeout=120)
def test_with_tensor_parallelism() -> None:
    """Two ranks share each rank's heads, two its sequence."""
    check_model("Llama", 2, 2, "ring", balanced=True)


def test_what_a_mask_would_say_is_refused() -> None:
    """Other attention, windows and models without attention have one error when the plan is made; masks when they come."""
    with pytest.raises(PlanError, match="attn_implementation='eager'"):
        hugging_face_context_plan(build(implementation="eager"))
    with pytest.raises(PlanError, match="no more than sliding_window=4 tokens"):
        hugging_face_context_plan(build("Mistral", sliding_window=4))
    with pytest.raises(PlanError, match=r"layers with \['sliding_attention'\]"):
        hugging_face_context_plan(
            build("Qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=1)
        )
    bare = nn.Linear(2, 2)
    bare.config = transformers.LlamaConfig(attn_implementation="sdpa")  # type: ignore[assignment]
    with pytest.raises(PlanError, match="Linear has no attentions"):
        hugging_face_context_plan(bare)


@spmd(world_size=2)
def test_a_mask_is_refused() -> None:
    """What it would say of other ranks' tokens nobody knows."""
    model = build()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    parallelize_module(model, mesh, hugging_face_context_plan(model))
    with pytest.raises(ContextParallelError, match="'attention_mask' under context"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 4))
