"""The wire format between the rollout service and the trainer: `Sample`, `Group`, `Ticket`.

A `Sample` is one completion, a `Group` the G completions of one prompt. Groups travel through Ray's object
store as dictionaries of flat NumPy arrays (`pack_group`), so that every trainer rank maps its share zero-copy.
A `Ticket` names the groups of one training step and carries every per-sample scalar, from which each rank
derives the same advantages, batch plan and denominators without communicating.

Token ids are those that the engine returned. Nothing here ever re-tokenises text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

WeightVersion = int


class FinishReason(StrEnum):
    """Why a response ended, as the engine reported it. Only this decides whether a response was truncated."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True)
class Sample:
    """One completion of a prompt.

    Attributes:
        response_ids: int32 `[n]`, token ids as the engine returned them, the closing end-of-sequence id included.
        behaviour_logprobs: float32 `[n]`, log-probability of each response token under the policy that sampled it,
            after temperature (`log_softmax(logits / T)`), before top-p/top-k truncation.
        versions: run-length weight versions, `((version, n_tokens), ...)`; the counts sum to n.
        finish_reason: see `FinishReason`.
        acc: raw score of the rule (0 or 1); the group filter sees this one.
        reward: shaped reward that the advantage uses.
        reward_details: parts of the reward by name (for example `overlong_penalty`), plain floats.
        error: error class when the reward could not be computed (`reward_timeout`, ...), else None.
        timings: seconds by phase (`generate`, `reward`).
        text: decoded response, for logs and the reward rule only.
        routed_experts: uint8 or int16 `[p + n - 1, moe_layers, top_k]`, the experts that each token of prompt and response
            went to in the engine; the last response token, which the engine never computed, has none. None without
            `rollout.router_replay`.
    """

    response_ids: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: tuple[tuple[WeightVersion, int], ...]
    finish_reason: FinishReason
    acc: float = 0.0
    reward: float = 0.0
    reward_details: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    timings: dict[str, float] = field(default_factory=dict)
    text: str = ""
    routed_experts: np.ndarray | None = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == FinishReason.LENGTH

    @property
    def oldest_version(self) -> WeightVersion:
        return min(version for version, _ in self.versions)

    def validate(self) -> None:
        """Check the invariants that tie ids, log-probs and versions together.

        Raises:
            ValueError: a length differs, a log-prob is not finite, or the response is empty.
        """
        n = len(self.response_ids)
        if n == 0:
            raise ValueError("empty response: the engine returned no token")
        if len(self.behaviour_logprobs) != n:
            raise ValueError(f"{n} response ids but {len(self.behaviour_logprobs)} log-probs")
        counted = sum(count for _, count in self.versions)
        if counted != n:
            raise ValueError(f"{n} response ids but weight versions cover {counted} tokens")
        if not np.isfinite(self.behaviour_logprobs).all():
            raise ValueError("a behaviour log-prob is not finite")


@dataclass(slots=True)
class Group:
    """The G samples of one prompt. A group is complete (every sample scored) or it does not leave the scheduler.

    Attributes:
        order: admission order number, unique and increasing within a run.
        prompt_id: stable id of the data row (`<file stem>:<row>` or the row's own id).
        epoch: pass over the data set in which the prompt was admitted, from 0.
        prompt_ids: int32 `[p]`, token ids sent to the engine.
        answer: gold answer as text.
        samples: G samples.
        attempt: 1 plus the number of times that the prompt was generated again after a fault.
        admitted_version: weight version published when the group was admitted.
    """

    order: int
    prompt_id: str
    epoch: int
    prompt_ids: np.ndarray
    answer: str
    samples: list[Sample]
    attempt: int = 1
    admitted_version: WeightVersion = 0
    prompt_text: str = ""

    @property
    def oldest_version(self) -> WeightVersion:
        return min(sample.oldest_version for sample in self.samples)


