"""Scheduler, filter, curriculum and the fill loop together, with simulated engines and a simulated trainer.

Everything but the latencies and the scores is the real thing. The test keeps its own book.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.config import CurriculumSection, FilterGroupsSection
from rollout_service.curriculum import Curriculum
from rollout_service.filters import FilterExhausted, GroupFilter, Verdict
from rollout_service.group_loop import GroupLoop
from rollout_service.prompts import Prompt
from rollout_service.sample import FinishReason, Group, Sample
from rollout_service.scheduler import Scheduler
from tests import virtual_time

SAMPLES = 3
RIGHT, WRONG, MIXED = [1.0] * SAMPLES, [0.0] * SAMPLES, [1.0] + [0.0] * (SAMPLES - 1)


class Cursor:
    """`PromptSource` without files: `rows` prompts, each once per epoch."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.handed_out: list[tuple[str, int]] = []

    def next(self) -> Prompt:
        epoch, row = divmod(len(self.handed_out), self.rows)
        self.handed_out.append((f"rows:{row}", epoch))
        return Prompt(f"rows:{row}", epoch, "", np.array([3], np.int32), "34")


@dataclass
class Simulation:
    """A service whose engines are a sleep, and what came of it.

    Attributes:
        score: the scores of a prompt's samples. latency_s: how long its group takes.
        batches: per step the groups that were trained. wait_s: per step how long the trainer waited for them.
    """

    rows: int
    score: Callable[[Prompt], list[float]]
    latency_s: Callable[[], float]
    prompts_per_step: int = 4
    max_staleness: int = 0
    window_fraction: float = 0.0
    oversampling: float = 1.0
    filter_groups: FilterGroupsSection = field(default_factory=FilterGroupsSection)
    curriculum: CurriculumSection = field(default_factory=CurriculumSection)
    train_s: float = 1.0
    timeout_s: float = 1e5

    def __post_init__(self) -> None:
        self.cursor = Cursor(self.rows)
        self.scheduler = Scheduler(
            self.prompts_per_step, self.max_staleness, self.window_fraction, oversampling=self.oversampling
        )
        self.filter = GroupFilter(self.filter_groups)
        self.curriculum_state = Curriculum(self.curriculum, self.rows)
        self.batches: list[list[Group]] = []
        self.ages: list[int] = []
        self.wait_s: list[float] = []
        self.dropped: list[tuple[str, int]] = []
        self.started = 0
        self.running: dict[int, Prompt] = {}
        self.most_alive = 0
        self.failure: BaseException | None = None

    async def _run_group(self, order: int, prompt: Prompt) -> Group:
        self.started += 1
        self.running[order] = prompt
        born = self.scheduler.version
        counts = self.scheduler.counts()
        self.most_alive = max(self.most_alive, self.scheduler.slots - counts["free"] + counts["extra"])
        try:
            await asyncio.sleep(self.latency_s())
        finally:
            del self.running[order]
        samples = [
            Sample(np.array([5], np.int32), np.zeros(1, np.float32), ((born, 1),), FinishReason.STOP, acc=acc)
            for acc in self.score(prompt)
        ]
        group = Group(order, prompt.prompt_id, prompt.epoch, prompt.prompt_ids, prompt.answer, samples)
        if self.filter.classify(group) is not Verdict.KEPT and self.filter_groups.policy != "accept":
            self.dropped.append((prompt.prompt_id, prompt.epoch))
        return group

    async def train(self, steps: int) -> None:
        clock = asyncio.get_running_loop().time
        changed = asyncio.Event()

        def fail(error: BaseException) -> None:
            self.failure = error
            changed.set()

        self.loop = loop = GroupLoop(
            self.scheduler,
            self.filter,
            self.curriculum_state,
            self.cursor.next,
            self._run_group,
            store=lambda group: group.order,
            changed=changed,
            on_failure=fail,
            on_running=lambda number: None,
        )
        loop.admission.set()
        loop.start()
        try:
            for step in range(1, steps + 1):
                began = clock()
                async with asyncio.timeout(self.timeout_s):
                    while not self.scheduler.batch_ready():
                        if self.failure is not None:
                            raise self.failure
                        changed.clear()
                        await changed.wait()
                self.wait_s.append(clock() - began)
                batch = self.scheduler.take(step)
                assert [loop.refs[group.order] for group in batch] == [group.order for group in batch]
                self.ages += [self.scheduler.version - group.oldest_version for group in batch]
                self.batches.append(batch)
                await asyncio.sleep(self.train_s)
                self.scheduler.trained(step, self.scheduler.version + 1)
                loop.trained(batch)
                changed.set()
            self.seconds = clock()
        finally:
            self.unfinished = [(p.prompt_id, p.epoch) for p in loop.state_dict()["running"].values()]
            self.unfinished += [(p.prompt_id, p.epoch) for p in loop.state_dict()["again"]]
            await loop.stop()

    def run(self, steps: int) -> Simulation:
        virtual_time.run(self.train(steps))
        return self

    def check_the_books(self) -> None:
        """Exact batches, the bound, and every prompt of the cursor in exactly one place."""
        for batch in self.batches:
            assert len(batch) == self.prompts_per_step
            assert all(self.filter.classify(group) is Verdict.KEPT for group in batch)
        assert max(self.ages) <= self.scheduler.bound
        state = self.scheduler.state_dict()
        finished = [(g.prompt_id, g.epoch) for g in [*state["waiting"], *state["ready"]]]
        trained = [(group.prompt_id, group.epoch) for batch in self.batches for group in batch]
        places = Counter(trained) + Counter(self.dropped) + Counter(finished) + Counter(self.unfinished)
        assert places == Counter(self.cursor.handed_out)
        assert self.running == {}
        assert set(self.loop.refs) == {group.order for group in [*state["waiting"], *state["ready"]]}


