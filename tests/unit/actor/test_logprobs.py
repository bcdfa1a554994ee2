"""Vocab-parallel log-probs and entropies against a float64 softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch

from dapo_megatron.actor.logprobs import vocab_parallel_logprobs
from tests.ranks import run_ranks

VOCAB, PADDED, ROWS = 11, 14, 9


def _inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS + 4, PADDED, generator=g, dtype=torch.float64) * 6
    rows = torch.randperm(ROWS + 4, generator=g)[:ROWS]
    targets = torch.randint(VOCAB, (ROWS,), generator=g)
    weight_lp = torch.randn(ROWS, generator=g, dtype=torch.float64)
    weight_ent = torch.randn(ROWS, generator=g, dtype=torch.float64)
    return logits, rows, targets, weight_lp, weight_ent


def _reference(seed: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, rows, targets, weight_lp, weight_ent = _inputs(seed)
    logits.requires_grad_()
    logp = torch.log_softmax(logits[rows, :VOCAB] / temperature, -1)
    picked = logp.gather(1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    (picked @ weight_lp + entropy @ weight_ent).backward()
    return picked.detach(), entropy.detach(), logits.grad


def _ours(
    seed: int, temperature: float, chunk: int, tp_rank: int, tp_size: int, group: object
) -> tuple[torch.Tensor, ...]:
    logits, rows, targets, weight_lp, weight_ent = _inputs(seed)
    local = PADDED // tp_size
    shard = logits[:, tp_rank * local : (tp_rank + 1) * local].float().clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(
        shard, rows, targets, temperature=temperature, vocab_size=VOCAB, tp_rank=tp_rank, tp_group=group, chunk=chunk
    )
    (logprobs.double() @ weight_lp + entropy.double() @ weight_ent).backward()
    return logprobs.detach(), entropy.detach(), shard.grad


@pytest.mark.parametrize("chunk", [1, 4, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_one_rank_equals_float64_softmax_with_gradients(chunk: int, temperature: float) -> None:
    expected = _reference(3, temperature)
    actual = _ours(3, temperature, chunk, 0, 1, None)
    for ours, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=2e-5, atol=4e-6)
    assert actual[2][:, VOCAB:].abs().max() == 0, "padding columns of the vocabulary must take no gradient"


def _on_rank(seed: int, temperature: float) -> tuple[torch.Tensor, ...]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    result = _ours(seed, temperature, 4, rank, size, dist.group.WORLD)
    dist.destroy_process_group()
    return tuple(t.numpy() for t in result)


def test_two_ranks_equal_float64_softmax_with_gradients() -> None:
    expected = _reference(5, 0.7)
    shards = run_ranks(2, _on_rank, 5, 0.7)
    for logprobs, entropy, _ in shards:
        torch.testing.assert_close(torch.from_numpy(logprobs).double(), expected[0], rtol=2e-5, atol=4e-6)
        torch.testing.assert_close(torch.from_numpy(entropy).double(), expected[1], rtol=2e-5, atol=4e-6)
    gradient = torch.cat([torch.from_numpy(grad) for _, _, grad in shards], dim=-1)
    torch.testing.assert_close(gradient.double(), expected[2], rtol=2e-5, atol=4e-6)


def test_no_row_at_all_gives_empty_results_and_zero_gradient() -> None:
    logits = torch.randn(3, VOCAB, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy = vocab_parallel_logprobs(logits, none, none, temperature=1.0, vocab_size=VOCAB)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert logits.grad is not None and logits.grad.abs().max() == 0
