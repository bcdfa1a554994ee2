"""The transfer plan: which rank gathers, merges and sends which tensors, in which order.

    plan = build_plan(mapping, source, Destination(itemsize=2, bucket_bytes=2**28, max_publishers=8))
    for bucket in plan.buckets: ...

A pure function of the mapping, the trainer's layout and what the receivers want; every rank computes the same plan and
nothing is negotiated at run time. Its rules:

- every HF tensor is in exactly one bucket, so every byte leaves the trainer once for each group of engines;
- a tied copy is not sent, a replicated tensor (a norm, a router) is sent by one rank that holds it, without a gather;
- a sharded tensor is gathered within one tensor-parallel group (for a routed expert: one expert-tensor-parallel group)
  by one of the group's members, the bucket's *publisher*;
- the load of a pipeline stage is spread evenly over its publishers, which are taken from different data-parallel
  replicas first and from different tensor-parallel ranks then; a routed expert can only be sent from the ranks of its
  expert-parallel slice;
- buckets of different publishers alternate, so that one is gathered while another is being sent.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from checkpoint_convert.mapping import ParamMapping, layer_of
from checkpoint_convert.rules import Copy

GroupKind = Literal["dense", "expert"]
BUFFER_ITEMSIZE = 4  # router biases stay float32, whatever the engines' dtype


@dataclass(frozen=True)
class SourceLayout:
    """How the trainer's ranks share the model, in Megatron's rank order tp-cp-ep-dp-pp (the first varies fastest).

    A rank's place among the dense layers is (tp, cp, dp, pp); among the routed experts it is (etp, ep, edp, pp), where the
    expert-data-parallel size is `tp x cp x dp / (etp x ep)`. Both orders number the ranks of a stage 0, 1, 2, ...
    (`parallel_state.RankGenerator`, which gives the expert groups no context-parallel axis).

    Attributes:
        tp, cp, dp, pp: tensor, context, data and pipeline parallel sizes.
        ep, etp: expert and expert-tensor parallel sizes.
        stages: `stages[pp_rank][virtual stage]` are the global numbers of that model chunk's layers.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    stages: tuple[tuple[tuple[int, ...], ...], ...]

    def __post_init__(self) -> None:
        if len(self.stages) != self.pp:
            raise ValueError(f"layers of {len(self.stages)} pipeline stages given for {self.pp} stages")
        if self.stage_size % (self.ep * self.etp):
            raise ValueError(
                f"the {self.stage_size} ranks of a pipeline stage cannot be split over expert parallel size {self.ep} x expert tensor parallel size {self.etp}"
            )

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pp

    def stage_ranks(self, stage: int) -> range:
        return range(stage * self.stage_size, (stage + 1) * self.stage_size)

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def ep_rank(self, rank: int) -> int:
        return rank // self.etp % self.ep

    def group(self, kind: GroupKind, rank: int) -> tuple[int, ...]:
        """The tensor-parallel or expert-tensor-parallel group of `rank`, in the order of the shards."""
        size = self.tp if kind == "dense" else self.etp
        first = rank - rank % size
        return tuple(range(first, first + size))


