"""This rank's chunks of the policy, built and wrapped for data parallelism."""

from __future__ import annotations

import math

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from checkpoint_convert.architecture import ModelArchitecture, padded_vocab_size
from dapo_megatron.actor.layer_spec import layer_spec
from dapo_megatron.actor.policy_model import PolicyModel
from dapo_megatron.actor.process_groups import Layout
from dapo_megatron.actor.transformer_config import PassThrough, transformer_config
from dapo_megatron.config.sections import RunConfig
from dapo_megatron.platform import Platform


def build_model(
    arch: ModelArchitecture, config: RunConfig, layout: Layout, platform: Platform
) -> list[DistributedDataParallel]:
    """Build this rank's model chunks (one per virtual stage), uninitialised, on the rank's device.

    Returns:
        Chunks wrapped in Megatron's DDP; gradients are accumulated in float32.
    """
    cfg = transformer_config(arch, config, layout, platform)
    ddp = DistributedDataParallelConfig(
        **{
            "grad_reduce_in_fp32": True,
            "overlap_grad_reduce": False,
            "use_distributed_optimizer": config.optim.use_distributed_optimizer,
            # The trainer checks the gradient norm itself, so that it can skip the update and say which step and samples.
            "check_for_nan_in_grad": False,
        }
        | PassThrough.sort(config.megatron).ddp
    )
    chunks = []
    for stage in range(layout.vp_size):
        model = _chunk(arch, cfg, layout, platform, stage)
        # Megatron buckets the first chunk only: the others' communication hides behind it.
        chunks.append(DistributedDataParallel(cfg, ddp, model, disable_bucketing=stage > 0))
        chunks[-1].train()
    if ddp.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        cfg.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return chunks


def _chunk(
    arch: ModelArchitecture, cfg: TransformerConfig, layout: Layout, platform: Platform, vp_stage: int
) -> PolicyModel:
    virtual = vp_stage if layout.vp_size > 1 else None
    model = PolicyModel(
        config=cfg,
        transformer_layer_spec=layer_spec(arch, platform.layer_spec, cfg, virtual),
        vocab_size=padded_vocab_size(arch.vocab_size, layout.tp_size),
        max_sequence_length=arch.max_position_embeddings,
        pre_process=layout.pp_rank == 0 and vp_stage == 0,
        post_process=layout.is_last_stage and vp_stage == layout.vp_size - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_percent=arch.rotary_fraction,
        rotary_base=int(arch.rope_theta),
        vp_stage=virtual,
        embedding_scale=arch.embedding_scale,
    )
    if arch.latent_attention is None:
        model.rotary_pos_emb.inv_freq = rotary_frequencies(arch).to(layout.device)
    model.to(device=layout.device, dtype=cfg.params_dtype)
    for module in model.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()
    return model


def rotary_frequencies(arch: ModelArchitecture) -> torch.Tensor:
    """Inverse frequencies of the rotary embedding, float32 `[rotary_fraction x head_dim / 2]` (HF `modeling_rope_utils`).

    Computed here because Megatron hard-codes the low and high factors and the original length of Llama-3 scaling
    and takes only integer bases.
    """
    rotated = int(arch.head_dim * arch.rotary_fraction)
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    inv_freq = 1.0 / (arch.rope_theta**exponents)
    scaling = arch.rope_scaling
    if scaling is None:
        return inv_freq
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv_freq
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    # Short waves stay, long ones are stretched by the factor, those between are blended.
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq
