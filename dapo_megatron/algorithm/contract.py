"""Whether a third-party estimator or loss keeps its contract, tried on a tiny example before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from dapo_megatron.algorithm.advantage import estimate_advantages
from dapo_megatron.algorithm.policy_loss import PolicyLossOutput
from dapo_megatron.algorithm.registry import advantage_estimator, policy_loss_function
from dapo_megatron.config.algorithm_section import AlgorithmSection

T = TypeVar("T")


class ContractError(ValueError):
    """The message names the function and what it did wrong."""


def check_advantage_estimator(algorithm: AlgorithmSection) -> None:
    """Call `algorithm.adv_estimator` on groups of unequal size, one of them constant and one of a single sample.

    Raises:
        ContractError: it cannot be found, raises, returns something else than finite values `[n]`, or differs from call to call.
    """
    name = algorithm.adv_estimator
    rewards = [torch.tensor(r) for r in ([1.0, -1.0, -1.0, 0.5], [1.0, -1.0], [-1.0, -1.0, -1.0], [1.0])]

    def call() -> Tensor:
        return estimate_advantages(advantage_estimator(name), rewards, eps=algorithm.adv_eps, std=algorithm.adv_std)

    first = _guarded(name, call)
    if not torch.equal(first, _guarded(name, call)):
        raise ContractError(
            f"{name!r} gives other advantages for the same rewards at a second call; every rank computes them by itself"
        )


def check_policy_loss(algorithm: AlgorithmSection) -> None:
    """Call `algorithm.policy_loss` on two responses with masked NaN positions, then on no token at all.

    Raises:
        ContractError: it cannot be found, raises, or its loss has the wrong type, shape or masking.
    """
    name = algorithm.policy_loss
    nan = float("nan")
    mask = torch.tensor([True, True, False, True, False])
    logprobs = torch.tensor([-0.5, -1.5, nan, -0.7, -2.0], requires_grad=True)
    old = torch.tensor([-0.6, -1.4, -1.0, -0.7, nan])
    advantages = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5])

    def call(n: int) -> PolicyLossOutput:
        function = policy_loss_function(name)
        out = function(
            logprobs=logprobs[:n],
            old_logprobs=old[:n],
            advantages=advantages[:n],
            mask=mask[:n],
            clip_low=algorithm.clip_ratio_low,
            clip_high=algorithm.clip_ratio_high,
            clip_c=algorithm.clip_ratio_c,
            is_weights=torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0])[:n],
            sequence_ids=torch.tensor([0, 0, 0, 1, 1])[:n],
        )
        _check_output(name, out, n)
        return out

    def gradient() -> tuple[Tensor, Tensor]:
        loss = call(len(mask)).token_loss
        return loss.detach(), torch.autograd.grad(loss.sum(), logprobs)[0]

    loss, grad = _guarded(name, gradient)
    if not bool(torch.isfinite(loss[mask]).all() and torch.isfinite(grad[mask]).all()):
        raise ContractError(f"{name!r}: loss {loss.tolist()} or gradient {grad.tolist()} is not finite")
    if bool((loss[~mask] != 0).any()) or bool((grad[~mask] != 0).any()):
        raise ContractError(
            f"{name!r}: masked tokens must have loss and gradient exactly 0 (they may hold NaN: replace them with torch.where before "
            f"any arithmetic); mask {mask.tolist()}, loss {loss.tolist()}, gradient {grad.tolist()}"
        )
    _guarded(name, lambda: call(0))


def _check_output(name: str, out: object, n: int) -> None:
    if not isinstance(out, PolicyLossOutput):
        raise ContractError(f"{name!r} returned {type(out).__name__} instead of PolicyLossOutput")
    loss = out.token_loss
    if not isinstance(loss, Tensor) or loss.shape != (n,) or not loss.is_floating_point():
        shown = f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ContractError(f"{name!r}: token_loss is {shown} instead of a float tensor of shape ({n},)")
    if not loss.requires_grad:
        raise ContractError(f"{name!r}: token_loss is detached from logprobs (for {n} tokens); it has no gradient")
    for key, value in out.metrics.items():
        if not isinstance(value, Tensor) or value.numel() != 1 or value.requires_grad:
            raise ContractError(f"{name!r}: metric {key!r} must be a detached tensor with one element")


def _guarded(name: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except ContractError:
        raise
    except LookupError as error:
        raise ContractError(str(error.args[0]) if error.args else repr(error)) from error
    except Exception as error:
        raise ContractError(f"{name!r} failed on a tiny example: {type(error).__name__}: {error}") from error
