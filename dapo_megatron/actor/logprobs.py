"""Log-probabilities and entropy of chosen tokens under an output layer that is split over tensor-parallel ranks.

The logits never exist, neither gathered nor as a rank's own slice: each rank goes over its vocabulary slice tile by tile,
reduces it to three numbers per row, and two small all-reduces combine them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of a tile of logits: large enough to keep a matrix product busy, small enough to stay in a cache between passes.
_TILE_ELEMENTS = 1 << 22


class _LinearLogprobs(torch.autograd.Function):
    """The output layer, its softmax and the choice of the targets as one operation that goes over tiles of the logits.

    A tile is `chunk` rows (or fewer) by a block of the vocabulary. Blocks are the outer loop: the weight is read once,
    and the weight gradient of a block is finished before the next one begins. With d a scaled logit minus the largest of
    its row, a row is left with the sums of exp(d) and of exp(d) * d; differences keep the precision that large logits
    would cost. The backward pass computes each tile again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        vocab_start: int,
        vocab_size: int,
        chunk: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # Rows of the weight that only pad the vocabulary to a multiple of TP are not tokens: leave them out.
        valid = max(0, min(vocab_size - vocab_start, weight.shape[0]))
        local_target = targets - vocab_start
        tiles = _Tiles(hidden, weight, temperature, valid, chunk)
        n = hidden.shape[0]
        top = torch.full((n,), float("-inf"), dtype=tiles.dtype, device=hidden.device)
        total, weighted, target_logit = torch.zeros((3, n), dtype=tiles.dtype, device=hidden.device)
        for columns in tiles.columns():
            for part in tiles.rows():
                d = tiles.logits(part, columns)
                index, inside = _inside(local_target[part], columns)
                target_logit[part] = torch.where(inside, d.gather(-1, index).squeeze(-1), target_logit[part])
                peak = d.amax(-1)
                d.sub_(peak.unsqueeze(-1))
                exp = torch.exp(d, out=tiles.spare(d))
                block_total = exp.sum(-1)
                block_weighted = exp.mul_(d).sum(-1)
                if columns.start:
                    both = torch.maximum(peak, top[part])
                    block_total, block_weighted = _shifted(block_total, block_weighted, peak - both)
                    old_total, old_weighted = _shifted(total[part], weighted[part], top[part] - both)
                    peak, block_total, block_weighted = both, block_total + old_total, block_weighted + old_weighted
                top[part], total[part], weighted[part] = peak, block_total, block_weighted
        if group is not None and group.size() > 1 and n:
            local_top = top.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            if valid:
                total, weighted = _shifted(total, weighted, local_top - top)
            owned = (local_target >= 0) & (local_target < valid)
            sums = torch.stack((total, weighted, torch.where(owned, target_logit - top, 0.0)))
            dist.all_reduce(sums, group=group)
            total, weighted, target_d = sums
        else:
            target_d = target_logit - top
        mean_d = weighted / total
        log_total = total.log()
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(hidden, weight, local_target, top, total, mean_d)
            ctx.temperature, ctx.valid, ctx.chunk = temperature, valid, chunk
        # An id that no rank has would pass for one whose logit is the maximum: make it visible.
        known = (targets >= 0) & (targets < vocab_size)
        return torch.where(known, target_d - log_total, float("nan")), log_total - mean_d

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local_target, top, total, mean_d = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        tiles = _Tiles(hidden, weight, ctx.temperature, ctx.valid, ctx.chunk)
        grad_hidden = torch.zeros_like(hidden, dtype=tiles.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        if grad_weight is not None:
            grad_weight[ctx.valid if len(hidden) else 0 :] = 0
        # d logprob / d logit = onehot - p;  d entropy / d logit = -p (log p + H), where log p + H = d - mean d.
        at_target = torch.zeros_like(top) if grad_logprobs is None else grad_logprobs / ctx.temperature
        factor = -at_target / total
        if grad_entropy is not None:
            slope = grad_entropy / (-ctx.temperature * total)
            factor = factor - slope * mean_d
        for columns in tiles.columns():
            block = None if grad_weight is None else tiles.sum_of_rows(grad_weight[columns])
            for part in tiles.rows():
                d = tiles.logits(part, columns).sub_(top[part].unsqueeze(-1))
                if grad_entropy is None:
                    grad = d.exp_().mul_(factor[part].unsqueeze(-1))
                else:
                    exp = torch.exp(d, out=tiles.spare(d))
                    grad = d.mul_(slope[part].unsqueeze(-1)).add_(factor[part].unsqueeze(-1)).mul_(exp)
                index, inside = _inside(local_target[part], columns)
                grad.scatter_add_(-1, index, torch.where(inside, at_target[part], 0.0).unsqueeze(-1))
                grad = tiles.lowered(grad)
                if grad_hidden is not None:
                    _add_product(grad_hidden[part], grad, tiles.weight[columns], first=not columns.start)
                if block is not None:
                    _add_product(block, grad.t(), tiles.hidden[part], first=not part.start)
            if grad_weight is not None and block is not None and block.dtype != weight.dtype:
                grad_weight[columns] = block
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


class _Tiles:
    """The tiles that cover the logits of `hidden` under the first `valid` rows of `weight`, and memory for one of them."""

    def __init__(self, hidden: Tensor, weight: Tensor, temperature: float, valid: int, chunk: int) -> None:
        self.hidden = hidden.to(weight.dtype)
        self.weight = weight
        self.dtype = torch.promote_types(weight.dtype, torch.float32)  # of the tiles and of everything summed
        self._temperature, self._valid = temperature, valid
        n = hidden.shape[0]
        self._height = -(-n // -(-n // chunk)) if n else 0
        # Whole vector registers in each row of a tile.
        width = _TILE_ELEMENTS // max(self._height, 1) // 64 * 64
        self._width = min(max(width, 64), valid)
        self._memory: dict[str, Tensor] = {}

    def columns(self) -> Iterator[slice]:
        """Blocks of the vocabulary; none if there is no row, or no token in this slice."""
        if self._height and self._width:
            yield from (slice(i, min(i + self._width, self._valid)) for i in range(0, self._valid, self._width))

    def rows(self) -> Iterator[slice]:
        n = self.hidden.shape[0]
        return (slice(i, min(i + self._height, n)) for i in range(0, n, self._height))

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """`[rows, columns]` logits / temperature, valid until the next call."""
        hidden, weight = self.hidden[rows], self.weight[columns].t()
        tile = self._view("tile", self.dtype, hidden.shape[0], weight.shape[1])
        if weight.dtype == self.dtype:
            return tile.addmm_(hidden, weight, beta=0, alpha=1 / self._temperature)
        # As the engine: logits in the weight's precision, and the temperature in float32.
        tile.copy_(torch.mm(hidden, weight, out=self._view("low", weight.dtype, *tile.shape)))
        return tile if self._temperature == 1 else tile.div_(self._temperature)

    def spare(self, like: Tensor) -> Tensor:
        """Memory for a second tile, valid until the next call."""
        return self._view("spare", self.dtype, *like.shape)

    def lowered(self, tile: Tensor) -> Tensor:
        """The tile in the weight's dtype."""
        if tile.dtype == self.weight.dtype:
            return tile
        return self._view("low", self.weight.dtype, *tile.shape).copy_(tile)

    def sum_of_rows(self, block: Tensor) -> Tensor:
        """Where to sum a block of the weight gradient over row chunks: itself, unless its dtype would lose digits."""
        if block.dtype == self.dtype or self._height == self.hidden.shape[0]:
            return block
        return self._view("block", self.dtype, self._width, self.hidden.shape[1])[: block.shape[0]]

    def _view(self, name: str, dtype: torch.dtype, height: int, width: int) -> Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.numel() < height * width:
            memory = self._memory[name] = torch.empty(height * width, dtype=dtype, device=self.weight.device)
        return memory[: height * width].view(height, width)


def _inside(local_target: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Targets as columns of a block, clamped into it, and which of them really lie there."""
    index = local_target - columns.start
    last = columns.stop - columns.start - 1
    return index.clamp(0, last).unsqueeze(-1), (index >= 0) & (index <= last)


def _shifted(total: Tensor, weighted: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of exp(d) and exp(d) * d after `shift` was added to every d."""
    scale = shift.exp()
    return scale * total, scale * (weighted + shift * total)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """`total += left @ right`, or `=` if this is the first product; `total` may be of a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if first else 1)
    elif first:
        total.copy_(left @ right)
    else:
        total.add_(left @ right)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    tp_rank: int = 0,
    tp_group: dist.ProcessGroup | None = None,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets[i]`, and the entropy there, under softmax(hidden[i] @ weight.T / temperature).

    Args:
        hidden: `[R, h]`, the same on all ranks of `tp_group`, with R = 0 allowed; any float dtype, taken to the weight's.
        weight: `[V / tp, h]`, this rank's slice of the output layer with a padded vocabulary. Logits have its dtype, as
            those of a plain linear layer; what follows is float32.
        targets: int64 `[R]`, global token ids. The log-probability of an id outside of `vocab_size` is NaN.
        temperature: above 0.
        vocab_size: true vocabulary; padding rows of the weight beyond it take no probability and no gradient.
        chunk: logits exist for at most this many rows at a time, in the forward and in the backward pass.

    Returns:
        Two float32 `[R]` tensors (float64 under a float64 weight), equal on all ranks of `tp_group`, both differentiable
        with respect to `hidden` and `weight`. The gradient of `hidden` is this rank's share, from its slice of the
        vocabulary: the caller adds it up over `tp_group`. That of `weight` is summed in float32 and has its dtype.
    """
    vocab_start = tp_rank * weight.shape[0]
    return _LinearLogprobs.apply(hidden, weight, targets, temperature, vocab_start, vocab_size, chunk, tp_group)
