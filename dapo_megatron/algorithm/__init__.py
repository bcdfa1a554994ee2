"""DAPO's mathematics as pure tensor functions: advantage, importance correction, policy loss, aggregation.

Nothing here knows Megatron, processes or files. Every function takes flat tensors (one entry per response token or
per sample), works on any device, and returns statistics as sums and counts, so that ranks and micro-batches can be
added up before anything is divided.
"""

from dapo_megatron.algorithm.advantage import estimate_advantages, group_advantages
from dapo_megatron.algorithm.aggregate import aggregate_loss, token_weights
from dapo_megatron.algorithm.correction import CorrectionOutput, importance_weights
from dapo_megatron.algorithm.kl import kl_penalty
from dapo_megatron.algorithm.objective import Objective, TokenBatch
from dapo_megatron.algorithm.policy_loss import LOG_RATIO_LIMIT, PolicyLossOutput, decoupled_clip_loss
from dapo_megatron.algorithm.registry import advantage_estimator, policy_loss_function

__all__ = [
    "LOG_RATIO_LIMIT",
    "CorrectionOutput",
    "Objective",
    "PolicyLossOutput",
    "TokenBatch",
    "advantage_estimator",
    "aggregate_loss",
    "decoupled_clip_loss",
    "estimate_advantages",
    "group_advantages",
    "importance_weights",
    "kl_penalty",
    "policy_loss_function",
    "token_weights",
]
