"""From one admitted prompt to one complete group: generate G samples, score them, shape their rewards.

A sample that an engine failed to deliver, or that the reward rule could not judge, is generated again (with the
others of its group kept) up to `rollout.max_group_attempts` times; then the run stops with the causes. A fault is
never turned into a wrong answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollout_service.config import RolloutSection, SamplingSection
from rollout_service.engine import EngineError
from rollout_service.fleet import Fleet
from rollout_service.prompts import Prompt
from rollout_service.rewards import Item, Score
from rollout_service.rewards.overlong import shape_reward
from rollout_service.rewards.scorer import RewardScorer
from rollout_service.sample import FinishReason, Group, Sample

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]


class GroupFailed(RuntimeError):
    """A group could not be completed within `rollout.max_group_attempts`; the message names prompt and causes."""


class SampleFault(RuntimeError):
    """One sample could not be used; the message says why."""


def sampling_parameters(sampling: SamplingSection, max_new_tokens: int, stop_token_ids: list[int]) -> dict[str, Any]:
    """SGLang's `sampling_params`. Temperature 0 is greedy there, too.

    `skip_special_tokens` and the like are left alone: only token ids are used.
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": stop_token_ids,
    }


def sampling_seed(*parts: object) -> int:
    """A seed of 31 bits from any parts, the same in every run and process.

    SGLang reads it only with `sglang.enable_deterministic_inference`, where requests without a seed would all share
    one and the samples of a group would be copies.
    """
    digest = hashlib.blake2s(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(slots=True)
class RunnerCounters:
    """Totals since the start."""

    samples: int = 0
    tokens: int = 0
    retried_samples: int = 0
    generate_s: float = 0.0
    reward_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)


