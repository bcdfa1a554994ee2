"""Settings for every test: one thread per process, no network, no metrics service, markers by folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before any test imports a numerical library: two processes with two threads each crawl on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by the folder they lie in; those in tests/gpu are skipped without a CUDA device."""
    has_cuda = any(Path("/dev").glob("nvidia[0-9]*"))
    for item in items:
        parts = item.path.relative_to(_FOLDER).parts if item.path.is_relative_to(_FOLDER) else ()
        if parts[:1] == ("integration",):
            item.add_marker(pytest.mark.integration)
        if parts[:1] == ("gpu",):
            item.add_marker(pytest.mark.gpu)
            if not has_cuda:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
