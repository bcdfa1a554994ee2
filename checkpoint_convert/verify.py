"""Comparing two checkpoints of either format: configuration, every tensor, and the outputs of the models."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_convert.byte_stream import CHUNK_BYTES
from checkpoint_convert.convert import Options, megatron_to_hf
from checkpoint_convert.sources import Source, architecture_differences, open_checkpoint

_SAMPLE_SEED = 0
_SAMPLE_SHAPE = (4, 64)  # sequences, tokens


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same. `max_abs` is the largest difference; None where shapes differ."""

    name: str
    reason: str
    max_abs: float | None


@dataclass
class Comparison:
    """What two checkpoints differ in; empty if they agree.

    Attributes:
        compared: number of tensors that both have.
        config: fields of the architecture that differ.
        logits: largest difference of the models' logits, None if they were not compared.
    """

    compared: int = 0
    config: list[str] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    tensors: list[Difference] = field(default_factory=list)
    logits: float | None = None
    logits_agree: bool = True

    @property
    def agree(self) -> bool:
        lists = (self.config, self.only_first, self.only_second, self.tensors)
        return self.logits_agree and not any(lists)


def compare(
    first: Path,
    second: Path,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    logits: bool = False,
    hf_source: Path | None = None,
    progress: Callable[[int, int, int], None] = lambda *_: None,
) -> Comparison:
    """Compare two checkpoints tensor by tensor.

    Args:
        atol, rtol: `|a - b| <= atol + rtol * |b|`, computed in float32, whatever the dtypes; both 0 asks for the same
            dtype and the same bits.
        logits: also run both models with transformers on random tokens and compare the logits by the same rule.
        hf_source: config.json and tokenizer of a Megatron checkpoint that has none.
        progress: called with bytes compared, bytes in all and 0.

    Raises:
        CheckpointError: one cannot be read.
    """
    a, b = open_checkpoint(first, hf_source), open_checkpoint(second, hf_source)
    result = Comparison(config=architecture_differences(a.arch, b.arch))
    result.only_first = [name for name in a.shapes if name not in b.shapes]
    result.only_second = [name for name in b.shapes if name not in a.shapes]
    common = [name for name in a.shapes if name in b.shapes]
    sizes = {name: torch.Size(a.shapes[name]).numel() * a.dtype(name).itemsize for name in common}
    done, total = 0, sum(sizes.values())
    for name in common:
        difference = _compare_tensor(name, a, b, atol, rtol)
        if difference is not None:
            result.tensors.append(difference)
        result.compared += 1
        done += sizes[name]
        progress(done, total, 0)
    if logits and not (result.config or result.only_first or result.only_second):
        with tempfile.TemporaryDirectory(prefix="dapo-verify-") as folder:
            outputs = [_logits(source, Path(folder) / str(i)) for i, source in enumerate((a, b))]
        result.logits = float((outputs[0] - outputs[1]).abs().max())
        exact = not atol and not rtol
        result.logits_agree = (
            torch.equal(outputs[0], outputs[1])
            if exact
            else torch.allclose(outputs[0], outputs[1], atol=atol, rtol=rtol)
        )
    return result


def _compare_tensor(name: str, a: Source, b: Source, atol: float, rtol: float) -> Difference | None:
    if a.shapes[name] != b.shapes[name]:
        return Difference(name, f"shape {list(a.shapes[name])} and {list(b.shapes[name])}", None)
    exact = not atol and not rtol
    if exact and a.dtype(name) != b.dtype(name):
        return Difference(name, f"dtype {a.dtype(name)} and {b.dtype(name)}", None)
    x, y = (source.tensor(name).reshape(-1) for source in (a, b))
    step = CHUNK_BYTES // 4
    unequal, largest = 0, 0.0
    for start in range(0, x.numel(), step):
        p, q = x[start : start + step], y[start : start + step]
        if exact and torch.equal(p.view(torch.uint8), q.view(torch.uint8)):
            continue
        gap = (p.float() - q.float()).abs()
        # Equal infinities differ by NaN, and NaN is never close.
        gap = gap.masked_fill(p.float() == q.float(), 0.0)
        wrong = _bits_differ(p, q) if exact else ~(gap <= atol + rtol * q.float().abs())
        unequal += int(wrong.sum())
        largest = max(largest, float(gap.nan_to_num(nan=float("inf")).max()))
        for source in (a, b):
            source.files.drop()
    for source in (a, b):
        source.files.drop()
    return Difference(name, f"{unequal} of {x.numel()} numbers differ", largest) if unequal else None


def _bits_differ(p: Tensor, q: Tensor) -> Tensor:
    size = p.dtype.itemsize
    return (p.view(torch.uint8) != q.view(torch.uint8)).view(-1, size).any(dim=1)


def _logits(source: Source, temporary: Path) -> Tensor:
    """float32 `[sequences, tokens, vocabulary]` of random tokens, the same for every model of a vocabulary size."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = source.folder
    if source.kind == "megatron":
        folder = megatron_to_hf(source.folder, temporary, Options(durable=False), hf_source=source.hf_folder)
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto", local_files_only=True).eval()
    generator = torch.Generator().manual_seed(_SAMPLE_SEED)
    tokens = torch.randint(0, source.arch.vocab_size, _SAMPLE_SHAPE, generator=generator)
    with torch.no_grad():
        logits: Tensor = model(tokens).logits.float()
    return logits
