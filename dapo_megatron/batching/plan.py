"""Which data-parallel rank computes which sample, in which micro-batch.

Every rank derives the same plan from the lengths in the ticket, without communicating: integer arithmetic only, ties broken by
index. Samples are indexed group-major, `index = group * samples_per_group + sample`.

Balance is worth having because the ranks meet at the end of each mini-batch: the slowest decides. Samples go, costliest first, to the
least loaded rank, which is within 4/3 of the optimum (Graham 1969), and again so to the micro-batches of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A layer of hidden size h spends about 24 h^2 FLOPs per token in matrix products and 4 h L in attention over L tokens, so the
# quadratic part catches up at L = 6 h. 24576 is 6 h for h = 4096 (a 7B model); the plan is not sensitive to it.
ATTENTION_BREAK_EVEN_TOKENS = 24576


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that are packed into one forward and backward pass; possibly none (see `plan_step`)."""

    samples: list[int]


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer update: `micro_batches[dp_rank][i]`, the same number for every rank."""

    micro_batches: list[list[MicroBatch]]

    @property
    def samples(self) -> list[int]:
        """All samples of the mini-batch, ascending."""
        return sorted(s for rank in self.micro_batches for micro_batch in rank for s in micro_batch.samples)


def estimated_cost(length: int) -> int:
    """Relative cost of a sequence of `length` tokens, linear plus quadratic part, as an exact integer."""
    return length * (ATTENTION_BREAK_EVEN_TOKENS + length)


def plan_step(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    groups_per_mini_batch: int,
    samples_per_group: int,
    dp_size: int,
    max_tokens: int,
) -> list[MiniBatch]:
    """Split a step into mini-batches of whole groups, and these into token-budgeted micro-batches on each rank.

    Groups keep their order: mini-batch m holds groups `[m * groups_per_mini_batch, (m + 1) * groups_per_mini_batch)`. All ranks get the same number of micro-batches in
    a mini-batch, because Megatron's schedules and collectives must run in step; a rank short of samples gets empty ones at its end.

    Args:
        prompt_lengths: tokens of the prompt of each *sample* (repeated within a group), `[N]`.
        response_lengths: tokens of each response, `[N]`.
        groups_per_mini_batch: groups in one optimizer update.
        samples_per_group: G.
        dp_size: data-parallel ranks.
        max_tokens: most tokens (prompts and responses) in a micro-batch, before padding.

    Raises:
        ValueError: counts do not divide, or a sample alone exceeds the budget.
    """
    n = len(response_lengths)
    if len(prompt_lengths) != n:
        raise ValueError(
            f"{len(prompt_lengths)} prompt lengths but {n} response lengths; give one prompt length per sample"
        )
    if groups_per_mini_batch < 1 or samples_per_group < 1 or dp_size < 1:
        raise ValueError(
            f"groups_per_mini_batch={groups_per_mini_batch}, samples_per_group={samples_per_group} and dp_size={dp_size} must be positive"
        )
    size = groups_per_mini_batch * samples_per_group
    if n % size:
        raise ValueError(
            f"{n} samples do not split into mini-batches of {groups_per_mini_batch} groups x {samples_per_group} samples"
        )
    lengths = [int(p) + int(r) for p, r in zip(prompt_lengths, response_lengths, strict=True)]
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sample {index} has {length} tokens, more than a micro-batch may hold ({max_tokens}); raise trainer.max_tokens_per_gpu"
            )
    return [_plan_mini_batch(range(start, start + size), lengths, dp_size, max_tokens) for start in range(0, n, size)]


def _plan_mini_batch(samples: range, lengths: list[int], dp_size: int, max_tokens: int) -> MiniBatch:
    per_rank = _spread(samples, lengths, dp_size)
    first_fit = [_first_fit(rank, lengths, max_tokens) for rank in per_rank]
    count = max(len(bins) for bins in first_fit)
    plans = []
    for rank, bins in zip(per_rank, first_fit, strict=True):
        filled = _spread_within_budget(rank, lengths, count, max_tokens)
        if filled is None:
            # Balancing got stuck on the budget; first-fit is known to fit. Keep it and leave the rest empty.
            filled = bins + [[] for _ in range(count - len(bins))]
        # Costliest first: a micro-batch that does not fit into memory fails at once, and the empty ones come last.
        filled.sort(key=lambda b: (-sum(estimated_cost(lengths[s]) for s in b), b))
        plans.append([MicroBatch(sorted(b)) for b in filled])
    return MiniBatch(plans)


def _costliest_first(samples: Sequence[int], lengths: list[int]) -> list[int]:
    return sorted(samples, key=lambda s: (-lengths[s], s))


def _spread(samples: Sequence[int], lengths: list[int], bins: int) -> list[list[int]]:
    """Each sample, costliest first, to the bin with the least cost (then the fewest samples, then the lowest index)."""
    content: list[list[int]] = [[] for _ in range(bins)]
    cost = [0] * bins
    for s in _costliest_first(samples, lengths):
        target = min(range(bins), key=lambda b: (cost[b], len(content[b]), b))
        content[target].append(s)
        cost[target] += estimated_cost(lengths[s])
    return content


def _first_fit(samples: Sequence[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """First-fit decreasing bin packing: close to the fewest bins within the budget."""
    content: list[list[int]] = []
    room: list[int] = []
    for s in _costliest_first(samples, lengths):
        target = next((b for b, free in enumerate(room) if free >= lengths[s]), None)
        if target is None:
            content.append([])
            room.append(max_tokens)
            target = len(room) - 1
        content[target].append(s)
        room[target] -= lengths[s]
    return content


def _spread_within_budget(
    samples: Sequence[int], lengths: list[int], bins: int, max_tokens: int
) -> list[list[int]] | None:
    """As `_spread`, among the bins that still have room; None if a sample finds no room."""
    content: list[list[int]] = [[] for _ in range(bins)]
    cost = [0] * bins
    room = [max_tokens] * bins
    for s in _costliest_first(samples, lengths):
        fitting = [b for b in range(bins) if room[b] >= lengths[s]]
        if not fitting:
            return None
        target = min(fitting, key=lambda b: (cost[b], len(content[b]), b))
        content[target].append(s)
        cost[target] += estimated_cost(lengths[s])
        room[target] -= lengths[s]
    return content