@dataclass(slots=True)
class GroupMeta:
    """Per-group part of a ticket: all that is needed to plan a batch without touching a token.

    Arrays have one entry per sample: `response_lengths` int32, `rewards`/`acc` float32, `truncated` bool, and float32
    for each name in `reward_parts`, whose values sum up to `rewards`.
    """

    order: int
    prompt_id: str
    epoch: int
    prompt_length: int
    response_lengths: np.ndarray
    rewards: np.ndarray
    acc: np.ndarray
    truncated: np.ndarray
    oldest_version: WeightVersion
    newest_version: WeightVersion
    admitted_version: WeightVersion
    reward_parts: dict[str, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def of(group: Group) -> GroupMeta:
        samples = group.samples
        return GroupMeta(
            order=group.order,
            prompt_id=group.prompt_id,
            epoch=group.epoch,
            prompt_length=len(group.prompt_ids),
            response_lengths=np.array([len(s.response_ids) for s in samples], dtype=np.int32),
            rewards=np.array([s.reward for s in samples], dtype=np.float32),
            acc=np.array([s.acc for s in samples], dtype=np.float32),
            truncated=np.array([s.truncated for s in samples], dtype=bool),
            oldest_version=group.oldest_version,
            newest_version=max(v for s in samples for v, _ in s.versions),
            admitted_version=group.admitted_version,
            reward_parts={
                name: np.array([s.reward_details.get(name, 0.0) for s in samples], dtype=np.float32)
                for name in dict.fromkeys(name for s in samples for name in s.reward_details)
            },
        )


@dataclass(slots=True)
class Ticket:
    """What the trainer gets for one step.

    Attributes:
        step: training step that this batch is for; asking twice for the same step gives the same ticket.
        groups: one meta per group, in batch order.
        refs: one Ray object reference per group (same order), each to a `pack_group` dictionary.
        stats: queue and filter statistics by metric name, since the last ticket.
    """

    step: int
    groups: list[GroupMeta]
    refs: list[Any]
    stats: dict[str, float]


def pack_group(group: Group) -> dict[str, np.ndarray]:
    """Flatten a group into NumPy arrays for the object store.

    Returns:
        `prompt_ids` int32 `[p]`; `response_ids` int32 `[sum n]`; `behaviour_logprobs` float32 `[sum n]`;
        `token_versions` int32 `[sum n]`; `offsets` int64 `[G + 1]`, sample i owns `[offsets[i], offsets[i + 1])`.
        With router replay also `routed_experts` uint8 or int16 `[sum (p + n - 1), moe_layers, top_k]`, see `routed_experts_of`.

    Raises:
        ValueError: expert choices do not cover every token of every sample but the last.
    """
    lengths = [len(s.response_ids) for s in group.samples]
    packed: dict[str, np.ndarray] = {
        "prompt_ids": np.ascontiguousarray(group.prompt_ids, dtype=np.int32),
        "response_ids": np.concatenate([s.response_ids for s in group.samples]).astype(np.int32),
        "behaviour_logprobs": np.concatenate([s.behaviour_logprobs for s in group.samples]).astype(np.float32),
        "token_versions": np.concatenate(
            [np.repeat(np.int32(v), n) for s in group.samples for v, n in s.versions]
        ).astype(np.int32),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    }
    choices = [s.routed_experts for s in group.samples if s.routed_experts is not None]
    if choices:
        rows = [len(choice) for choice in choices]
        needed = [len(group.prompt_ids) + n - 1 for n in lengths]
        if rows != needed:
            raise ValueError(
                f"group {group.order}: expert choices cover {rows} tokens of its samples instead of {needed}"
            )
        packed["routed_experts"] = np.concatenate(choices)
    return packed


def routed_experts_of(packed: dict[str, np.ndarray], sample: int) -> np.ndarray:
    """Expert choices `[p + n - 1, moe_layers, top_k]` of one sample of a `pack_group` dictionary.

    Raises:
        ValueError: the group was generated without router replay.
    """
    if "routed_experts" not in packed:
        raise ValueError("a group without expert choices, although rollout.router_replay is on")
    start, end = packed["offsets"][sample : sample + 2]
    shorter = len(packed["prompt_ids"]) - 1
    return packed["routed_experts"][start + sample * shorter : end + (sample + 1) * shorter]
