"""Reports: what a plan does, without devices."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hp_tp import ColwiseParallel, RowwiseParallel, SequenceParallel, plan_report
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.emb.weight
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        self.extra = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(4))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.mlp(self.emb(ids))))
        return out


PLAN = {
    "emb": RowwiseParallel(),
    "head": ColwiseParallel(),
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(),
    "missing.*": SequenceParallel(),
}


def test_states_by_hand() -> None:
    """Placements, bytes of the largest piece, ties, what stays plain and what matches nothing."""
    model = Model()
    report = plan_report(model, PLAN, 4)
    rows = {row.name: row for row in report.states}
    tied = rows["emb.weight"]
    assert (tied.also, tied.style, tied.placement) == (("head.weight",), "RowwiseParallel", "S(0)")
    assert (tied.whole_bytes, tied.rank_bytes) == (320, 3 * 8 * 4)
    assert (rows["mlp.2.weight"].placement, rows["mlp.2.weight"].rank_bytes) == ("S(1)", 96)
    assert (rows["mlp.2.bias"].placement, rows["mlp.2.bias"].rank_bytes) == ("R", 32)
    assert rows["table"].buffer
    assert report.plain == ("norm.weight", "norm.bias", "extra.weight", "extra.bias")
    assert report.unmatched == ("missing.*",)
    assert report.whole_bytes == sum(
        t.numel() * 4 for t in (*model.parameters(), *model.buffers())
    )
    assert type(model.emb) is nn.Embedding
    assert type(model.emb.weight) is nn.Parameter


def test_text_and_json() -> None:
    """The table names everything once; the JSON has the rows and the totals."""
    report = plan_report(Model(), PLAN, 2)
    text = str(report)
    assert "emb.weight = head.weight" in text
    assert "not laid out: norm.weight, norm.bias, extra.weight, extra.bias" in text
    assert "keys that match nothing: missing.*" in text
    data = json.loads(report.to_json())
    assert data["rank_bytes"] == report.rank_bytes
    assert len(data["states"]) == len(report.states)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], check=False, capture_output=True, text=True
    )


def test_collectives_of_a_step() -> None:
    """With inputs a step runs on no data: the sums of the embedding and the two layers, forward and backward."""
    program = """
        import torch
        from hp_tp import ColwiseParallel, RowwiseParallel, plan_report
        from torch import nn
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 128), nn.Linear(128, 64))
        plan = {"0": RowwiseParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()}
        report = plan_report(model, plan, 4, inputs=[torch.zeros(2, 5, dtype=torch.long)])
        for row in report.collectives:
            print(row.op, row.backward, row.count, row.wire_bytes)
        assert not torch.distributed.is_initialized()
    """
    ran = run("-c", textwrap.dedent(program))
    assert ran.returncode == 0, ran.stderr
    one = 2 * 5 * 64 * 4 * 2 * 3 // 4  # a ring sends 2 (n-1)/n of the payload
    assert ran.stdout.splitlines() == [
        f"all_reduce False 2 {2 * one}",
        f"all_reduce True 1 {one}",
    ]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m hp_tp.plan`` prints a table or JSON, and fails when a key matches nothing."""
    (tmp_path / "model_of_mine.py").write_text(
        textwrap.dedent("""
            from hp_tp import ColwiseParallel
            from torch import nn

            def make():
                return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

            plan = {"0": ColwiseParallel()}
            wrong = lambda model: {"0": ColwiseParallel(), "7": ColwiseParallel()}
        """)
    )
    monkeypatch.chdir(tmp_path)
    right = run("-m", "hp_tp.plan", "model_of_mine:make", "--plan", "model_of_mine:plan", "--json")
    assert right.returncode == 0, right.stderr
    assert json.loads(right.stdout)["plain"] == ["1.weight", "1.bias"]
    wrong = run(
        "-m", "hp_tp.plan", "model_of_mine:make", "--plan", "model_of_mine:wrong", "--degree", "4"
    )
    assert wrong.returncode == 1
    assert wrong.stdout.startswith("4 ranks\n")
    assert "keys that match nothing: 7" in wrong.stdout


def test_command_takes_a_config(tmp_path: Path) -> None:
    """A folder with a Hugging Face config is a model with a plan of its own; a step is counted on it."""
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = run(
        *("-m", "hp_tp.plan", str(tmp_path), "--degree", "4", "--json", "--tokens", "2", "8"),
        "--sequence-parallel",
    )
    assert ran.returncode == 0, ran.stderr
    data = json.loads(ran.stdout)
    rows = {row["name"]: row for row in data["states"]}
    assert rows["model.embed_tokens.weight"]["placement"] == "S(0)"
    assert rows["model.embed_tokens.weight"]["also"] == ["lm_head.weight"]
    assert rows["model.layers.2.self_attn.k_proj.weight"]["placement"] == "R"
    assert data["plain"] == []
    counts = {(row["op"], row["backward"]): row["count"] for row in data["collectives"]}
    assert counts["reduce_scatter_tensor", False] == 2 * 3
