"""The loop that keeps every slot busy: cursor -> scheduler (a slot) -> one group -> filter -> finished, or replaced.

Pure asyncio: how a group is generated and where it is stored are functions given by the caller. One event loop, no locks.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

from rollout_service.curriculum import Curriculum
from rollout_service.filters import GroupFilter, Verdict
from rollout_service.prompts import Prompt
from rollout_service.sample import Group
from rollout_service.scheduler import Scheduler

# Counters of what over-sampling gave up: groups that had finished, and groups that were still generated or scored.
GIVEN_UP = ("discarded", "aborted")

RunGroup = Callable[[int, Prompt], Awaitable[Group]]


class GroupLoop:
    """Every prompt of the cursor is trained, filtered out, or passed over by the curriculum, once per epoch.

    A prompt that over-sampling gave up is admitted again before any new one, and while such a prompt waits nothing is
    admitted beyond the slots: it then has its guarantee and is given up no second time.

    Args:
        next_prompt: the cursor.
        run_group: generates and scores the group of an admitted prompt; may be cancelled.
        store: puts a kept group where the trainer reads it; what it returns is kept in `refs`.
        changed: set whenever a group ended, a slot may be free or admission changed.
        on_failure: gets what `run_group` or the filter raised.
        on_running: gets the number of running groups whenever it changes.

    Attributes:
        admission: prompts are admitted while it is set.
        refs: what `store` returned, by order, for groups that are kept and untrained.
        counters: `discarded` (finished groups) and `aborted` (running ones) that over-sampling gave up.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        group_filter: GroupFilter,
        curriculum: Curriculum,
        next_prompt: Callable[[], Prompt],
        run_group: RunGroup,
        store: Callable[[Group], Any],
        changed: asyncio.Event,
        on_failure: Callable[[BaseException], None],
        on_running: Callable[[int], None],
    ) -> None:
        self.admission = asyncio.Event()
        self.refs: dict[int, Any] = {}
        self.counters: Counter[str] = Counter()
        self._scheduler = scheduler
        self._filter = group_filter
        self._curriculum = curriculum
        self._next_prompt = next_prompt
        self._run_group = run_group
        self._store = store
        self._changed = changed
        self._on_failure = on_failure
        self._on_running = on_running
        self._prompts: dict[int, Prompt] = {}  # admitted and unfinished, by order
        self._again: deque[Prompt] = deque()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._fill_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to admit prompts whenever `admission` is set."""
        self._fill_task = asyncio.get_running_loop().create_task(self._fill())
        self._fill_task.add_done_callback(self._note_end)

    async def stop(self) -> None:
        """Cancel everything that runs and wait until it has ended."""
        self.admission.clear()
        tasks = [task for task in (self._fill_task, *self._tasks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def trained(self, groups: list[Group]) -> None:
        """Forget the stored groups of a trained step."""
        for group in groups:
            self.refs.pop(group.order, None)

    def state_dict(self) -> dict[str, Any]:
        """Prompts that were admitted and are unfinished, by order, and those to be admitted again."""
        orders = self._scheduler.running_orders()
        return {"running": {order: self._prompts[order] for order in orders}, "again": list(self._again)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`, once the scheduler has its own: stores kept groups, generates the others again."""
        queue = self._scheduler.state_dict()
        taken = [group for batch in queue["in_training"].values() for group in batch]
        for group in [*queue["waiting"], *queue["ready"], *taken]:
            self.refs[group.order] = self._store(group)
        self._again = deque(state["again"])
        for order in self._scheduler.running_orders():
            self._launch(order, state["running"][order])

    async def _fill(self) -> None:
        while True:
            await self.admission.wait()
            while self.admission.is_set():
                rate = 1.0 if self._again else self._filter.keep_rate()
                if not self._scheduler.free_slots(rate):
                    break
                prompt = self._again.popleft() if self._again else self._next_awake()
                self._launch(self._scheduler.admit(rate), prompt)
            self._changed.clear()
            await self._changed.wait()

    def _next_awake(self) -> Prompt:
        """The cursor's next prompt that does not rest; the curriculum leaves at least one in each epoch."""
        while True:
            prompt = self._next_prompt()
            if not self._curriculum.skips(prompt.prompt_id, prompt.epoch):
                return prompt

    def _launch(self, order: int, prompt: Prompt) -> None:
        self._prompts[order] = prompt
        task = asyncio.get_running_loop().create_task(self._process(order, prompt))
        self._tasks[order] = task
        self._on_running(len(self._tasks))
        task.add_done_callback(self._note_end)

    async def _process(self, order: int, prompt: Prompt) -> None:
        try:
            group = await self._run_group(order, prompt)
            verdict = self._filter.decide(group)
            self._curriculum.note(prompt.prompt_id, self._filter.classify(group))
            if verdict is Verdict.KEPT:
                self.refs[order] = self._store(group)
                self._scheduler.finish(order, group)
            else:
                self._scheduler.drop(order)
            del self._prompts[order]
            self._give_up_surplus()
        finally:
            self._forget_task(order)

    def _give_up_surplus(self) -> None:
        for order, group in self._scheduler.collect_surplus():
            if group is None:
                self.counters["aborted"] += 1
                self._tasks[order].cancel()
                self._forget_task(order)  # a task cancelled before its first step never gets to do it itself
                prompt = self._prompts.pop(order)
            else:
                self.counters["discarded"] += 1
                del self.refs[order]
                prompt = Prompt(group.prompt_id, group.epoch, group.prompt_text, group.prompt_ids, group.answer)
            self._again.append(prompt)

    def _forget_task(self, order: int) -> None:
        if self._tasks.pop(order, None) is not None:
            self._on_running(len(self._tasks))
        self._changed.set()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)
