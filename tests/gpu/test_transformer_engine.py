"""The CUDA path: Transformer Engine layers on packed sequences, NCCL, bf16. Needs GPUs; see docs/operations.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.integration.actor_ranks import Layout, make_groups, run_layouts
from tests.integration.test_actor_layouts import float64_loss_and_gradient_norm, sequences
from tests.ranks import run_ranks
from tests.toy_models import VOCAB_SIZE, hf_logprobs, load_model, make_model

# head_dim 32 is one that Transformer Engine's fused attention supports.
SIZES = {"head_dim": 32, "hidden_size": 96, "intermediate_size": 160}


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2, sequence_parallel=True), Layout(pp=2)], ids=lambda layout: layout.name
)
def test_transformer_engine_actor_equals_transformers(tmp_path: Path, layout: Layout) -> None:
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    ranks = layout.tp * layout.pp
    if _gpus() < ranks:
        pytest.skip(f"needs {ranks} GPUs, found {_gpus()}")
    model_dir = make_model(tmp_path / "qwen3", "qwen3", seed=4, **SIZES)
    groups = make_groups(VOCAB_SIZE, 4, 3, seed=9)
    results = run_ranks(ranks, run_layouts, [(str(model_dir), layout)], groups, 3, 1, timeout_s=300)
    model = load_model(model_dir)
    seen: dict[int, np.ndarray] = {}
    for rank in results:
        seen |= rank[f"qwen3/{layout.name}"]["logprobs"]
    reference = [hf_logprobs(model, [*p, *r])[len(p) - 1 :].numpy() for p, r in sequences(groups)]
    assert sorted(seen) == list(range(12))
    # TF32 and fused kernels differ from float32 matrix products on a CPU.
    assert max(np.abs(seen[i] - reference[i]).max() for i in seen) < 2e-2
    loss, grad_norm, scale = float64_loss_and_gradient_norm(model_dir, groups)
    outcome = results[0][f"qwen3/{layout.name}"]
    assert abs(outcome["metrics"]["loss"] - loss) < 2e-2 * scale
    assert outcome["grad_norm"] == pytest.approx(grad_norm, rel=5e-2)


def test_cuda_platform_reports_its_device() -> None:
    if not _gpus():
        pytest.skip("needs a GPU, found none")
    from dapo_megatron.platform import current_platform

    platform = current_platform()
    assert platform.name == "cuda" and platform.dist_backend == "nccl"
    assert platform.memory_stats().total > 2**30
    peak = platform.peak_flops(torch.bfloat16)
    assert peak is None or 1e13 < peak < 1e16