def random_scores(rng: random.Random, keep_rate: float) -> Callable[[Prompt], list[float]]:
    return lambda prompt: MIXED if rng.random() < keep_rate else rng.choice([RIGHT, WRONG])


def heavy_tail(rng: random.Random) -> Callable[[], float]:
    return lambda: min(40.0, 0.2 + rng.expovariate(1.0) ** 2)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 40),
    keep_rate=st.floats(0.08, 1.0),
    prompts=st.integers(1, 5),
    staleness=st.integers(0, 3),
    fraction=st.sampled_from([0.0, 0.3, 1.0]),
    oversampling=st.sampled_from([1.0, 1.5, 4.0]),
)
def test_every_batch_is_exactly_full_of_informative_groups_and_no_prompt_is_lost(
    seed: int, rows: int, keep_rate: float, prompts: int, staleness: int, fraction: float, oversampling: float
) -> None:
    rng = random.Random(seed)
    simulation = Simulation(
        rows,
        random_scores(rng, keep_rate),
        heavy_tail(rng),
        prompts_per_step=prompts,
        max_staleness=staleness,
        window_fraction=fraction,
        oversampling=oversampling,
        filter_groups=FilterGroupsSection(window_groups=64),
    ).run(steps=12)
    simulation.check_the_books()
    assert len(simulation.batches) == 12
    assert simulation.most_alive <= math.floor(oversampling * (staleness + 1) * prompts)
    if oversampling == 1.0:
        assert simulation.loop.counters == {}
    if staleness == 0 and fraction == 0.0:
        assert set(simulation.ages) == {0}


def test_a_batch_may_cross_epochs_and_hold_one_prompt_twice() -> None:
    simulation = Simulation(3, lambda prompt: MIXED, lambda: 1.0, prompts_per_step=4, max_staleness=1).run(steps=6)
    simulation.check_the_books()
    epochs = [[group.epoch for group in batch] for batch in simulation.batches]
    assert epochs == [[0, 0, 0, 1], [1, 1, 2, 2], [2, 3, 3, 3], [4, 4, 4, 5], [5, 5, 6, 6], [6, 7, 7, 7]]


# What happens on data that teach nothing


@pytest.mark.parametrize(
    ("scores", "words"), [(WRONG, "16 all wrong, 0 all right"), (RIGHT, "0 all wrong, 16 all right")]
)
def test_warn_speaks_up_long_before_the_time_limit_of_the_batch(scores: list[float], words: str) -> None:
    section = FilterGroupsSection(window_groups=16, policy="warn")
    simulation = Simulation(7, lambda prompt: scores, lambda: 1.0, filter_groups=section, timeout_s=100.0)
    with pytest.raises(TimeoutError):
        simulation.run(steps=1)
    warnings = simulation.filter.take_warnings()
    assert len(warnings) == 1  # 400 groups in windows of 16 all say the same
    assert words in warnings[0]
    assert words in simulation.filter.words()
    assert simulation.filter.take_warnings() == []


def test_stop_ends_the_run_with_the_counts() -> None:
    section = FilterGroupsSection(window_groups=16, policy="stop")
    simulation = Simulation(7, lambda prompt: WRONG, lambda: 1.0, filter_groups=section)
    with pytest.raises(FilterExhausted, match="16 of the last 16 groups taught nothing: 16 all wrong"):
        simulation.run(steps=1)


def test_accept_trains_on_and_says_so() -> None:
    section = FilterGroupsSection(window_groups=16, policy="accept")
    simulation = Simulation(7, lambda prompt: WRONG, lambda: 1.0, filter_groups=section).run(steps=5)
    assert [len(batch) for batch in simulation.batches] == [4] * 5
    totals = simulation.filter.totals()
    assert totals["training/filter_groups/accepted"] == 20
    assert totals["training/filter_groups/solve_none"] == 35  # 15 before the window was full
    assert "policy=accept" in simulation.filter.take_warnings()[0]


# Over-sampling


