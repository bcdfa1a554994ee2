"""Try custom reward rules on a row of the data before a run starts anything else."""

from __future__ import annotations

import asyncio

from rollout_service.config import BUILTIN_RULES, DataSection, RewardSection
from rollout_service.data_files import first_row
from rollout_service.rewards import RewardPoolError
from rollout_service.rewards.contract import ContractError

# Stands for a row of a hub data set, which the launch check does not download.
_ANY_ROW = ("What is 1 + 1?", "2")


def check_custom_rules(reward: RewardSection, data: DataSection) -> list[str]:
    """Problems of the custom rules, empty when there is none or no custom rule.

    Starts the same processes as a run does, so that a function that hangs is killed at `reward.timeout_s`.
    """
    rules = [reward.rule, *(extra.rule for extra in reward.extra_rules)]
    if all(rule in BUILTIN_RULES for rule in rules):
        return []
    row = first_row(data)
    if row is None:
        prompt, gold = _ANY_ROW
    else:
        prompt = row.prompt if isinstance(row.prompt, str) else row.prompt[-1][1]
        gold = row.answer
    return asyncio.run(_problems(reward.model_copy(update={"workers": 1}), prompt, gold))


async def _problems(reward: RewardSection, prompt: str, gold: str) -> list[str]:
    from rollout_service.rewards.scorer import RewardScorer

    scorer = RewardScorer(reward)
    try:
        await scorer.start()
        await scorer.check(prompt, gold)
    except (RewardPoolError, ContractError) as error:
        text = str(error)
        return [text if text.startswith("rollout.reward") else f"rollout.reward: {text}"]
    finally:
        await scorer.close()
    return []
