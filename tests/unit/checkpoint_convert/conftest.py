"""The four shapes of model that the checkpoint tests run on, written once per session by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.toy_models import make_model

VARIANTS = ("llama", "llama-tied", "qwen2", "qwen3-tied")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a random model: hidden 48, ffn 112, vocabulary 79, 4 heads, 2 key/value heads, 2 layers. Do not write into it."""
    made: dict[str, Path] = {}

    def folder(variant: str) -> Path:
        if variant not in made:
            family, _, tied = variant.partition("-")
            made[variant] = make_model(tmp_path_factory.mktemp(variant), family, tie=tied == "tied", seed=len(made))
        return made[variant]

    return folder
