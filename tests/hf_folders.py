"""Comparing Hugging Face folders in tests."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpoint_convert.hf import HFReader


def assert_same_weights(first: Path, second: Path) -> None:
    """The two folders hold the same tensors, bit for bit; read with safetensors itself, not with the converter."""
    with HFReader(first) as a, HFReader(second) as b:
        assert sorted(a.names) == sorted(b.names)
        for name in a.names:
            expected, actual = a.tensor(name), b.tensor(name)
            assert expected.dtype == actual.dtype and expected.shape == actual.shape, name
            assert torch.equal(expected.view(torch.uint8), actual.view(torch.uint8)), name
