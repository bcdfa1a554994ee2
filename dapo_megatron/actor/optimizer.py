"""Megatron's optimizer and learning-rate schedule, and an update that refuses non-finite gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from dapo_megatron.actor.transformer_config import PassThrough
from dapo_megatron.config.sections import RunConfig


@dataclass(frozen=True)
class StepResult:
    """One optimizer update: `applied` is false when the gradient was not finite and nothing was changed."""

    applied: bool
    grad_norm: float
    lr: float


class ActorOptimizer:
    """AdamW over the model chunks, with the schedule counted in updates.

    Update k (from 1) uses the schedule's value at k, so that the first update is not lost to a learning rate of 0 and
    the last one of a decaying schedule has exactly the final rate.
    """

    def __init__(self, config: RunConfig, chunks: list[DistributedDataParallel]) -> None:
        optim = config.optim
        self.clip_grad = optim.clip_grad
        updates_per_step = config.rollout.prompts_per_step // config.trainer.mini_batch_prompts
        total = config.trainer.total_steps * updates_per_step
        warmup = optim.lr_warmup_steps * updates_per_step
        passed = PassThrough.sort(config.megatron).optimizer
        if passed.get("optimizer_cpu_offload"):
            if next(chunks[0].parameters()).device.type == "cpu":
                raise ValueError("megatron.optimizer_cpu_offload: the optimizer is on the CPU already; remove the key")
            # The other path copies the weights to the host when it is built, and never looks at those loaded afterwards.
            passed["use_precision_aware_optimizer"] = True
        settings = {
            "optimizer": "adam",
            "lr": optim.lr,
            "min_lr": optim.min_lr,
            "weight_decay": optim.weight_decay,
            "adam_beta1": optim.adam_beta1,
            "adam_beta2": optim.adam_beta2,
            "adam_eps": optim.adam_eps,
            "clip_grad": optim.clip_grad,
            "bf16": config.model.dtype == "bfloat16",
            "params_dtype": next(chunks[0].parameters()).dtype,
            "use_distributed_optimizer": optim.use_distributed_optimizer,
        } | passed
        megatron_config = OptimizerConfig(**settings)
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(
            megatron_config, chunks, config_overrides=get_standard_config_overrides(megatron_config)
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=optim.lr,
            min_lr=optim.lr if optim.lr_decay_style == "constant" else optim.min_lr,
            lr_warmup_steps=warmup,
            # A run shorter than its warm-up never leaves it; Megatron insists on a decay that ends later.
            lr_decay_steps=max(total, warmup + 1),
            lr_decay_style=optim.lr_decay_style,
            start_wd=optim.weight_decay,
            end_wd=optim.weight_decay,
            wd_incr_steps=max(total, 1),
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
        )
        self._chunks = chunks

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> StepResult:
        """Clip and apply the reduced gradients, or leave everything as it was when their norm is not finite.

        The norm is global, so every rank takes the same branch.
        """
        self.scheduler.step(increment=1)
        lr = self._lr()
        found_inf = self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if found_inf or not math.isfinite(grad_norm):
            return StepResult(applied=False, grad_norm=grad_norm, lr=lr)
        if self.clip_grad > 0:
            for part in _parts(self.optimizer):
                parameters = [] if part.is_stub_optimizer else part.get_parameters()
                if parameters:
                    clip_grad_by_total_norm_fp32(
                        parameters,
                        self.clip_grad,
                        grad_norm,
                        # Where the precision-aware optimizer keeps its gradients; the others would be left unclipped.
                        use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                    )
        self.optimizer.step_with_ready_grads()
        return StepResult(applied=True, grad_norm=grad_norm, lr=lr)

    def reload_main_params(self) -> None:
        """Copy the model's weights into the float32 main parameters, after weights were loaded from outside."""
        self.optimizer.reload_model_params()

    def _lr(self) -> float:
        groups = self.optimizer.param_groups
        return float(groups[0]["lr"]) if groups else 0.0


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]
