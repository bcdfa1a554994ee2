"""Evaluation of held-out sets on the rollout engines, and its metrics.

Each prompt of the set is answered once greedily and/or n times by sampling, and scored by the training rule. Exact
copies of a row are kept (AIME files repeat each problem), rows too long for the prompt limit are counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout_service.config import DataSection, EvalSetSection, SamplingSection
from rollout_service.group_runner import GroupRunner
from rollout_service.prompts import Prompt, PromptSource
from rollout_service.sample import Sample


def load_eval_prompts(section: EvalSetSection, data: DataSection, tokenizer: Any) -> list[Prompt]:
    """All prompts of a set, in file order, with the columns, template and length limit of `data`."""
    update = {
        "train": [section.path],
        "shuffle": False,
        "drop_duplicates": False,
        "max_rows": section.max_rows,
    }
    source = PromptSource(data.model_copy(update=update), tokenizer, seed=0)
    return [source.next() for _ in range(int(source.report["kept"]))]


def evaluation_metrics(groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Metrics of one pass over a set.

    Args:
        groups: the samples of each prompt, equally many.

    Returns:
        `acc` (mean over all samples), `prompts`, `n` (samples a prompt), `acc/mean@n`, `acc/best@n` (share of prompts
        with at least one right sample), `response_length/mean`, `response_length/max`, `truncated_share`.
    """
    n = len(groups[0])
    acc = np.array([[sample.acc for sample in group] for group in groups], dtype=np.float64)
    lengths = np.array([len(sample.response_ids) for group in groups for sample in group])
    truncated = np.array([sample.truncated for group in groups for sample in group])
    return {
        "acc": float(acc.mean()),
        "prompts": float(len(groups)),
        "n": float(n),
        f"acc/mean@{n}": float(acc.mean()),
        f"acc/best@{n}": float(acc.max(axis=1).mean()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "truncated_share": float(truncated.mean()),
    }


async def run_evaluation(
    runner: GroupRunner, name: str, section: EvalSetSection, prompts: Sequence[Prompt]
) -> dict[str, dict[str, float]]:
    """Evaluate one set: `{"greedy": metrics, "sampled": metrics}`, each only if the set asks for it."""
    modes: dict[str, tuple[SamplingSection, int]] = {}
    if section.greedy:
        modes["greedy"] = (SamplingSection(temperature=0.0), 1)
    if section.sampled:
        modes["sampled"] = (section.sampling, section.n)
    results = {}
    for mode, (sampling, n) in modes.items():
        calls = (
            runner.run(
                f"eval-{name}-{mode}-{index}",
                prompt.prompt_ids,
                prompt.answer,
                sampling,
                n,
                priority=(0, index),  # before any training request
                what=f"evaluation set {name!r}, row {prompt.prompt_id!r}",
                text=prompt.text,
            )
            for index, prompt in enumerate(prompts)
        )
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
        results[mode] = evaluation_metrics([task.result()[0] for task in running])
    return results
