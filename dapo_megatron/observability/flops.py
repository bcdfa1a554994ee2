"""Floating-point operations of the actor by formula, for MFU and achieved FLOP/s.

The convention is that of *model* FLOPs:

- Only matrix products count, two operations per multiply-add: projections, attention scores and their product with
  the values, MLP or experts, router, output layer. Norms, rotary embedding, softmax, activations, biases and the
  embedding lookup do not.
- Attention is causal and counted as such: a sequence of L tokens has L (L + 1) / 2 pairs of query and key, not L^2.
- The output layer works on the rows that are scored, one per response token; a tied one costs the same.
- A mixture of experts counts the experts that a token is sent to, those shared by all, and the router.
- Backward costs twice the forward pass (gradient of the input and of the weight), so an update is 3 forward passes; a
  log-prob pass is 1. What recomputation repeats, and padding, is not counted: MFU is about the work that the batch needs.

All counts are exact Python integers for the whole model, whatever the parallel layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from checkpoint_convert.architecture import ModelArchitecture

# Forward, and backward at twice its cost.
UPDATE_PASSES = 3


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """All that the FLOPs of a batch depend on, added up over its sequences.

    Attributes:
        tokens: prompt and response tokens.
        scored: response tokens.
        score_pairs: pairs of a query and a key that attention computes, per head and layer.
    """

    tokens: int
    scored: int
    score_pairs: int

    @staticmethod
    def of(prompt_lengths: Iterable[int], response_lengths: Iterable[int], *, causal: bool = True) -> TokenCounts:
        """Counts of a ragged batch; one prompt length per response.

        Args:
            causal: count the pairs below and on the diagonal; else all L^2, as tools do that know no mask.
        """
        tokens = scored = score_pairs = 0
        for prompt, response in zip(prompt_lengths, response_lengths, strict=True):
            length = int(prompt) + int(response)
            tokens += length
            scored += int(response)
            score_pairs += length * (length + 1) // 2 if causal else length * length
        return TokenCounts(tokens, scored, score_pairs)


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """FLOPs of one forward pass over a batch, by part of the model.

    Attributes:
        projections: query, key, value and output projections of attention.
        scores: products of queries with keys and of weights with values.
        feed_forward: dense MLPs, experts and routers.
        output_layer: logits of the scored rows.
    """

    projections: int
    scores: int
    feed_forward: int
    output_layer: int

    @property
    def total(self) -> int:
        return self.projections + self.scores + self.feed_forward + self.output_layer


def forward_flops(arch: ModelArchitecture, counts: TokenCounts) -> ForwardFlops:
    """FLOPs of one forward pass of the whole model over the tokens of `counts`."""
    projection_weights, score_width = _attention(arch)
    return ForwardFlops(
        projections=2 * counts.tokens * arch.num_layers * projection_weights,
        scores=2 * counts.score_pairs * arch.num_layers * score_width,
        feed_forward=2 * counts.tokens * _feed_forward_weights(arch),
        output_layer=2 * counts.scored * arch.hidden_size * arch.vocab_size,
    )


def _attention(arch: ModelArchitecture) -> tuple[int, int]:
    """Weights of a layer's projections, and multiply-adds of a pair of query and key over all heads."""
    hidden, heads = arch.hidden_size, arch.num_attention_heads
    latent = arch.latent_attention
    if latent is None:
        # Queries and the output projection have all heads; key/value heads that several queries share are projected once.
        weights = 2 * hidden * arch.head_dim * (heads + arch.num_query_groups)
        return weights, heads * 2 * arch.head_dim
    qk_head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    if latent.q_lora_rank is None:
        query = hidden * heads * qk_head_dim
    else:
        query = latent.q_lora_rank * (hidden + heads * qk_head_dim)
    key_value = hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim)
    key_value += latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    return query + key_value + heads * latent.v_head_dim * hidden, heads * (qk_head_dim + latent.v_head_dim)


def _feed_forward_weights(arch: ModelArchitecture) -> int:
    """Weights that one token meets in the MLPs of all layers; each MLP is gated: three matrices."""
    dense = 3 * arch.hidden_size * arch.ffn_hidden_size
    moe = arch.moe
    if moe is None:
        return arch.num_layers * dense
    ffn = moe.top_k * moe.expert_ffn_hidden_size + (moe.shared_ffn_hidden_size or 0)
    sparse = arch.hidden_size * (3 * ffn + moe.num_experts)
    return sum(sparse if is_sparse else dense for is_sparse in moe.moe_layers)
