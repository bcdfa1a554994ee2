"""Advantage estimators and policy losses by the names that the configuration uses, or by import path."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TypeVar, cast

from dapo_megatron.algorithm import advantage, policy_loss
from dapo_megatron.algorithm.advantage import AdvantageEstimator
from dapo_megatron.algorithm.policy_loss import PolicyLoss

ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {
    "grpo": advantage.grpo,
    "dapo": advantage.grpo,
    "dr_grpo": advantage.dr_grpo,
    "rloo": advantage.rloo,
    "reinforce_plus_plus": advantage.reinforce_plus_plus,
}

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "clip": policy_loss.decoupled_clip_loss,
    "gspo": policy_loss.gspo_loss,
    "cispo": policy_loss.cispo_loss,
    "pg": policy_loss.pg_loss,
}

F = TypeVar("F")


def advantage_estimator(name: str) -> AdvantageEstimator:
    """The estimator behind `algorithm.adv_estimator`.

    Raises:
        LookupError: the name is not known, or the import path leads to no function.
    """
    return _resolve(name, ADVANTAGE_ESTIMATORS)


def policy_loss_function(name: str) -> PolicyLoss:
    """The loss behind `algorithm.policy_loss`.

    Raises:
        LookupError: as above.
    """
    return _resolve(name, POLICY_LOSSES)


def _resolve(name: str, known: Mapping[str, F]) -> F:
    if name in known:
        return known[name]
    module_name, separator, attribute = name.partition(":")
    if not separator:
        raise LookupError(
            f"{name!r} is not known; use one of {', '.join(known)}, or an import path package.module:function"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise LookupError(
            f"{name!r}: module {module_name} cannot be imported: {error}; install it, or put its folder on PYTHONPATH for all ranks"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise LookupError(f"{name!r}: module {module_name} ({module.__file__}) has no function {attribute}")
    return cast(F, function)