class GroupRunner:
    """Generates and scores groups on a fleet.

    Args:
        decode: token ids to text, special tokens left out; for the reward rule and logs.
        seed: of the run.
    """

    def __init__(
        self,
        rollout: RolloutSection,
        fleet: Fleet,
        rewards: RewardScorer,
        decode: Decode,
        stop_token_ids: list[int],
        seed: int,
    ) -> None:
        self._rollout = rollout
        self._fleet = fleet
        self._rewards = rewards
        self._decode = decode
        self._stop_token_ids = stop_token_ids
        self._seed = seed
        self.counters = RunnerCounters()

    async def run_training_group(self, order: int, prompt: Prompt) -> Group:
        """Complete the training group admitted as number `order`.

        Raises:
            GroupFailed: it cannot be completed.
        """
        admitted_version = self._fleet.version
        samples, attempts = await self.run(
            f"group-{order}",
            prompt.prompt_ids,
            prompt.answer,
            self._rollout.sampling,
            self._rollout.n_samples_per_prompt,
            priority=(1, order),
            what=f"prompt {prompt.prompt_id!r} (epoch {prompt.epoch}, admitted as number {order})",
            text=prompt.text,
            routed_experts=self._rollout.router_replay,
        )
        return Group(
            order=order,
            prompt_id=prompt.prompt_id,
            epoch=prompt.epoch,
            prompt_ids=prompt.prompt_ids,
            answer=prompt.answer,
            samples=samples,
            attempt=attempts,
            admitted_version=admitted_version,
            prompt_text=prompt.text,
        )

    async def run(
        self,
        name: str,
        prompt_ids: np.ndarray,
        answer: str,
        sampling: SamplingSection,
        n: int,
        priority: tuple[int, ...],
        what: str,
        text: str = "",
        routed_experts: bool = False,
    ) -> tuple[list[Sample], int]:
        """Generate and score `n` samples of one prompt.

        Args:
            name: unique among running requests.
            priority: smaller goes first.
            what: the prompt, in words for an error message.
            text: the prompt's text, for the reward rules.
            routed_experts: keep which experts the tokens went to.

        Returns:
            The samples, and the number of attempts that the slowest of them took.

        Raises:
            GroupFailed: a sample failed `rollout.max_group_attempts` times.
        """
        ids = [int(token) for token in prompt_ids]
        params = sampling_parameters(sampling, self._rollout.max_response_length, self._stop_token_ids)
        limit = self._rollout.max_group_attempts
        samples: list[Sample | None] = [None] * n
        causes: list[str] = []
        attempt = 0
        while missing := [index for index, sample in enumerate(samples) if sample is None]:
            if attempt == limit:
                raise GroupFailed(
                    f"{what}: {len(missing)} of {n} samples still failed after {limit} attempts "
                    f"(rollout.max_group_attempts). Causes: {'; '.join(dict.fromkeys(causes))}"
                )
            attempt += 1
            calls = [
                self._one(
                    f"{name}-{attempt}-{index}",
                    ids,
                    params | {"sampling_seed": sampling_seed(self._seed, name, attempt, index)},
                    Item(answer, "", False, text),
                    (*priority, index),
                    routed_experts,
                )
                for index in missing
            ]
            for index, result in zip(missing, await _gather(calls), strict=True):
                if isinstance(result, Sample):
                    samples[index] = result
                else:
                    causes.append(str(result))
                    self.counters.retried_samples += 1
                    log.warning("%s, sample %d, attempt %d of %d: %s", what, index, attempt, limit, result)
            complete = [sample for sample in samples if sample is not None]
            if self._rewards.per_group and len(complete) == n:
                for index, fault in await self._judge_group(complete, Item(answer, "", False, text)):
                    samples[index] = None
                    causes.append(str(fault))
                    self.counters.retried_samples += 1
                    log.warning("%s, sample %d, attempt %d of %d: %s", what, index, attempt, limit, fault)
        return [sample for sample in samples if sample is not None], attempt

    async def _one(
        self,
        rid: str,
        ids: list[int],
        params: dict[str, Any],
        item: Item,
        priority: tuple[int, ...],
        routed_experts: bool,
    ) -> Sample | EngineError | SampleFault:
        """One sample, or what went wrong with it. It is scored here unless a rule judges whole groups."""
        began = time.monotonic()
        try:
            completion = await self._fleet.generate(ids, params, rid, priority, routed_experts)
        except EngineError as error:
            self._fault("engine")
            return error
        generated = time.monotonic()
        if completion.finish_reason is FinishReason.ABORT:
            self._fault("abort")
            return SampleFault(f"{rid} was aborted after {len(completion.ids)} tokens")
        sample = Sample(
            response_ids=completion.ids,
            behaviour_logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=self._decode(completion.ids.tolist()),
            routed_experts=completion.routed_experts,
        )
        sample.validate()
        sample.timings = {"generate": generated - began}
        self.counters.generate_s += generated - began
        if self._rewards.per_group:
            return sample
        faults = await self._judge([sample], item)
        return SampleFault(f"{rid}: {faults[0][1]}") if faults else sample

    async def _judge_group(self, samples: list[Sample], item: Item) -> list[tuple[int, SampleFault]]:
        return [(index, SampleFault(fault)) for index, fault in await self._judge(samples, item)]

    async def _judge(self, samples: list[Sample], item: Item) -> list[tuple[int, str]]:
        """Score samples of one prompt and shape their rewards; returns `(index, cause)` of those without a verdict.

        A fault is asked about once more: it may be the worker's and not the response's.
        """
        began = time.monotonic()
        items = [replace(item, response=sample.text, truncated=sample.truncated) for sample in samples]
        scores = await self._rewards.score_group(items)
        if any(score.error is not None for score in scores):
            scores = await self._rewards.score_group(items)
        elapsed = (time.monotonic() - began) / len(samples)
        faults = []
        for index, (sample, score) in enumerate(zip(samples, scores, strict=True)):
            if score.error is not None:
                self._fault(score.error)
                faults.append((index, self._why(score, sample)))
                continue
            sample.acc = score.acc
            sample.reward, sample.reward_details = shape_reward(score, len(sample.response_ids), self._rollout)
            sample.timings["reward"] = elapsed
            self.counters.samples += 1
            self.counters.tokens += len(sample.response_ids)
            self.counters.reward_s += elapsed
        return faults

    def _why(self, score: Score, sample: Sample) -> str:
        return f"{score.error} on a response that ends {sample.text[-80:]!r} (last fault of a rule: {self._rewards.last_fault})"

    def _fault(self, kind: str) -> None:
        self.counters.faults[kind] = self.counters.faults.get(kind, 0) + 1


async def _gather(calls: list[Any]) -> list[Any]:
    """`asyncio.gather`, but an exception or a cancellation ends the other calls before it goes on."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        unfinished = [task for task in tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
