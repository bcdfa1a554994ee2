"""The transfer plan on random models and layouts, carried out on NumPy shards."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_convert.architecture import ModelArchitecture
from checkpoint_convert.mapping import LayerSpec, ParamMapping, build_mapping, hf_shapes, layer_of
from checkpoint_convert.parts import LatentAttention, MixtureOfExperts
from dapo_megatron.resharder.plan import Destination, SourceLayout, TransferPlan, build_plan

Shards = dict[int, dict[str, np.ndarray]]
Case = tuple[ModelArchitecture, LayerSpec, SourceLayout, Destination]

DENSE = ModelArchitecture(
    family="qwen3",
    num_layers=4,
    hidden_size=24,
    ffn_hidden_size=40,
    num_attention_heads=8,
    num_query_groups=2,
    head_dim=6,
    vocab_size=37,
    max_position_embeddings=64,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    qkv_bias=False,
    qk_norm=True,
    tie_word_embeddings=False,
)
LATENT = LatentAttention(q_lora_rank=32, kv_lora_rank=20, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)


def experts(num_experts: int, moe_layers: tuple[bool, ...], bias: bool) -> MixtureOfExperts:
    return MixtureOfExperts(
        num_experts=num_experts,
        top_k=2,
        expert_ffn_hidden_size=16,
        shared_ffn_hidden_size=32 if bias else None,
        moe_layers=moe_layers,
        score_function="sigmoid" if bias else "softmax",
        renormalize=True,
        num_groups=None,
        group_top_k=None,
        scaling_factor=1.0,
        expert_bias=bias,
    )


@st.composite
def stages(draw: st.DrawFn, layers: int, pp: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Layers of every (pp, vp) stage: even or uneven, with up to three interleaved chunks, some of them empty."""
    vp = draw(st.integers(1, 3)) if pp > 1 else 1
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=pp * vp - 1, max_size=pp * vp - 1)))
    bounds = [0, *cuts, layers]
    chunks = [tuple(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]
    return tuple(tuple(chunks[v * pp + p] for v in range(vp)) for p in range(pp))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers = draw(st.integers(1, 5))
    tp = draw(st.sampled_from([1, 2, 4, 8]))  # 4 and 8 are more than the key/value heads
    cp, dp, pp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 3))
    stage_size = tp * cp * dp
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"]))
    moe = None
    ep, etp = 1, tp
    if family in ("qwen3_moe", "deepseek_v3"):
        etp = draw(st.sampled_from([size for size in (1, 2, 4, 8) if stage_size % size == 0]))
        ep = draw(st.sampled_from([size for size in (1, 2, 3, 4) if stage_size % (size * etp) == 0]))
        num_experts = ep * draw(st.integers(1, 3))
        dense_first = draw(st.integers(0, layers - 1))
        moe = experts(num_experts, tuple(layer >= dense_first for layer in range(layers)), bias=family == "deepseek_v3")
    arch = dataclasses.replace(
        DENSE,
        family=family,
        num_layers=layers,
        vocab_size=draw(st.sampled_from([37, 40])),  # with and without padding
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
        tie_word_embeddings=draw(st.booleans()),
        latent_attention=LATENT if family == "deepseek_v3" else None,
        moe=moe,
    )
    source = SourceLayout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, stages=draw(stages(layers, pp)))
    destination = Destination(
        itemsize=draw(st.sampled_from([2, 4])),
        bucket_bytes=draw(st.sampled_from([1, 3_000, 20_000, 10**9])),
        max_publishers=draw(st.sampled_from([1, 2, 4, 8, 64])),
    )
    return arch, draw(st.sampled_from(["local", "te"])), source, destination


def model_tensors(mapping: dict[str, ParamMapping]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in hf_shapes(mapping).items()}