@pytest.mark.parametrize("staleness", [0, 1])
def test_oversampling_shortens_the_wait_and_wastes_little(staleness: int) -> None:
    def simulate(oversampling: float) -> Simulation:
        rng = random.Random(11)
        return Simulation(
            10_000,
            random_scores(rng, 0.3),
            lambda: 4.0 + 2.0 * rng.random(),
            prompts_per_step=16,
            max_staleness=staleness,
            oversampling=oversampling,
            train_s=5.0,
        ).run(steps=40)

    plain, ahead = simulate(1.0), simulate(4.0)
    for simulation in (plain, ahead):
        simulation.check_the_books()
    assert sum(ahead.wait_s[5:]) < 0.6 * sum(plain.wait_s[5:])
    given_up = sum(ahead.loop.counters.values())
    assert given_up < 0.25 * ahead.started
    assert ahead.filter.keep_rate() == pytest.approx(0.3, abs=0.07)


def test_oversampling_with_a_keep_rate_of_one_changes_nothing() -> None:
    def simulate(oversampling: float) -> Simulation:
        rng = random.Random(5)
        scores = random_scores(rng, 1.0)
        return Simulation(50, scores, heavy_tail(rng), max_staleness=1, oversampling=oversampling).run(steps=10)

    plain, ahead = simulate(1.0), simulate(4.0)
    assert ahead.most_alive == plain.most_alive == 8
    assert ahead.wait_s == plain.wait_s


def test_a_given_up_prompt_comes_again_first_and_is_given_up_no_second_time() -> None:
    starts: Counter[tuple[str, int]] = Counter()

    class Watched(Simulation):
        async def _run_group(self, order: int, prompt: Prompt) -> Group:
            starts[prompt.prompt_id, prompt.epoch] += 1
            return await super()._run_group(order, prompt)

    rng = random.Random(3)
    simulation = Watched(10_000, random_scores(rng, 0.4), heavy_tail(rng), prompts_per_step=8, oversampling=3.0)
    simulation.run(steps=40).check_the_books()
    given_up = sum(simulation.loop.counters.values())
    assert given_up > 20
    assert Counter(starts.values())[2] >= given_up - len(simulation.unfinished)
    assert max(starts.values()) == 2


# Curriculum


def test_solved_prompts_rest_and_the_others_are_sampled_more_often() -> None:
    easy = {f"rows:{row}" for row in range(6)}
    simulation = Simulation(
        10,
        lambda prompt: RIGHT if prompt.prompt_id in easy else MIXED,
        lambda: 1.0,
        prompts_per_step=2,
        curriculum=CurriculumSection(enable=True, solved_times=2, rest_epochs=3),
    ).run(steps=60)
    assert [len(batch) for batch in simulation.batches] == [2] * 60
    handed = Counter(prompt_id for prompt_id, _ in simulation.cursor.handed_out)
    dropped = Counter(prompt_id for prompt_id, _ in simulation.dropped)
    assert max(dropped[name] for name in easy) <= 0.5 * min(handed[name] for name in easy)
    assert 0 < simulation.curriculum_state.resting() <= 6
    assert simulation.curriculum_state.stats()["training/curriculum/skipped"] > 0


def test_a_data_set_that_is_solved_completely_never_rests_as_a_whole() -> None:
    section = FilterGroupsSection(window_groups=16, policy="stop")
    curriculum = CurriculumSection(enable=True, solved_times=1, rest_epochs=100, max_resting_share=1.0)
    simulation = Simulation(5, lambda prompt: RIGHT, lambda: 1.0, filter_groups=section, curriculum=curriculum)
    with pytest.raises(FilterExhausted, match="too easy"):
        simulation.run(steps=1)
    assert simulation.curriculum_state.resting() == 4


def test_state_of_the_loop_survives_a_crash() -> None:
    """A second loop with the first one's state trains what the first one left, and nothing twice."""
    rng = random.Random(9)

    def simulation() -> Simulation:
        return Simulation(
            12, random_scores(rng, 0.5), heavy_tail(rng), prompts_per_step=3, max_staleness=1, oversampling=3.0
        )

    first = simulation()
    states: dict[str, Any] = {}

    async def until_the_crash() -> None:
        training = asyncio.ensure_future(first.train(100))
        await asyncio.sleep(25.0)
        states.update(loop=first.loop.state_dict(), scheduler=first.scheduler.state_dict())
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)

    virtual_time.run(until_the_crash())
    second = simulation()
    second.cursor = first.cursor
    second.scheduler.load_state_dict(states["scheduler"])

    async def go_on() -> None:
        changed = asyncio.Event()
        loop = GroupLoop(
            second.scheduler,
            second.filter,
            second.curriculum_state,
            second.cursor.next,
            second._run_group,
            lambda group: group.order,
            changed,
            lambda error: None,
            lambda number: None,
        )
        loop.load_state_dict(states["loop"])
        again = loop.state_dict()
        assert list(again["running"]) == list(states["loop"]["running"])
        assert again["again"] == states["loop"]["again"]
        waiting = [*states["scheduler"]["waiting"], *states["scheduler"]["ready"]]
        taken = [group for batch in states["scheduler"]["in_training"].values() for group in batch]
        assert set(loop.refs) == {group.order for group in [*waiting, *taken]}
        await asyncio.sleep(50.0)
        assert loop.state_dict()["running"] == {}
        await loop.stop()

    virtual_time.run(go_on())
