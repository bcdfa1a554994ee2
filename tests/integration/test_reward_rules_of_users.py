"""Custom rewards as they run: processes that are killed, coroutines, a real HTTP server, combinations, launch checks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from dapo_megatron.config import ConfigError, load_config
from dapo_megatron.config.validate import check_launch
from rollout_service.config import OverlongBufferSection, RewardSection, RolloutSection
from rollout_service.rewards import Item, RewardPoolError
from rollout_service.rewards.overlong import shape_reward
from rollout_service.rewards.scorer import RewardScorer
from tests.config_files import write_config

HERE = "tests.reward_functions"


def with_scorer(use: Callable[[RewardScorer], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        scorer = RewardScorer(RewardSection(**{"workers": 1, "timeout_s": 10.0} | settings))
        await scorer.start()
        try:
            await use(scorer)
        finally:
            await scorer.close()

    asyncio.run(main())


def items(*responses: str, gold: str = "7", truncated: bool = False) -> list[Item]:
    return [Item(gold, response, truncated, "1+6=") for response in responses]


def test_a_plain_function_gets_what_it_asks_for() -> None:
    async def use(scorer: RewardScorer) -> None:
        assert [s.acc for s in await scorer.score_group(items("= 7", "= 8"))] == [0.5, 0.0]
        assert [s.acc for s in await scorer.score_group(items("= 7", truncated=True))] == [0.0]
        assert not scorer.per_group

    with_scorer(use, rule=f"{HERE}:with_everything")


def test_a_function_that_hangs_dies_raises_or_answers_nonsense_costs_its_sample_only() -> None:
    async def use(scorer: RewardScorer) -> None:
        scores = await scorer.score_group(items("hang", "fine", "die", "raise", "nonsense", "fine"))
        assert [score.error for score in scores] == [
            "reward_timeout",
            None,
            "reward_crash",
            "reward_error",
            "reward_error",
            None,
        ]
        assert (scores[1].acc, scores[5].acc) == (1.0, 1.0)
        stats = scorer.stats()
        assert [stats[f"reward/{name}"] for name in ("scored", "timeout", "crash", "error")] == [2, 1, 1, 2]

    with_scorer(use, rule=f"{HERE}:hostile", timeout_s=1.0, workers=2)


def test_a_function_for_groups_sees_all_responses_at_once() -> None:
    async def use(scorer: RewardScorer) -> None:
        assert scorer.per_group
        assert [s.acc for s in await scorer.score_group(items("so 7", "7", "8"))] == [0.0, 1.0, 0.0]

    with_scorer(use, rule=f"{HERE}:shortest_of_group")


def test_coroutines_run_at_once_each_with_its_deadline() -> None:
    async def use(scorer: RewardScorer) -> None:
        began = time.monotonic()
        scores = await scorer.score_group(items(*["7"] * 10, "8", "late", "raise"))
        assert time.monotonic() - began < 3.0  # 13 calls of 0.2 s, one of them stopped after 1.5 s
        assert [score.acc for score in scores[:11]] == [1.0] * 10 + [0.0]
        assert [score.error for score in scores[10:]] == [None, "reward_timeout", "reward_error"]
        assert scorer.pids() == []

    with_scorer(use, rule=f"{HERE}:judge", timeout_s=1.5)


def test_at_most_concurrency_coroutines_run_at_once() -> None:
    async def use(scorer: RewardScorer) -> None:
        began = time.monotonic()
        await scorer.score_group(items(*["7"] * 6))
        assert time.monotonic() - began >= 0.6  # three rounds of 0.2 s

    with_scorer(use, rule=f"{HERE}:judge", concurrency=2)


def test_a_coroutine_that_blocks_does_not_stall_the_service() -> None:
    async def use(scorer: RewardScorer) -> None:
        task = asyncio.create_task(scorer.score_group(items("block")))
        worst, last = 0.0, time.monotonic()
        while not task.done():
            await asyncio.sleep(0.01)
            now = time.monotonic()
            worst, last = max(worst, now - last), now
        assert worst < 0.4
        assert (await task)[0].error == "reward_timeout"

    with_scorer(use, rule=f"{HERE}:blocking_judge", timeout_s=0.5)


def test_a_coroutine_for_groups() -> None:
    async def use(scorer: RewardScorer) -> None:
        assert [s.acc for s in await scorer.score_group(items("a", "b", "c"))] == [1.0, 0.0, 0.0]

    with_scorer(use, rule=f"{HERE}:judge_group")


def test_extra_rules_change_the_reward_and_not_the_accuracy() -> None:
    async def use(scorer: RewardScorer) -> None:
        right, wrong = await scorer.score_group(items("Answer: 7", "Answer: 88"))
        assert (right.acc, wrong.acc) == (1.0, 0.0)
        assert dict(right.extras) == {f"{HERE}:length": pytest.approx(-0.09), f"{HERE}:judge_group": 2.0}
        assert dict(wrong.extras) == {f"{HERE}:length": pytest.approx(-0.10), f"{HERE}:judge_group": 0.0}
        rollout = RolloutSection(max_response_length=64, overlong_buffer=OverlongBufferSection(enable=True, len=16))
        reward, details = shape_reward(right, 56, rollout)
        assert reward == pytest.approx(1.0 - 0.09 + 2.0 - 0.5)
        assert sum(details.values()) == pytest.approx(reward)

    extras = [{"rule": f"{HERE}:length", "weight": -0.01}, {"rule": f"{HERE}:judge_group", "weight": 2.0}]
    with_scorer(use, extra_rules=extras)


def test_a_fault_of_an_extra_rule_is_a_fault_of_the_sample() -> None:
    async def use(scorer: RewardScorer) -> None:
        scores = await scorer.score_group(items("raise Answer: 7", "Answer: 7"))
        assert [score.error for score in scores] == ["reward_error", None]

    with_scorer(use, extra_rules=[{"rule": f"{HERE}:hostile"}])


def test_a_worker_is_replaced_after_its_share_of_calls() -> None:
    async def use(scorer: RewardScorer) -> None:
        first = set(scorer.pids())
        for _ in range(7):
            assert (await scorer.score("7", "x 7", False)).acc == 1.0
        assert scorer.stats()["reward/recycled"] == 2
        assert set(scorer.pids()) != first

    with_scorer(use, rule=f"{HERE}:equal", recycle_after=3)


# --- a reward server -------------------------------------------------------------------------------------------------


class Server:
    """A reward server whose behaviour the responses ask for."""

    def __init__(self) -> None:
        self.batches: list[list[dict[str, Any]]] = []
        self.running = 0
        self.most_running = 0
        self.failures_left = 0

    async def handle(self, request: web.Request) -> web.Response:
        samples = json.loads(await request.text())["samples"]
        self.batches.append(samples)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0.05)
            wish = samples[0]["response"]
            if self.failures_left:
                self.failures_left -= 1
                return web.Response(status=503, text="loading")
            if wish == "late":
                await asyncio.sleep(30)
            if wish == "refuse":
                return web.Response(status=400, text="no such task")
            if wish == "html":
                return web.Response(text="<html>")
            if wish == "short":
                return web.json_response({"results": []})
            if wish == "text":
                return web.json_response({"results": [{"acc": "1.0"}] * len(samples)})
            return web.json_response({"results": [self.result(sample) for sample in samples]})
        finally:
            self.running -= 1

    @staticmethod
    def result(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["response"] == "unjudged":
            return {"error": "the judge gave no number"}
        return {"acc": float(sample["gold"] in sample["response"]), "extracted": sample["response"][-1:]}


def with_server(use: Callable[[Server, RewardScorer, str], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        server = Server()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/reward", server.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        url = f"http://127.0.0.1:{port}/reward"
        scorer = RewardScorer(RewardSection(**{"rule": url, "timeout_s": 2.0} | settings))
        try:
            await scorer.start()
            await use(server, scorer, url)
        finally:
            await scorer.close()
            await runner.cleanup()

    asyncio.run(main())


def test_a_reward_server_gets_batches_and_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):  # must not be used
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def use(server: Server, scorer: RewardScorer, url: str) -> None:
        scores = await scorer.score_group(items(*(f"= {n}" for n in range(40))))
        assert [n for n, score in enumerate(scores) if score.acc == 1.0] == [7, 17, 27, 37]
        assert scores[13].extracted == "3"
        assert server.most_running <= 3
        assert max(map(len, server.batches)) == 8
        assert sum(map(len, server.batches)) == 40
        assert server.batches[0][0] == {"prompt": "1+6=", "gold": "7", "response": "= 0", "truncated": False}
        assert scorer.stats()["reward/http_batches"] == len(server.batches)

    with_server(use, concurrency=3, http_batch_size=8)


def test_faults_of_a_reward_server_are_error_classes_and_never_wrong_answers() -> None:
    async def use(server: Server, scorer: RewardScorer, url: str) -> None:
        wishes = {
            "late": "reward_timeout",
            "refuse": "reward_http",
            "html": "reward_http",
            "short": "reward_http",
            "text": "reward_http",
            "unjudged": "reward_error",
            "= 7": None,
        }
        scores = await scorer.score_group(items(*wishes))
        assert [score.error for score in scores] == list(wishes.values())
        assert scorer.stats()["reward/http"] == 4

    with_server(use, http_batch_size=1, timeout_s=1.0)


def test_a_server_that_is_still_loading_is_asked_again() -> None:
    async def use(server: Server, scorer: RewardScorer, url: str) -> None:
        server.failures_left = 2
        assert (await scorer.score("7", "= 7", False)).acc == 1.0
        server.failures_left = 99
        assert (await scorer.score("7", "= 7", False)).error == "reward_http"
        assert "status 503: loading" in scorer.last_fault

    with_server(use)


def test_a_server_that_is_not_there_is_a_fault() -> None:
    async def use(scorer: RewardScorer) -> None:
        assert (await scorer.score("7", "= 7", False)).error == "reward_http"
        with pytest.raises(RewardPoolError, match=r"rollout.reward.rule: reward_http on a sample row.*127.0.0.1:9"):
            await scorer.check("1+6=", "7")

    with_scorer(use, rule="http://127.0.0.1:9/reward")


# --- launch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "rule", "message"),
    [
        (
            "rule",
            "returns_a_dict",
            r"rollout.reward.rule: reward_error on a sample row .*returned {'score': 1.0} (dict)",
        ),
        ("rule", "returns_nan", "returned nan (float); expected a finite number"),
        ("rule", "returns_one_for_all", "returned 1.0 (float) for 2 responses"),
        ("rule", "length", "returned 10.0 on a sample row; the rule that gives `acc` must stay within [0, 1]"),
        ("rule", "hangs", "reward_timeout on a sample row"),
        ("rule", "asks_for_more", "takes (response, ground_truth)"),
        ("extra", "returns_nan", "rollout.reward.extra_rules[0].rule: reward_error"),
    ],
)
def test_a_launch_tries_the_rules_on_a_row_of_the_data(tmp_path: Path, key: str, rule: str, message: str) -> None:
    config = write_config(tmp_path)
    name = f"{HERE}:{rule}"
    override = f"rule={name}" if key == "rule" else f"extra_rules=[{{rule: '{name}'}}]"
    tree = load_config(config, [f"rollout.reward.{override}", "rollout.reward.timeout_s=1.0"])
    with pytest.raises(ConfigError) as caught:
        check_launch(tree, str(config))
    (problem,) = caught.value.problems
    assert name in problem
    assert message.partition(".*")[0] in problem and message.rpartition(".*")[2] in problem


def test_a_launch_accepts_rules_that_keep_the_contract(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    rules = f"rollout.reward.extra_rules=[{{rule: '{HERE}:length', weight: 0.1}}]"
    check_launch(load_config(config, [f"rollout.reward.rule={HERE}:judge", rules]), str(config))