def shards_of_all_ranks(mapping: dict[str, ParamMapping], source: SourceLayout, hf: dict[str, np.ndarray]) -> Shards:
    """What each rank holds, from Megatron's own rank generator and not from the plan's arithmetic."""
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=source.tp, ep=1, dp=source.dp, pp=source.pp, cp=source.cp, order=order)
    expert_dp = source.tp * source.cp * source.dp // (source.etp * source.ep)
    routed = RankGenerator(tp=source.etp, ep=source.ep, dp=expert_dp, pp=source.pp, cp=1, order=order)

    def place(generator: RankGenerator, axis: str) -> dict[int, int]:
        return {rank: i for group in generator.get_ranks(axis) for i, rank in enumerate(group)}

    tp_rank, pp_rank = place(dense, "tp"), place(dense, "pp")
    etp_rank, ep_rank = place(routed, "tp"), place(routed, "ep")
    num_experts = 1 + max((e.expert for e in mapping.values() if e.expert is not None), default=-1)
    held: Shards = {rank: {} for rank in range(len(pp_rank))}
    for key, entry in mapping.items():
        tensors = [torch.from_numpy(hf[name]) for name in entry.hf]
        layer = layer_of(key)
        for rank, stage in pp_rank.items():
            if layer is not None:
                here = any(layer in chunk for chunk in source.stages[stage])
            else:
                here = stage == (0 if key.startswith("embedding.") else source.pp - 1)
            if entry.expert is not None:
                here = here and entry.expert // (num_experts // source.ep) == ep_rank[rank]
                shard = entry.split(tensors, etp_rank[rank], source.etp) if here else None
            else:
                shard = entry.split(tensors, tp_rank[rank], source.tp) if here else None
            if shard is not None:
                held[rank][key] = shard.numpy()
    return held


def execute(plan: TransferPlan, mapping: dict[str, ParamMapping], held: Shards) -> dict[str, np.ndarray]:
    """What one group of engines gets; a tensor that came twice or a shard that is not where the plan says fails."""
    received: dict[str, np.ndarray] = {}
    for turn, bucket in enumerate(plan.buckets):
        assert bucket.turn == turn
        assert bucket.publisher in bucket.group
        size = 0
        for key, split in zip(bucket.keys, bucket.split, strict=True):
            ranks = bucket.group if split else (bucket.publisher,)
            for name, tensor in mapping[key].merge([torch.from_numpy(held[rank][key]) for rank in ranks]):
                assert name not in received
                received[name] = tensor.numpy()
                size += tensor.numel()
        assert bucket.bytes >= 2 * size
    return received


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_executing_the_plan_reproduces_every_tensor_once(case: Case) -> None:
    arch, spec, source, destination = case
    mapping = build_mapping(arch, spec)
    hf = model_tensors(mapping)
    plan = build_plan(mapping, source, destination)
    received = execute(plan, mapping, shards_of_all_ranks(mapping, source, hf))
    assert received.keys() == hf.keys()
    for name, tensor in hf.items():
        np.testing.assert_array_equal(received[name], tensor, err_msg=name)
    biases = sum(t.size for name, t in hf.items() if name.endswith("e_score_correction_bias"))
    everything = sum(t.size for t in hf.values())
    assert plan.bytes == destination.itemsize * (everything - biases) + 4 * biases


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_buckets_are_full_and_publishers_within_their_limit(case: Case) -> None:
    arch, spec, source, destination = case
    mapping = build_mapping(arch, spec)
    plan = build_plan(mapping, source, destination)
    assert len(plan.publishers) <= max(destination.max_publishers, source.pp * source.ep)
    assert set(plan.load()) == set(plan.publishers)
    small = Counter(bucket.publisher for bucket in plan.buckets if bucket.bytes < destination.bucket_bytes)
    assert all(count <= 2 for count in small.values())  # the last of each kind
    for bucket in plan.buckets:  # closed by the parameter that fills it
        last = mapping[bucket.keys[-1]]
        size = sum(math.prod(shape) for shape in last.hf_shapes) * destination.itemsize
        assert bucket.bytes - size < destination.bucket_bytes or last.buffer


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_load_of_a_dense_stage_differs_by_at_most_one_parameter(case: Case) -> None:
    arch, spec, source, destination = case
    mapping = build_mapping(
        dataclasses.replace(arch, moe=None, latent_attention=None, family="llama", qkv_bias=False), spec
    )
    source = dataclasses.replace(source, ep=1, etp=source.tp)
    plan = build_plan(mapping, source, destination)
    load = plan.load()
    for stage in range(source.pp):
        loads = [load[rank] for rank in source.stage_ranks(stage) if rank in load]
        keys = [key for b in plan.buckets if b.publisher in source.stage_ranks(stage) for key in b.keys]
        if keys:
            largest = max(sum(math.prod(s) for s in mapping[key].hf_shapes) for key in keys) * destination.itemsize
            assert max(loads) <= sum(loads) / len(loads) + largest


