"""Which experts each token went to in the engine, so that the trainer can route it the same way (router replay).

SGLang returns them with the server argument `--enable-return-routed-experts` and `return_routed_experts` in the request
(0.5.23: `srt/state_capturer/routed_experts.py`): `meta_info.routed_experts` is the base64 text of int32
`[p + n - 1, num_layers, top_k]`, p prompt and n response tokens. Row t holds the experts of token t, prefix-cache hits
included. The last response token has no row, because the engine never computes it. Layers are all layers of the model: rows of
dense ones mean nothing. The numbers are those of the model's own experts, whatever the engine's placement, shared experts
left out.

A token that was computed more than once (a request that gave up its cache and went on) has the experts of the last time: those of
the weights with which its cache entries were made.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np

from rollout_service.config import RoutingShape

SERVER_ARGUMENT = "--enable-return-routed-experts"


class RoutedExpertsError(ValueError):
    """The engine's expert choices are missing, or cannot be those of the model; the message says why."""


def expert_dtype(num_experts: int) -> np.dtype[Any]:
    """Smallest dtype for the numbers `0..num_experts - 1` that torch has, too."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.int16)


def parse_routed_experts(meta: Mapping[str, Any], tokens: int, shape: RoutingShape) -> np.ndarray:
    """Read `meta_info` of a reply about `tokens` prompt and response tokens.

    Returns:
        `[tokens - 1, moe_layers, top_k]` of `expert_dtype(num_experts)`: row t holds the experts of token t.

    Raises:
        RoutedExpertsError: none were returned, they do not cover exactly these tokens, a number is no expert, or a token goes
            to the same expert twice (as in a row that the engine never wrote).
    """
    text = meta.get("routed_experts")
    if text is None:
        raise RoutedExpertsError(
            f"no routed_experts in the reply: rollout.router_replay needs a server that takes {SERVER_ARGUMENT} (SGLang 0.5.23 does)"
        )
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except (TypeError, ValueError) as error:
        raise RoutedExpertsError(f"routed_experts is no base64 text: {error}") from error
    width = shape.num_layers * shape.top_k
    if len(data) != (tokens - 1) * width * 4:
        raise RoutedExpertsError(
            f"routed_experts has {len(data)} bytes, but {tokens} tokens (the last without experts), {shape.num_layers} layers and "
            f"{shape.top_k} experts a token make {(tokens - 1) * width * 4}"
        )
    numbers = np.frombuffer(data, dtype="<i4").reshape(tokens - 1, shape.num_layers, shape.top_k)
    numbers = numbers[:, list(shape.moe_layers)]
    outside = (numbers < 0) | (numbers >= shape.num_experts)
    if outside.any():
        token, layer, _ = np.argwhere(outside)[0]
        raise RoutedExpertsError(
            f"token {token} of {tokens} went to experts {numbers[token, layer].tolist()} in layer {shape.moe_layers[layer]}, which "
            f"has experts 0..{shape.num_experts - 1}"
        )
    chosen = numbers.astype(expert_dtype(shape.num_experts))
    columns = np.ascontiguousarray(chosen.transpose(2, 0, 1))
    for first, second in combinations(columns, 2):
        twice = first == second
        if twice.any():
            token, layer = np.argwhere(twice)[0]
            raise RoutedExpertsError(
                f"token {token} of {tokens} went to experts {chosen[token, layer].tolist()} in layer {shape.moe_layers[layer]}: the "
                "same one twice, so the engine did not record them"
            )
    return chosen
