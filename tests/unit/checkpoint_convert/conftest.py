"""The shapes of model that the checkpoint tests run on, written once per session by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.toy_models import make_model

# Variant of a family -> what it differs in from the family's toy model.
VARIANTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "deepseek_v3-direct": {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "gemma-tied": {},
    "glm": {},
    "glm4_moe": {},
    "glm4_moe-plain": {"attention_bias": False, "use_qk_norm": False},
    "llama": {},
    "llama-tied": {},
    "mistral": {},
    "mixtral-tied": {},
    "qwen2": {},
    "qwen3-tied": {},
    "qwen3_moe": {},
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a random model: hidden 48, ffn 112, vocabulary 79, 4 heads, 2 key/value heads, 2 or 3 layers. Do not write into it."""
    made: dict[str, Path] = {}

    def folder(variant: str) -> Path:
        if variant not in made:
            family, _, kind = variant.partition("-")
            seed = list(VARIANTS).index(variant)
            settings = VARIANTS[variant]
            made[variant] = make_model(tmp_path_factory.mktemp(variant), family, kind == "tied", seed, **settings)
        return made[variant]

    return folder