def even_stages(layers: int, pp: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    size = layers // pp
    return tuple((tuple(range(stage * size, (stage + 1) * size)),) for stage in range(pp))


DEEP = dataclasses.replace(DENSE, num_layers=32)
DEEP_EXPERTS = dataclasses.replace(DEEP, family="qwen3_moe", moe=experts(8, (True,) * 32, bias=False))


@pytest.mark.parametrize(
    ("arch", "source", "publishers"),
    [
        (DEEP, SourceLayout(tp=2, cp=1, dp=2, pp=2, ep=1, etp=2, stages=even_stages(32, 2)), 8),
        (DEEP, SourceLayout(tp=4, cp=2, dp=1, pp=1, ep=1, etp=4, stages=even_stages(32, 1)), 8),
        (DEEP_EXPERTS, SourceLayout(tp=2, cp=1, dp=4, pp=2, ep=4, etp=1, stages=even_stages(32, 2)), 16),
        (DEEP_EXPERTS, SourceLayout(tp=2, cp=1, dp=2, pp=1, ep=2, etp=2, stages=even_stages(32, 1)), 4),
    ],
    ids=["tp2-dp2-pp2", "tp4-cp2", "tp2-dp4-pp2-ep4", "tp2-dp2-ep2-etp2"],
)
def test_load_of_a_deep_model_is_within_a_tenth_of_even(
    arch: ModelArchitecture, source: SourceLayout, publishers: int
) -> None:
    mapping = build_mapping(arch, "local")
    plan = build_plan(mapping, source, Destination(itemsize=2, bucket_bytes=10_000, max_publishers=64))
    load = plan.load()
    assert len(load) == publishers == source.world_size  # every rank has a share
    for stage in range(source.pp):
        loads = [load[rank] for rank in source.stage_ranks(stage)]
        mean = sum(loads) / len(loads)
        assert max(abs(value - mean) for value in loads) < 0.1 * mean


def test_a_limit_takes_replicas_before_members_of_one_replica() -> None:
    source = SourceLayout(tp=2, cp=1, dp=3, pp=1, ep=1, etp=2, stages=even_stages(32, 1))
    mapping = build_mapping(DEEP, "local")
    plans = {
        limit: build_plan(mapping, source, Destination(itemsize=2, bucket_bytes=10_000, max_publishers=limit))
        for limit in (1, 3, 4)
    }
    assert set(plans[1].publishers) == {0}
    assert set(plans[3].publishers) == {0, 2, 4}
    assert set(plans[4].publishers) == {0, 2, 4, 1}


def test_neighbouring_turns_have_different_publishers() -> None:
    source = SourceLayout(tp=2, cp=1, dp=1, pp=2, ep=1, etp=2, stages=even_stages(32, 2))
    plan = build_plan(
        build_mapping(DEEP, "local"), source, Destination(itemsize=2, bucket_bytes=20_000, max_publishers=4)
    )
    senders = [bucket.publisher for bucket in plan.buckets]
    assert len(senders) >= 16
    assert all(a != b for a, b in zip(senders, senders[1:], strict=False))
    assert sorted(senders[:4]) == [0, 1, 2, 3]


def test_a_tied_copy_is_not_sent_and_a_replicated_tensor_needs_no_gather() -> None:
    source = SourceLayout(tp=4, cp=1, dp=1, pp=2, ep=1, etp=4, stages=even_stages(4, 2))
    mapping = build_mapping(dataclasses.replace(DENSE, tie_word_embeddings=True), "local")
    plan = build_plan(mapping, source, Destination(itemsize=4, bucket_bytes=1, max_publishers=8))
    buckets = {key: bucket for bucket in plan.buckets for key in bucket.keys}
    assert "output_layer.weight" in mapping and "output_layer.weight" not in buckets
    norm = buckets["decoder.final_layernorm.weight"]
    assert norm.group == (norm.publisher,)
    assert norm.publisher in source.stage_ranks(1)
    assert buckets["embedding.word_embeddings.weight"].group == (0, 1, 2, 3)


def test_a_layout_that_lacks_or_repeats_a_layer_is_refused() -> None:
    mapping = build_mapping(DENSE, "local")
    destination = Destination(itemsize=2, bucket_bytes=1, max_publishers=1)

    def layout(stages: tuple[tuple[tuple[int, ...], ...], ...]) -> SourceLayout:
        return SourceLayout(tp=1, cp=1, dp=1, pp=2, ep=1, etp=1, stages=stages)

    with pytest.raises(ValueError, match=r"no pipeline stage holds layers \[3\]"):
        build_plan(mapping, layout((((0, 1),), ((2,),))), destination)
    with pytest.raises(ValueError, match="layer 1 is in pipeline stages 0 and 1"):
        build_plan(mapping, layout((((0, 1),), ((1, 2, 3),))), destination)
    with pytest.raises(ValueError, match="8 experts cannot be shared by 3"):
        source = SourceLayout(tp=3, cp=1, dp=1, pp=1, ep=3, etp=1, stages=even_stages(32, 1))
        build_plan(build_mapping(DEEP_EXPERTS, "local"), source, destination)