@dataclass(frozen=True)
class Destination:
    """What the receivers want.

    Attributes:
        itemsize: bytes of one number in the dtype that tensors are cast to.
        bucket_bytes: a bucket is closed once its merged tensors reach this size; it always holds at least one parameter.
        max_publishers: upper limit of sending ranks, as far as each pipeline stage and expert slice still has one.
    """

    itemsize: int
    bucket_bytes: int
    max_publishers: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that are gathered in one collective and sent together.

    Attributes:
        turn: place in the order of all buckets, from 0.
        publisher: global rank that gathers, merges and sends.
        kind: which of the publisher's groups holds the shards.
        group: the ranks that take part in the gather, in the order of the shards; the publisher alone if nothing is split.
        keys: mapping keys, in the order in which their tensors are sent.
        split: for each key, whether it is gathered over `group`; the publisher holds the whole of the others.
        bytes: of the merged tensors.
    """

    turn: int
    publisher: int
    kind: GroupKind
    group: tuple[int, ...]
    keys: tuple[str, ...]
    split: tuple[bool, ...]
    bytes: int


@dataclass(frozen=True)
class TransferPlan:
    """All buckets in the order of their turns."""

    buckets: tuple[Bucket, ...]

    @cached_property
    def publishers(self) -> tuple[int, ...]:
        """Sending ranks, in the order of their first turn."""
        return tuple(dict.fromkeys(bucket.publisher for bucket in self.buckets))

    @cached_property
    def bytes(self) -> int:
        """What one group of engines receives."""
        return sum(bucket.bytes for bucket in self.buckets)

    def load(self) -> dict[int, int]:
        """Bytes by publisher."""
        load = dict.fromkeys(self.publishers, 0)
        for bucket in self.buckets:
            load[bucket.publisher] += bucket.bytes
        return load


@dataclass(frozen=True)
class _Unit:
    """One parameter: where it is in the model's order, and how many bytes its HF tensors have."""

    order: int
    key: str
    kind: GroupKind
    split: bool
    bytes: int


@dataclass
class _Publisher:
    rank: int
    load: int = 0
    units: list[_Unit] = field(default_factory=list)


def build_plan(mapping: Mapping[str, ParamMapping], source: SourceLayout, destination: Destination) -> TransferPlan:
    """Plan the transfer of the whole model.

    Raises:
        ValueError: `source.stages` does not hold each layer of the mapping once, or the experts cannot be shared
            evenly by `source.ep` ranks.
    """
    stage_of_layer = _stages(mapping, source)
    experts = _num_experts(mapping, source)
    units: list[list[_Unit]] = [[] for _ in range(source.pp)]
    slices: dict[str, int] = {}
    for order, (key, entry) in enumerate(mapping.items()):
        if entry.tied_copy:  # the first stage sends the embedding
            continue
        if entry.expert is not None:
            slices[key] = entry.expert // (experts // source.ep)
        layer = layer_of(key)
        stage = stage_of_layer[layer] if layer is not None else 0 if key.startswith("embedding.") else source.pp - 1
        units[stage].append(_unit(order, key, entry, source, destination))
    streams: list[tuple[float, int, int, _Publisher, tuple[_Unit, ...]]] = []
    for stage in range(source.pp):
        for index, publisher in enumerate(_assign(units[stage], slices, stage, source, destination)):
            cut = _cut(publisher.units, destination.bucket_bytes)
            # Place i of n lies at the fraction (i + 1/2) / n of the whole transfer, so that publishers alternate.
            streams += [((i + 0.5) / len(cut), index, stage, publisher, part) for i, part in enumerate(cut)]
    streams.sort(key=lambda entry: entry[:3])
    return TransferPlan(
        tuple(_bucket(turn, publisher.rank, part, source) for turn, (_, _, _, publisher, part) in enumerate(streams))
    )


def _stages(mapping: Mapping[str, ParamMapping], source: SourceLayout) -> dict[int, int]:
    placed: dict[int, int] = {}
    for stage, chunks in enumerate(source.stages):
        for layer in (layer for chunk in chunks for layer in chunk):
            if layer in placed:
                raise ValueError(f"layer {layer} is in pipeline stages {placed[layer]} and {stage}")
            placed[layer] = stage
    layers = {number for key in mapping if (number := layer_of(key)) is not None}
    if layers != set(placed):
        raise ValueError(
            f"no pipeline stage holds layers {sorted(layers - set(placed))}; unknown are {sorted(set(placed) - layers)}"
        )
    return placed


