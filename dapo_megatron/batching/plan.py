"""Which data-parallel rank computes which sample, in which micro-batch.

Every rank derives the same plan from the lengths in the ticket, without communicating: integer arithmetic only, ties broken by
index. Samples are indexed group-major, `index = group * samples_per_group + sample`.

Ranks meet at the end of each mini-batch, so the slowest decides: first the samples of a mini-batch are divided among the ranks by
estimated cost. Then each rank packs its own into micro-batches of at most `max_tokens`. These should cost the same within
a rank, because a pipeline waits for its largest micro-batch; and the k-th should cost the same on all ranks, because
under expert parallelism the ranks meet in every one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapo_megatron.batching.cost import CostModel
from dapo_megatron.batching.partition import Parts, best_fit, even_out, spread

# Samples are exchanged between ranks until the costliest exceeds the best possible by less than one part in this many (0.05%).
BALANCED = 2000
# Where the token budget is in the way of balance, one in this many (0.4%) is accepted; beyond that another micro-batch is the lesser evil.
ACCEPTED = 250
# Percent of the mean cost of a rank at which a sample may get a rank to itself.
NEARLY_A_SHARE = 97
# Micro-batches are aligned over ranks if lock step over them gets shorter by one part in this many (1%).
WORTH_ALIGNING = 100


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


def plan_step(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    groups_per_mini_batch: int,
    samples_per_group: int,
    dp_size: int,
    max_tokens: int,
    *,
    cost_model: CostModel | None = None,
    micro_batch_multiple: int = 1,
) -> list[MiniBatch]:
    """Split a step into mini-batches of whole groups, and these into token-budgeted micro-batches on each rank.

    Groups keep their order: mini-batch m holds groups `[m * groups_per_mini_batch, (m + 1) * groups_per_mini_batch)`. All ranks get the
    same number of micro-batches in a mini-batch, because Megatron's schedules and collectives must run in step. It is the smallest that
    the budget allows and that leaves the ranks balanced, rounded up to `micro_batch_multiple`. A rank's micro-batches come costliest
    first; a rank with fewer samples than micro-batches gets empty ones at its end.

    Args:
        prompt_lengths: tokens of the prompt of each *sample* (repeated within a group), `[N]`.
        response_lengths: tokens of each response, `[N]`.
        groups_per_mini_batch: groups in one optimizer update.
        samples_per_group: G.
        dp_size: data-parallel ranks.
        max_tokens: most tokens (prompts and responses) in a micro-batch, before padding.
        cost_model: what a sequence costs; None is `CostModel()`.
        micro_batch_multiple: the number of micro-batches is a multiple of this (the pipeline size with virtual stages).

    Raises:
        ValueError: counts do not divide, or a sample alone exceeds the budget.
    """
    n = len(response_lengths)
    if len(prompt_lengths) != n:
        raise ValueError(
            f"{len(prompt_lengths)} prompt lengths but {n} response lengths; give one prompt length per sample"
        )
    if min(groups_per_mini_batch, samples_per_group, dp_size, micro_batch_multiple) < 1:
        raise ValueError(
            f"groups_per_mini_batch={groups_per_mini_batch}, samples_per_group={samples_per_group}, dp_size={dp_size} and "
            f"micro_batch_multiple={micro_batch_multiple} must be positive"
        )
    mini_batch_size = groups_per_mini_batch * samples_per_group
    if n % mini_batch_size:
        raise ValueError(
            f"{n} samples do not split into mini-batches of {groups_per_mini_batch} groups x {samples_per_group} samples"
        )
    lengths = [int(p) + int(r) for p, r in zip(prompt_lengths, response_lengths, strict=True)]
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sample {index} has {length} tokens, more than a micro-batch may hold ({max_tokens}); raise trainer.max_tokens_per_gpu"
            )
    planner = _Planner(lengths, cost_model or CostModel(), dp_size, max_tokens, micro_batch_multiple)
    return [planner.mini_batch(range(start, start + mini_batch_size)) for start in range(0, n, mini_batch_size)]


class _Planner:
    """Plans the mini-batches of one step. A division is the list of samples of each part (`Parts`)."""

    def __init__(self, lengths: list[int], cost_model: CostModel, dp_size: int, max_tokens: int, multiple: int) -> None:
        self.lengths = lengths
        self.costs = [cost_model(length) for length in lengths]
        self.dp_size = dp_size
        self.max_tokens = max_tokens
        self.multiple = multiple

    def mini_batch(self, samples: Sequence[int]) -> MiniBatch:
        """Ranks first, then the micro-batches of each; again with more of them while some rank cannot pack its samples into `count`."""
        samples = sorted(samples, key=lambda s: (-self.lengths[s], s))
        # No division does better than the mean of the ranks, nor than the costliest sample.
        least = max(-(-sum(self.costs[s] for s in samples) // self.dp_size), self.costs[samples[0]])
        accepted = least // ACCEPTED
        anywhere: Parts | None = None
        count = self._fewest(samples)
        while True:
            ranks = self._divide(samples, count * self.max_tokens, least)
            if ranks is None or self._highest(ranks) > least + accepted:
                anywhere = anywhere or self._divide(samples, sum(self.lengths[s] for s in samples), least)
                assert anywhere is not None, "every rank has room for all samples"
                if ranks is None or self._highest(ranks) > self._highest(anywhere) + accepted:
                    ranks = anywhere
            packed = [self._pack(rank, count) for rank in ranks]
            needed = max(len(parts) for parts in packed)
            if needed <= count:
                return MiniBatch(
                    [[MicroBatch(sorted(part)) for part in parts] for parts in self._align(ranks, packed, least)]
                )
            count = self._round_up(needed)

    def _fewest(self, samples: Sequence[int]) -> int:
        """A number of micro-batches that no plan can go below."""
        by_tokens = -(-sum(self.lengths[s] for s in samples) // (self.dp_size * self.max_tokens))
        # Two samples above half the budget never share a micro-batch.
        by_large = -(-sum(2 * self.lengths[s] > self.max_tokens for s in samples) // self.dp_size)
        return self._round_up(max(1, by_tokens, by_large))

    def _round_up(self, count: int) -> int:
        return -(-count // self.multiple) * self.multiple

    def _divide(self, samples: Sequence[int], room: int, least: int) -> Parts | None:
        """Samples, longest first, over the ranks, each of at most `room` tokens; None if that got stuck."""
        ranks = self._even_ranks(samples, self.dp_size, room, least)
        if ranks is None or self._highest(ranks) <= least + least // ACCEPTED:
            return ranks
        # Beside samples of nearly a mean rank's cost only the very shortest would fit. Leave these ranks so; the others share the rest.
        alone, left = 0, sum(self.costs[s] for s in samples)
        while alone < min(self.dp_size, len(samples)) - 1:
            longest = self.costs[samples[alone]]
            if longest * (self.dp_size - alone) * 100 < left * NEARLY_A_SHARE:
                break
            alone, left = alone + 1, left - longest
        others = self._even_ranks(samples[alone:], self.dp_size - alone, room, least) if alone else None
        if others is None or self._highest(others) >= self._highest(ranks):
            return ranks
        return [[sample] for sample in samples[:alone]] + others

    def _even_ranks(self, samples: Sequence[int], ranks: int, room: int, least: int) -> Parts | None:
        parts = spread(samples, self.lengths, self.costs, ranks, room)
        return parts and even_out(parts, self.lengths, self.costs, room, least + least // BALANCED)

    def _pack(self, rank: Sequence[int], count: int, offsets: Sequence[int] = ()) -> Parts:
        """One rank's samples, longest first, in micro-batches, costliest first: `count` of them, or more if these do not do.

        The fuller they must be, the less is left to choose: balanced cost if possible, balanced tokens otherwise, else just packed.
        """
        parts = spread(rank, self.lengths, self.costs, count, self.max_tokens, offsets)
        if parts is None:
            parts = spread(rank, self.lengths, self.lengths, count, self.max_tokens)
        if parts is None:
            parts = best_fit(rank, self.lengths, self.max_tokens)
            parts += [[] for _ in range(count - len(parts))]
        return sorted(parts, key=lambda part: -self._cost(part))

    def _align(self, ranks: Parts, packed: list[Parts], least: int) -> list[Parts]:
        """Let the ranks that could pack evenly follow those whose long samples made them pack unevenly, if lock step gains by it.

        Where one rank's first micro-batch is dear because of a single long sample, the others lose nothing when theirs is too,
        and have less to do while that rank has little left.
        """
        profile = self._profile(packed)
        if sum(profile) - least < least // WORTH_ALIGNING:
            return packed
        aligned = [self._pack(rank, len(profile), [-cost for cost in profile]) for rank in ranks]
        if (
            any(len(parts) > len(profile) for parts in aligned)
            or sum(profile) - sum(self._profile(aligned)) < least // WORTH_ALIGNING
        ):
            return packed
        return aligned

    def _profile(self, packed: list[Parts]) -> list[int]:
        """The costliest k-th micro-batch of any rank, for each k."""
        return [max(self._cost(part) for part in column) for column in zip(*packed, strict=True)]

    def _cost(self, part: Sequence[int]) -> int:
        return sum(map(self.costs.__getitem__, part))

    def _highest(self, parts: Parts) -> int:
        return max(self._cost(part) for part in parts)
