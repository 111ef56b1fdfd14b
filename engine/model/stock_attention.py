"""Our attention for transformers' own layers, by transformers' attention interface.

A model passes keywords to its attention function. A keyword that changes the result is supported by the backends or
refused by name: every other one must have a value that changes nothing.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from engine.errors import ModelError
from engine.kernels.scoring import Scoring
from engine.model.attention_step import AttentionStep
from engine.model.layer_windows import window_of

ATTENTION_NAME = "batchloom"


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "dropout": (0.0,),
    "use_cache": (False,),
    "output_attentions": (False,),
    "output_router_logits": (False,),
}
"""Keywords with values that change nothing; any other keyword must be None."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_step: AttentionStep | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: causal attention over the step's KV.

    Args:
        query: ``[1, num_q_heads, T, head_dim]``.
        key, value: ``[1, num_kv_heads, T, head_dim]``.
        attention_step: the step's work and KV cache.
        attention_mask: must be None: the `AttentionBatch` says what a row sees.
        scaling, sliding_window, softcap, s_aux: `scale`, `window`, `softcap` and `sinks` of `Scoring`;
            None: 1 / sqrt(head_dim), no window, no cap, no sinks.
        is_causal: None: the module's attribute.
    Raises:
        ModelError: the model needs something that is not supported.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if attention_step is None:
        raise ModelError(
            f"layer {layer}: the model does not pass keywords on to its attention, or an engine was made of it and it "
            "is called itself"
        )
    asked = keywords | {"attention_mask": attention_mask}
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        asked["is_causal"] = False
    refuse_unless_neutral(asked, _NEUTRAL, f"layer {layer}: ")
    k_cache = attention_step.cache.keys[layer]
    for name, heads in (("keys", key), ("values", value)):
        if heads.shape[1::2] != k_cache.shape[2:]:
            raise ModelError(
                f"layer {layer}: {name} of {heads.shape[1]} heads of {heads.shape[3]} dimensions, the model keeps "
                f"{k_cache.shape[2]} of {k_cache.shape[3]}: layers that differ in KV are not supported"
            )
    scoring = Scoring(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap or 0.0,
        window=window_of(sliding_window, module.config),
        sinks=s_aux,
    )
    layout = attention_step.cache.layout
    kept = layout.windows[layout.tables[layer]]
    if kept and not 0 < scoring.window <= kept:
        why = "remove it from config.json if the architecture ignores it"
        raise ModelError(f"layer {layer}: it sees positions outside its sliding_window: {why}")
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    out = attention_step.attend(layer, q, k, v, scoring)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, attend)
# No mask function is registered under this name, so transformers builds no mask. It also does not search the positions
# for packed sequences, for which the host would wait for the device in each step.


def refuse_unless_neutral(
    keywords: Mapping[str, object], neutral: Mapping[str, tuple[object, ...]], where: str = ""
) -> None:
    """Raises `ModelError` for a keyword of a model's call of attention that would change the result. Positions are
    ignored: layers have applied rotary embeddings before the call.

    Args:
        keywords: given by the model.
        neutral: values of keywords, besides None, that change nothing.
        where: beginning of the message.
    """
    for name, found in keywords.items():
        if found is None or name == "position_ids":
            continue
        if isinstance(found, torch.Tensor):
            tensor = f"<tensor of shape {tuple(found.shape)}>"
            raise ModelError(f"{where}attention with {name}={tensor} is not supported")
        if found not in neutral.get(name, ()):
            hint = "; encoders: EncoderEngine" if name == "is_causal" else ""
            raise ModelError(f"{where}attention with {name}={found!r} is not supported{hint}")
