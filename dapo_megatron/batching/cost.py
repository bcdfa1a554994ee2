"""What a sequence costs relative to others: a linear part, and attention's quadratic one.

Exact integers, so that all ranks agree on every comparison.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Relative cost of training on a sequence of L tokens, `L * (break_even_tokens + L)`.

    Attributes:
        break_even_tokens: length at which attention over the sequence costs as much as everything else. It grows with the hidden
            size; the default lies between Qwen3-8B (51,000) and Llama-3-8B (57,000).
    """

    break_even_tokens: int = 53248

    def __post_init__(self) -> None:
        if self.break_even_tokens < 1:
            raise ValueError(f"break_even_tokens={self.break_even_tokens} must be positive")

    @staticmethod
    def from_flops(per_token: int, per_score_pair: int) -> CostModel:
        """From a model's FLOPs of one forward pass, as `dapo_megatron.observability.flops` counts them.

        Args:
            per_token: projections, MLP or experts, output layer.
            per_score_pair: attention, for each pair of a query and a key, over all heads and layers. A causal sequence has about
                L^2 / 2 of them, so the break-even is `2 * per_token / per_score_pair`.
        """
        if per_token < 1 or per_score_pair < 1:
            raise ValueError(f"per_token={per_token} and per_score_pair={per_score_pair} FLOPs must be positive")
        return CostModel(max(1, (4 * per_token + per_score_pair) // (2 * per_score_pair)))

    def __call__(self, length: int) -> int:
        """Cost of a sequence of `length` tokens; about 10^9 at 20,000 tokens, so sums stay far below 2^63."""
        return length * (self.break_even_tokens + length)
