"""FLOPs by formula against counts written out by hand and against torch's own counter on models of transformers."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint_convert.architecture import LatentAttention, MixtureOfExperts, ModelArchitecture
from dapo_megatron.observability.flops import UPDATE_PASSES, TokenCounts, forward_flops

# hidden 6, 3 query heads and 1 key/value head of 4, MLP 10, vocabulary 17, 2 layers.
DENSE: dict[str, Any] = {
    "family": "qwen3",
    "num_layers": 2,
    "hidden_size": 6,
    "ffn_hidden_size": 10,
    "num_attention_heads": 3,
    "num_query_groups": 1,
    "head_dim": 4,
    "vocab_size": 17,
    "max_position_embeddings": 64,
    "norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "qkv_bias": False,
    "qk_norm": True,
    "tie_word_embeddings": False,
}
MOE: dict[str, Any] = {
    "num_experts": 8,
    "top_k": 2,
    "expert_ffn_hidden_size": 5,
    "shared_ffn_hidden_size": None,
    "moe_layers": (False, True),
    "score_function": "softmax",
    "renormalize": True,
    "num_groups": None,
    "group_top_k": None,
    "scaling_factor": 1.0,
    "expert_bias": False,
}
PROMPTS, RESPONSES = [3, 1, 5], [2, 4, 1]


def test_counts_of_a_ragged_batch() -> None:
    # Sequences of 5, 5 and 6 tokens: 1 + ... + 5 = 15 pairs, 15, and 21; without the mask 25 + 25 + 36.
    assert TokenCounts.of(PROMPTS, RESPONSES) == TokenCounts(tokens=16, scored=7, score_pairs=51)
    assert TokenCounts.of(PROMPTS, RESPONSES, causal=False) == TokenCounts(tokens=16, scored=7, score_pairs=86)
    assert TokenCounts.of([], []) == TokenCounts(tokens=0, scored=0, score_pairs=0)
    with pytest.raises(ValueError, match="shorter"):
        TokenCounts.of(PROMPTS, RESPONSES[:2])


def test_dense_model_with_shared_key_value_heads_by_hand() -> None:
    flops = forward_flops(ModelArchitecture(**DENSE), TokenCounts.of(PROMPTS, RESPONSES))
    # Per token and layer: query 6 x 12, key 6 x 4, value 6 x 4, output 12 x 6.
    assert flops.projections == 2 * 16 * 2 * (72 + 24 + 24 + 72)
    # Per pair, layer and query head: 4 multiply-adds for the score, 4 for the weighted value.
    assert flops.scores == 2 * 51 * 2 * 3 * (4 + 4)
    # Gate, up and down.
    assert flops.feed_forward == 2 * 16 * 2 * (60 + 60 + 60)
    # Logits of the 7 response tokens only.
    assert flops.output_layer == 2 * 7 * 6 * 17
    assert flops.total == 12288 + 4896 + 11520 + 1428


def test_tied_output_layer_costs_the_same() -> None:
    counts = TokenCounts.of(PROMPTS, RESPONSES)
    tied = forward_flops(ModelArchitecture(**DENSE | {"tie_word_embeddings": True}), counts)
    assert tied == forward_flops(ModelArchitecture(**DENSE), counts)


def test_experts_by_hand() -> None:
    counts = TokenCounts.of(PROMPTS, RESPONSES)
    arch = ModelArchitecture(**DENSE, moe=MixtureOfExperts(**MOE))
    # The first layer is dense. In the second: router 6 x 8, and two experts of three matrices 6 x 5.
    assert forward_flops(arch, counts).feed_forward == 2 * 16 * (180 + 48 + 2 * 90)
    shared = ModelArchitecture(**DENSE, moe=MixtureOfExperts(**MOE | {"shared_ffn_hidden_size": 7}))
    assert forward_flops(shared, counts).feed_forward == 2 * 16 * (180 + 48 + 2 * 90 + 126)
    dense = forward_flops(ModelArchitecture(**DENSE), counts)
    assert forward_flops(shared, counts).total - forward_flops(arch, counts).total == 2 * 16 * 126
    assert forward_flops(arch, counts).scores == dense.scores


@pytest.mark.parametrize(("q_lora_rank", "query"), [(None, 6 * 3 * 5), (9, 6 * 9 + 9 * 3 * 5)])
def test_latent_attention_by_hand(q_lora_rank: int | None, query: int) -> None:
    latent = LatentAttention(
        q_lora_rank=q_lora_rank, kv_lora_rank=7, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4
    )
    arch = ModelArchitecture(**DENSE, latent_attention=latent)
    flops = forward_flops(arch, TokenCounts.of(PROMPTS, RESPONSES))
    # Down to the latent and the shared rotary key: 6 x (7 + 2); up to keys and values of 3 heads: 7 x 3 (3 + 4).
    assert flops.projections == 2 * 16 * 2 * (query + 54 + 147 + 72)
    # A score over 3 + 2 channels, a value of 4.
    assert flops.scores == 2 * 51 * 2 * 3 * (5 + 4)


def test_a_7b_model_is_near_two_flops_per_weight_and_token() -> None:
    # Qwen2.5-7B: 7.07e9 weights besides the embedding. One response token each, so 4096 of 4096 tokens are scored.
    sizes = {"num_layers": 28, "hidden_size": 3584, "ffn_hidden_size": 18944, "num_attention_heads": 28}
    arch = ModelArchitecture(**DENSE | sizes | {"num_query_groups": 4, "head_dim": 128, "vocab_size": 152064})
    flops = forward_flops(arch, TokenCounts.of([0] * 4096, [1] * 4096))
    assert flops.total / 4096 == pytest.approx(2 * 7.07e9, rel=1e-3)


def _transformers_model(kind: str) -> tuple[Any, ModelArchitecture]:
    """A tiny random model and its architecture; sizes are non-square."""
    import transformers

    sizes = {
        "vocab_size": 83,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": kind == "tied",
    }
    arch = DENSE | {
        "num_layers": 3,
        "hidden_size": 40,
        "ffn_hidden_size": 56,
        "num_attention_heads": 6,
        "num_query_groups": 2,
        "head_dim": 16,
        "vocab_size": 83,
        "tie_word_embeddings": kind == "tied",
    }
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    if kind in ("dense", "tied"):
        config = transformers.Qwen3Config(**sizes, attn_implementation="eager")
        return transformers.Qwen3ForCausalLM(config), ModelArchitecture(**arch)
    if kind == "experts":
        config = transformers.Qwen3MoeConfig(
            **sizes, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, mlp_only_layers=[1], **eager
        )
        moe = {"num_experts": 8, "top_k": 3, "expert_ffn_hidden_size": 24, "moe_layers": (True, False, True)}
        return transformers.Qwen3MoeForCausalLM(config), ModelArchitecture(**arch, moe=MixtureOfExperts(**MOE | moe))
    del sizes["head_dim"]
    latent = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 10}
    latent["q_lora_rank"] = 18
    config = transformers.DeepseekV3Config(
        **sizes | {"num_key_value_heads": 6},
        **latent,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        **eager,
    )
    moe = {"num_experts": 8, "top_k": 3, "expert_ffn_hidden_size": 24, "moe_layers": (False, True, True)}
    moe |= {"shared_ffn_hidden_size": 48, "score_function": "sigmoid"}
    architecture = ModelArchitecture(
        **arch, latent_attention=LatentAttention(**latent), moe=MixtureOfExperts(**MOE | moe)
    )
    return transformers.DeepseekV3ForCausalLM(config), architecture


@pytest.mark.parametrize("kind", ["dense", "tied", "experts", "latent_attention"])
def test_formula_equals_the_flop_counter_of_torch(kind: str) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    model, arch = _transformers_model(kind)
    prompts, responses = [3, 11, 6], [7, 2, 13]
    # The model computes all pairs and masks half of them.
    expected = forward_flops(arch, TokenCounts.of(prompts, responses, causal=False)).total
    forward = update = 0
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.randint(0, 83, (1, prompt + response))
        rows = torch.arange(prompt - 1, prompt + response - 1)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(ids, logits_to_keep=rows, use_cache=False)
        forward += counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            model(ids, logits_to_keep=rows, use_cache=False).logits.sum().backward()
        update += counter.get_total_flops()
    assert forward == expected
    assert update == UPDATE_PASSES * expected


@pytest.mark.parametrize(("mode", "phases"), [("decoupled", ["actor", "actor_infer"]), ("bypass", ["actor"])])
def test_achieved_flops_of_a_step_and_their_share_of_the_peak(mode: str, phases: list[str]) -> None:
    from dapo_megatron.observability.metrics import is_declared
    from dapo_megatron.step_metrics import flop_metrics
    from tests.integration.actor_ranks import Layout, make_config, make_groups, make_ticket

    ticket = make_ticket(make_groups(vocab=17, groups=3, group_size=4, seed=5))
    config = make_config("unused", Layout(), 4, groups=3, group_size=4, algorithm={"off_policy": {"mode": mode}})
    arch = ModelArchitecture(**DENSE)
    pairs = [(g.prompt_length, int(n)) for g in ticket.groups for n in g.response_lengths]
    assert len(pairs) == 12
    forward = forward_flops(arch, TokenCounts.of([p for p, _ in pairs], [n for _, n in pairs])).total
    # 4 devices; an update is three forward passes, a log-prob pass one.
    rates = {"actor": 3 * forward / 4 / 0.5, "actor_infer": forward / 4 / 0.2}
    seconds = {"update_actor": 0.5, "old_log_prob": 0.2}

    on_cpu = flop_metrics(ticket, seconds, config, arch, peak_flops=None)
    assert on_cpu == pytest.approx({f"perf/tflops_per_gpu/{phase}": rates[phase] / 1e12 for phase in phases})
    on_cuda = flop_metrics(ticket, seconds, config, arch, peak_flops=1e9)
    assert on_cuda == pytest.approx(on_cpu | {f"perf/mfu/{phase}": rates[phase] / 1e9 for phase in phases})
    assert all(is_declared(name) for name in on_cuda)
