"""The CUDA path: Transformer Engine layers on packed sequences, NCCL, context parallelism, FP8. See docs/operations.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.integration.actor_ranks import Layout, make_groups, run_layouts
from tests.integration.test_actor_layouts import float64_reference, sequences
from tests.ranks import run_ranks
from tests.toy_models import VOCAB_SIZE, hf_logprobs, load_model, make_model

# head_dim 32 is one that Transformer Engine's fused attention supports; FP8 wants multiples of 16.
SIZES = {"head_dim": 32, "hidden_size": 96, "intermediate_size": 160}
OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

CASES: list[tuple[str, Layout]] = [
    ("qwen3", Layout()),
    ("qwen3", Layout(padded=True)),
    ("qwen3", Layout(label="recompute", megatron=RECOMPUTE)),
    ("qwen3", Layout(dtype="bfloat16")),
    ("qwen3", Layout(dtype="bfloat16", label="offload", megatron=OFFLOAD)),
    ("qwen3", Layout(dtype="bfloat16", padded=True, label="fp8", megatron=FP8)),
    ("qwen3", Layout(tp=2, sequence_parallel=True)),
    ("qwen3", Layout(pp=2)),
    ("qwen3", Layout(pp=2, vp=2, max_tokens=90)),
    ("qwen3", Layout(cp=2)),
    ("qwen3", Layout(tp=2, cp=2, sequence_parallel=True)),
    ("qwen3_moe", Layout(ep=2)),
    ("qwen3_moe", Layout(tp=2, ep=2, etp=1, sequence_parallel=True)),
    ("deepseek_v3", Layout(tp=2, sequence_parallel=True)),
]


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.parametrize(("family", "layout"), CASES, ids=[f"{family}-{layout.name}" for family, layout in CASES])
def test_transformer_engine_actor_equals_transformers(tmp_path: Path, family: str, layout: Layout) -> None:
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    ranks = layout.tp * layout.pp * layout.cp * (layout.ep if layout.tp == 1 else 1)
    if _gpus() < ranks:
        pytest.skip(f"needs {ranks} GPUs, found {_gpus()}")
    sizes: dict[str, Any] = {} if family == "deepseek_v3" else SIZES
    model_dir = make_model(tmp_path / family, family, seed=4, **sizes, num_hidden_layers=4)
    groups = make_groups(VOCAB_SIZE, 4, 3, seed=9)
    results = run_ranks(ranks, run_layouts, [(str(model_dir), layout)], groups, 3, 1, timeout_s=300)
    model = load_model(model_dir)
    seen: dict[int, np.ndarray] = {}
    for rank in results:
        seen |= rank[f"{family}/{layout.name}"]["logprobs"]
    expected = [hf_logprobs(model, [*p, *r])[len(p) - 1 :].numpy() for p, r in sequences(groups)]
    assert sorted(seen) == list(range(12))
    errors = np.concatenate([np.abs(seen[i] - expected[i]) for i in seen])
    # TF32 and fused kernels differ from float32 matrix products on a CPU; bfloat16 and FP8 by far more.
    if layout.dtype == "float32":
        assert errors.max() < 2e-2
    else:
        assert errors.mean() < (0.4 if layout.label == "fp8" else 0.1)
    reference = float64_reference(model_dir, groups)
    outcome = results[0][f"{family}/{layout.name}"]
    rel = 5e-2 if layout.dtype == "float32" else 0.3
    assert abs(outcome["metrics"]["loss"] - reference.loss) < rel * reference.scale
    assert outcome["grad_norm"] == pytest.approx(reference.grad_norm, rel=rel)


def test_optimizer_offload_trains_as_without_it(tmp_path: Path) -> None:
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    if not _gpus():
        pytest.skip("needs a GPU, found none")
    model_dir = make_model(tmp_path / "qwen3", "qwen3", seed=4, **SIZES)
    groups = make_groups(VOCAB_SIZE, 4, 3, seed=9)
    plain, offload = Layout(dtype="bfloat16"), Layout(dtype="bfloat16", label="offload", megatron=OFFLOAD)
    cases = [(str(model_dir), plain), (str(model_dir), offload)]
    run_ranks(1, run_layouts, cases, groups, 3, 3, str(tmp_path), timeout_s=300)
    before = load_file(model_dir / "model.safetensors")
    expected, found = (load_file(tmp_path / f"qwen3@{layout.name}.weights.safetensors") for layout in (plain, offload))
    moved = sum(float((expected[name] - before[name].float()).norm()) for name in expected)
    differ = sum(float((expected[name] - found[name]).norm()) for name in expected)
    assert differ < 0.05 * moved


def test_cuda_platform_reports_its_device() -> None:
    if not _gpus():
        pytest.skip("needs a GPU, found none")
    from dapo_megatron.platform import current_platform

    platform = current_platform()
    assert platform.name == "cuda" and platform.dist_backend == "nccl"
    assert platform.memory_stats().total > 2**30
    peak = platform.peak_flops(torch.bfloat16)
    assert peak is None or 1e13 < peak < 1e16
