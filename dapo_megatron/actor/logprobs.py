"""Log-probabilities and entropy of chosen tokens from logits that are split over tensor-parallel ranks.

The full logits are never gathered: each rank reduces its vocabulary slice to three numbers per row, and two
small all-reduces combine them. Work goes through the rows in chunks, so that float32 copies stay small.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
        vocab_start: int,
        vocab_size: int,
        chunk: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        n = rows.numel()
        # Rows of the embedding that only pad the vocabulary to a multiple of TP are not tokens: leave them out.
        valid = max(0, min(vocab_size - vocab_start, logits.shape[-1]))
        local_max = logits.new_full((n,), float("-inf"), dtype=torch.float32)
        # Sums of exp(d) and of exp(d) * d, and the target's d, where d is a logit minus the maximum: differences keep the
        # precision that large logits would cost.
        sums = logits.new_zeros((3, n), dtype=torch.float32)
        local_target = targets - vocab_start
        owned = (local_target >= 0) & (local_target < valid)
        if valid:
            for start in range(0, n, chunk):
                part = slice(start, min(start + chunk, n))
                scaled = logits[rows[part], :valid].float().div_(temperature)
                peak = scaled.amax(-1)
                local_max[part] = peak
                d = scaled.sub_(peak.unsqueeze(-1))
                exp = d.exp()
                sums[0, part] = exp.sum(-1)
                sums[1, part] = (exp * d).sum(-1)
                picked = d.gather(-1, local_target[part].clamp(0, valid - 1).unsqueeze(-1)).squeeze(-1)
                sums[2, part] = torch.where(owned[part], picked, 0.0)
        top = local_max.clone()
        if group is not None and group.size() > 1 and n:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            if valid:
                # From this rank's maximum to the global one.
                shift = local_max - top
                sums[2] += torch.where(owned, shift, 0.0)
                sums[1] = shift.exp() * (sums[1] + shift * sums[0])
                sums[0] *= shift.exp()
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        logprobs = sums[2] - log_sum
        entropy = log_sum - sums[1] / sums[0]
        log_z = top + log_sum
        ctx.save_for_backward(logits, rows, local_target, owned, log_z, entropy)  # type: ignore[attr-defined]
        ctx.temperature, ctx.valid, ctx.chunk = temperature, valid, chunk  # type: ignore[attr-defined]
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, rows, local_target, owned, log_z, entropy = ctx.saved_tensors  # type: ignore[attr-defined]
        temperature, valid, chunk = ctx.temperature, ctx.valid, ctx.chunk  # type: ignore[attr-defined]
        grad = torch.zeros_like(logits)
        if valid:
            for start in range(0, rows.numel(), chunk):
                part = slice(start, min(start + chunk, rows.numel()))
                logp = logits[rows[part], :valid].float().div_(temperature).sub_(log_z[part].unsqueeze(-1))
                p = logp.exp()
                # d logprob / d logit = onehot - p;  d entropy / d logit = -p (log p + H)
                g = p * (
                    -grad_logprobs[part].unsqueeze(-1)
                    - grad_entropy[part].unsqueeze(-1) * (logp + entropy[part].unsqueeze(-1))
                )
                index = local_target[part].clamp(0, valid - 1).unsqueeze(-1)
                g.scatter_add_(-1, index, torch.where(owned[part], grad_logprobs[part], 0.0).unsqueeze(-1))
                grad[rows[part], :valid] = g.div_(temperature).to(grad.dtype)
        return grad, None, None, None, None, None, None, None


def vocab_parallel_logprobs(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    tp_rank: int = 0,
    tp_group: dist.ProcessGroup | None = None,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets[i]` at row `rows[i]`, and the entropy there, under softmax(logits / temperature).

    Args:
        logits: `[T, V / tp]`, this rank's slice of the padded vocabulary; any float dtype.
        rows: int64 `[R]`, distinct rows; targets: int64 `[R]`, global token ids below `vocab_size`.
        vocab_size: true vocabulary; padding columns beyond it take no probability.
        chunk: rows handled at a time.

    Returns:
        Two float32 `[R]` tensors, equal on all ranks of `tp_group`, both differentiable with respect to `logits`.
    """
    vocab_start = tp_rank * logits.shape[-1]
    return _VocabParallelLogprobs.apply(logits, rows, targets, temperature, vocab_start, vocab_size, chunk, tp_group)
