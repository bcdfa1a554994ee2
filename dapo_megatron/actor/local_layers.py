"""Layers for devices without Transformer Engine: RMSNorm and attention over packed sequences, in plain torch.

Megatron's own local norm refuses sequence parallelism and its local attention refuses packed (THD) sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm with float32 statistics (HF `LlamaRMSNorm`; `GemmaRMSNorm` with zero-centred weights).

    Its weight is marked `sequence_parallel`, so that Megatron sums its gradient over tensor-parallel ranks, each of
    which sees only its share of the tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:
            return (normed * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normed.to(x.dtype)


class PackedAttention(MegatronModule):
    """Causal grouped-query attention through `scaled_dot_product_attention`, packed or padded.

    Values may be narrower than queries and keys (latent attention). Packed (THD): query `[t, q_heads, d]`, key and value `[t, kv_heads, d]`, one call per sequence of
    `cu_seqlens`, result `[t, q_heads * d]`. Unpacked (SBHD): `[s, b, heads, d]`, result `[s, b, q_heads * d]`.
    Head counts are this rank's share.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError("context parallelism needs Transformer Engine's attention")
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(
                f"attention_dropout={dropout}: dropout would make the old and new log-probs differ; set it to 0"
            )
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = self._attend(q, k, v)
            return out.permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        outputs = []
        for start, end in zip(bounds[:-1], bounds[1:], strict=True):
            q, k, v = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            outputs.append(self._attend(q, k, v).squeeze(0).transpose(0, 1))
        return torch.cat(outputs).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True)
