"""What a reward function is, and what it may return.

A custom reward is named by import path, `package.module:function`. It is called by keyword with those of its
parameters that it declares:

    def reward(gold: str, response: str) -> float                            # one sample
    async def reward(prompt, gold, response, truncated) -> (acc, extracted)   # one sample, waits for something else
    def reward(gold: str, responses: list[str]) -> list[float]               # a whole group at once

A result is a number, or a pair of a number and the extracted answer (text or None); a function with `responses`
returns one result per response, in order. Anything else is a fault, never a wrong answer.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import numbers
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_service.rewards import Item

SAMPLE_INPUTS = ("prompt", "gold", "response", "truncated")
GROUP_INPUTS = ("prompt", "gold", "responses", "truncated")

Verdict = tuple[float, str | None]


class ContractError(ValueError):
    """A reward function cannot be loaded, takes or returns the wrong things; the message names it."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A callable with what is known about it.

    Attributes:
        name: as in the configuration.
        function: takes keywords out of `SAMPLE_INPUTS` or `GROUP_INPUTS`.
        inputs: the keywords that it takes.
        is_async: returns an awaitable.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    is_async: bool = False

    @property
    def per_group(self) -> bool:
        return "responses" in self.inputs

    def call(self, request: dict[str, Any]) -> Any:
        """The raw result (or awaitable) for a request of `request_of`."""
        return self.function(**{name: request[name] for name in self.inputs})

    def verdicts(self, result: Any, n: int) -> list[Verdict]:
        """Check a raw result.

        Args:
            n: number of responses in the request.

        Raises:
            ContractError: the message names the function and shows the result.
        """
        if not self.per_group:
            return [self._verdict(result)]
        if not isinstance(result, Sequence) and hasattr(result, "tolist"):
            result = result.tolist()  # a NumPy array or a tensor
        if isinstance(result, (str, bytes)) or not isinstance(result, Sequence) or len(result) != n:
            raise ContractError(
                f"{self.name} returned {_shown(result)} for {n} responses; expected a list of {n} results, one a response"
            )
        return [self._verdict(one) for one in result]

    def _verdict(self, result: Any) -> Verdict:
        value, extracted = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        number = isinstance(value, numbers.Real)
        if not number or not math.isfinite(float(value)) or not (extracted is None or isinstance(extracted, str)):
            raise ContractError(
                f"{self.name} returned {_shown(result)}; expected a finite number, or a pair (number, extracted answer as "
                "text or None)"
            )
        return float(value), extracted


def request_of(items: Sequence[Item], per_group: bool) -> dict[str, Any]:
    """Inputs of one call: of one sample, or of a group, whose samples share `prompt` and `gold`."""
    first = items[0]
    if not per_group:
        return {
            "prompt": first.prompt,
            "gold": first.gold,
            "response": first.response,
            "truncated": first.truncated,
        }
    return {
        "prompt": first.prompt,
        "gold": first.gold,
        "responses": [item.response for item in items],
        "truncated": [item.truncated for item in items],
    }


def is_import_path(rule: str) -> bool:
    """Whether a rule's name is of the form `package.module:function`."""
    module, colon, function = rule.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *function.split(".")))


def is_url(rule: str) -> bool:
    return rule.startswith(("http://", "https://"))


def load_function(rule: str) -> RewardFunction:
    """Import a custom reward function and read its signature.

    The current folder is searched last, so that a file of the user's is found but cannot hide a library.

    Raises:
        ContractError: it cannot be imported, or its parameters are not of the contract.
    """
    module_name, _, attribute = rule.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            function = getattr(function, part)
    except Exception as error:  # user code runs on import: whatever it raises is told with the name of the key
        raise ContractError(f"rollout.reward: cannot load {rule}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ContractError(f"rollout.reward: {rule} is {_shown(function)}, not a function")
    return RewardFunction(rule, function, _inputs(rule, function), _is_async(function))


def _inputs(rule: str, function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ContractError(f"rollout.reward: the parameters of {rule} cannot be read: {error}") from error
    keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in keywords]
    known = GROUP_INPUTS if "responses" in names else SAMPLE_INPUTS
    foreign = [p.name for p in keywords if p.name not in known and p.default is p.empty]
    foreign += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if foreign or not {"response", "responses"} & set(names):
        raise ContractError(
            f"rollout.reward: {rule} takes ({', '.join(p.name for p in parameters)}); a reward function takes `response` "
            "(one sample) or `responses` (a group), and of prompt, gold, truncated what it needs, by these names"
        )
    return tuple(name for name in known if name in names)


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a foreign __repr__ must not hide the message it is part of
        text = f"<no repr: {type(error).__name__}>"
    return f"{text[:200]} ({type(value).__name__})"
