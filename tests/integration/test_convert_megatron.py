"""Converted checkpoints in real Megatron models at several layouts, and real Megatron checkpoints converted back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint_convert.convert import Options, hf_to_megatron, megatron_to_hf
from tests.hf_folders import assert_same_weights
from tests.integration.actor_ranks import Layout
from tests.integration.convert_ranks import load_and_save
from tests.ranks import run_ranks
from tests.toy_models import make_model

# 77 rows are padded to 78 over two ranks and to 80 over four.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-untied": {"family": "qwen3", "vocab_size": 77, "num_hidden_layers": 4},
    "qwen2-tied": {"family": "qwen2", "tie": True, "vocab_size": 77},
    "qwen3_moe": {"family": "qwen3_moe"},
    "glm4_moe": {"family": "glm4_moe", "vocab_size": 77},
    "deepseek_v3": {"family": "deepseek_v3"},
}
TP2PP2 = Layout(tp=2, pp=2)
LAYOUTS = {
    "qwen3-untied": [TP2PP2, Layout(tp=4), Layout(pp=2, vp=2)],
    "qwen2-tied": [TP2PP2, Layout(tp=4), Layout(tp=2, sequence_parallel=True)],
    "qwen3_moe": [Layout(tp=2, sequence_parallel=True, ep=4, etp=1), Layout(tp=4, sequence_parallel=True), Layout(ep=2)],
    "glm4_moe": [Layout(tp=2, sequence_parallel=True, ep=2, etp=2), Layout(tp=4, sequence_parallel=True), Layout(ep=4)],
    "deepseek_v3": [Layout(tp=2, sequence_parallel=True, ep=2, etp=1), Layout(tp=4, sequence_parallel=True), Layout(ep=2)],
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("convert")


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Results of all ranks by model and layout; each model is saved by Megatron at its first layout."""
    cases = []
    for seed, (name, settings) in enumerate(MODELS.items()):
        folder = make_model(root / name, seed=seed, **settings)
        checkpoint = hf_to_megatron(folder, root / f"{name}-megatron", Options(durable=False))
        for layout in LAYOUTS[name]:
            save_to = str(root / f"{name}-saved") if layout == LAYOUTS[name][0] else None
            cases.append((str(folder), str(checkpoint), layout, save_to))
    results = run_ranks(4, load_and_save, cases, timeout_s=280, daemon=False)
    return {
        (Path(model).name, layout.name): [rank[index] for rank in results]
        for index, (model, _, layout, _) in enumerate(cases)
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_checkpoint_loads_bit_for_bit_at_every_layout(
    runs: dict[tuple[str, str], list[dict[str, Any]]], name: str
) -> None:
    for layout in LAYOUTS[name]:
        ranks = runs[name, layout.name]
        assert all(rank["parameters"] for rank in ranks)
        assert [rank["different"] for rank in ranks] == [[], [], [], []], layout.name


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_that_megatron_saved_converts_bit_for_bit(
    runs: dict[tuple[str, str], list[dict[str, Any]]], root: Path, name: str
) -> None:
    out = megatron_to_hf(root / f"{name}-saved", root / f"{name}-out", Options(durable=False), hf_source=root / name)
    assert_same_weights(root / name, out)