def _num_experts(mapping: Mapping[str, ParamMapping], source: SourceLayout) -> int:
    experts = 1 + max((entry.expert for entry in mapping.values() if entry.expert is not None), default=-1)
    if experts % source.ep:
        raise ValueError(f"{experts} experts cannot be shared by {source.ep} expert-parallel ranks")
    return experts


def _unit(order: int, key: str, entry: ParamMapping, source: SourceLayout, destination: Destination) -> _Unit:
    kind: GroupKind = "dense" if entry.expert is None else "expert"
    holders = source.tp if kind == "dense" else source.etp
    itemsize = BUFFER_ITEMSIZE if entry.buffer else destination.itemsize
    return _Unit(
        order=order,
        key=key,
        kind=kind,
        split=holders > 1 and not isinstance(entry.rule, Copy),
        bytes=itemsize * sum(math.prod(shape) for shape in entry.hf_shapes),
    )


def _assign(
    units: Sequence[_Unit], slices: Mapping[str, int], stage: int, source: SourceLayout, destination: Destination
) -> list[_Publisher]:
    """Give each unit of a stage to one publisher: the largest first, always to the one with the least to do.

    Experts come before the dense parameters, which any rank of the stage can send and which even out what is left.
    """
    by_slice: dict[int, list[_Unit]] = {}
    for unit in units:
        if unit.kind == "expert":
            by_slice.setdefault(slices[unit.key], []).append(unit)
    ranks = source.stage_ranks(stage)
    allowed = max(1, destination.max_publishers // source.pp)
    # Replicas first, then the members of each replica.
    spread = sorted(ranks, key=lambda rank: (source.tp_rank(rank), rank))
    publishers: list[_Publisher] = []
    for number in sorted(by_slice):
        members = [rank for rank in spread if source.ep_rank(rank) == number]
        own = [_Publisher(rank) for rank in members[: max(1, allowed // len(by_slice))]]
        _fill(own, by_slice[number])
        publishers += own
    if not publishers:
        publishers = [_Publisher(rank) for rank in spread[:allowed]]
    _fill(publishers, [unit for unit in units if unit.kind == "dense"])
    return publishers


def _fill(publishers: list[_Publisher], units: Sequence[_Unit]) -> None:
    heap = [(publisher.load, index) for index, publisher in enumerate(publishers)]
    heapq.heapify(heap)
    for unit in sorted(units, key=lambda unit: (-unit.bytes, unit.order)):
        load, index = heapq.heappop(heap)
        publishers[index].units.append(unit)
        publishers[index].load = load + unit.bytes
        heapq.heappush(heap, (load + unit.bytes, index))


def _cut(units: Sequence[_Unit], bucket_bytes: int) -> list[tuple[_Unit, ...]]:
    """Cut a publisher's units into buckets, in model order. A bucket gathers in one group: split units of one kind only."""
    done: list[tuple[_Unit, ...]] = []
    open_buckets: dict[GroupKind, list[_Unit]] = {}
    for unit in sorted(units, key=lambda unit: unit.order):
        # What needs no gather goes with whatever bucket is open.
        kind = unit.kind if unit.split else next(iter(open_buckets), unit.kind)
        bucket = open_buckets.setdefault(kind, [])
        bucket.append(unit)
        if sum(member.bytes for member in bucket) >= bucket_bytes:
            done.append(tuple(open_buckets.pop(kind)))
    return done + [tuple(bucket) for bucket in open_buckets.values()]


def _bucket(turn: int, publisher: int, units: tuple[_Unit, ...], source: SourceLayout) -> Bucket:
    kinds = {unit.kind for unit in units if unit.split}
    kind: GroupKind = "expert" if "expert" in kinds else "dense"
    return Bucket(
        turn=turn,
        publisher=publisher,
        kind=kind,
        group=source.group(kind, publisher) if kinds else (publisher,),
        keys=tuple(unit.key for unit in units),
        split=tuple(unit.split for unit in units),
        bytes=sum(unit.bytes for unit in units),
    )
