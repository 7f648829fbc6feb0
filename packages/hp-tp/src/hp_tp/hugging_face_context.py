"""Context parallelism for a Hugging Face decoder: which styles its modules get, from the model itself.

Such a model builds a mask for the tokens that it sees, which are a piece here, and a fresh one at that: positions that jump look
like packed sequences to it. So the mask is not used; an attention says of itself whether it is causal, and what else a mask
could say (windows, chunks, padding) is refused, when the plan is made or when the model runs. Positions are an input that every
such model has.

Parameters stay as they are. Each rank's gradients are addends from its own tokens, as under data parallelism, and whoever adds
those up (FSDP, DDP) does so over both axes; with tensor parallelism the two plans are applied one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_tp.context_parallel import ContextParallel, ContextParallelInput
from hp_tp.errors import PlanError

if TYPE_CHECKING:
    from torch import nn

    from hp_tp.context_attention import AttentionMethod
    from hp_tp.style import ParallelStyle

__all__ = ["hugging_face_context_plan"]


def hugging_face_context_plan(
    model: nn.Module, *, method: AttentionMethod = "ring", balanced: bool = True
) -> dict[str, ParallelStyle]:
    """Return the plan that lets a Hugging Face decoder run on pieces of sequences, for :func:`parallelize_module`.

    Args:
        model: the model, with ``attn_implementation="sdpa"`` and full attention in every layer.
        method: how ranks exchange keys and values; see :func:`context_parallel_attention`.
        balanced: whether sequences are cut head and tail.

    The model then takes ids that :func:`split_sequence` cut, and no mask and no labels: labels are shifted on the whole sequence
    and cut like the ids, and the loss is computed from the logits.

    Raises:
        PlanError: for another implementation of attention, for windows, chunks or linear attention, or without attention.

    Example:
        >>> import torch
        >>> from hp_tp import hugging_face_context_plan, parallelize_module, split_sequence
        >>> def logits_of(
        ...     model, ids, mesh
        ... ):  # ids are whole, the logits those of this rank's tokens
        ...     parallelize_module(model, mesh["cp"], hugging_face_context_plan(model))
        ...     return model(input_ids=split_sequence(ids, mesh["cp"]), use_cache=False).logits
    """
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    _check_attention(model, text)
    found = {
        path: module.is_causal
        for path, module in model.named_modules()
        if isinstance(getattr(module, "is_causal", None), bool) and hasattr(module, "head_dim")
    }
    if not found:
        message = (
            f"{type(model).__name__} has no attentions that say whether they are causal (is_causal) and how wide their heads are "
            "(head_dim), as those of transformers do; write the plan with ContextParallel and ContextParallelInput"
        )
        raise PlanError(message)
    plan: dict[str, ParallelStyle] = {"": ContextParallelInput(balanced=balanced)}
    for path, causal in found.items():
        plan[path] = ContextParallel(method=method, balanced=balanced, causal=causal)
    return plan


def _check_attention(model: nn.Module, config: object) -> None:
    """Refuse what attends in another way, or to less than all that came before."""
    name = type(model).__name__
    implementation = getattr(config, "_attn_implementation", None)
    if implementation != "sdpa":
        message = (
            f"{name} has attn_implementation={implementation!r}, and context parallelism replaces torch's own function; load it "
            "with attn_implementation='sdpa'"
        )
        raise PlanError(message)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        message = (
            f"{name} has layers with {sorted(kinds)}, and context parallelism is known for full attention; "
            "parallelize_qwen3_5 has it for gated delta nets"
        )
        raise PlanError(message)
    for limit in ("sliding_window", "attention_chunk_size"):
        size = getattr(config, limit, None)
        if size is not None and getattr(config, "use_sliding_window", True):
            message = (
                f"{name} attends to no more than {limit}={size} tokens, and context parallelism is known for full attention; set "
                f"config.{limit}=None if sequences are no longer than that"
            )
            raise PlanError(message)
