"""From a model's architecture and a run's layout to Megatron's TransformerConfig."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from checkpoint_convert.architecture import LatentAttention, MixtureOfExperts, ModelArchitecture
from dapo_megatron.actor.process_groups import Layout
from dapo_megatron.config.sections import RunConfig
from dapo_megatron.platform import Platform

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": gelu_tanh}


@dataclass(frozen=True)
class PassThrough:
    """The verbatim `megatron:` block, sorted by the dataclass that owns each field."""

    transformer: dict[str, Any]
    optimizer: dict[str, Any]
    ddp: dict[str, Any]

    @staticmethod
    def sort(block: dict[str, Any]) -> PassThrough:
        """A field name that several dataclasses share goes to each of them.

        Raises:
            ValueError: no dataclass knows a field.
        """
        owners = {"transformer": TransformerConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
        parts: dict[str, dict[str, Any]] = {name: {} for name in owners}
        for key, value in block.items():
            takers = [name for name, cls in owners.items() if key in {f.name for f in dataclasses.fields(cls)}]
            if not takers:
                raise ValueError(f"megatron.{key} is no field of {', '.join(cls.__name__ for cls in owners.values())}")
            for name in takers:
                parts[name][key] = value
        return PassThrough(**parts)


def transformer_config(
    arch: ModelArchitecture, config: RunConfig, layout: Layout, platform: Platform
) -> TransformerConfig:
    """Translate the architecture and the run's layout; the verbatim block wins over what is set here."""
    dtype = TORCH_DTYPES[config.model.dtype]
    fused = platform.layer_spec == "te"
    settings: dict[str, Any] = {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.ffn_hidden_size,
        "num_attention_heads": arch.num_attention_heads,
        "num_query_groups": arch.num_query_groups,
        "kv_channels": arch.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": arch.norm_eps,
        "layernorm_zero_centered_gamma": arch.norm_offset,
        "qk_layernorm": arch.qk_norm,
        "rotary_interleaved": arch.rotary_interleaved,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": _ACTIVATIONS[arch.activation],
        # Dropout would make the old log-probs differ from the new ones at the first update.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp_size,
        "pipeline_model_parallel_size": layout.pp_size,
        "virtual_pipeline_model_parallel_size": config.parallel.virtual_stages,
        "context_parallel_size": layout.cp_size,
        "sequence_parallel": config.parallel.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Packed micro-batches have different lengths, so pipeline stages announce shapes to each other.
        "variable_seq_lengths": layout.pp_size > 1,
        # The default dispatcher refuses variable lengths, even for a dense model that never dispatches.
        "moe_token_dispatcher_type": "alltoall",
        # Batched sends would mix up the two directions between the ranks of a two-stage interleaved pipeline.
        "batch_p2p_comm": platform.name == "cuda" and layout.vp_size == 1,
        "overlap_p2p_comm": platform.name == "cuda" and layout.vp_size > 1,
        # Token losses carry their global weight already: Megatron must sum, never average.
        "calculate_per_token_loss": True,
        "perform_initialization": False,
        "use_cpu_initialization": platform.name == "cpu",
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": fused and arch.activation == "silu",
        "bias_dropout_fusion": fused,
        # Transformer Engine's fused rotation of packed sequences knows only half-split rotations of whole heads.
        "apply_rope_fusion": fused
        and not arch.rotary_interleaved
        and arch.rotary_fraction == 1.0
        and arch.latent_attention is None,
        "persist_layer_norm": False,
        "finalize_model_grads_func": _finalize_summed_grads,
    }
    if arch.moe is not None:
        settings |= _moe_settings(arch.moe, layout, fused)
        settings["moe_enable_routing_replay"] = config.rollout.router_replay
    config_class = TransformerConfig
    if arch.latent_attention is not None:
        config_class = MLATransformerConfig
        settings |= _latent_attention_settings(arch, arch.latent_attention)
    settings |= PassThrough.sort(config.megatron).transformer
    return config_class(**settings)


def _moe_settings(moe: MixtureOfExperts, layout: Layout, fused: bool) -> dict[str, Any]:
    return {
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": [int(is_moe) for is_moe in moe.moe_layers],
        "moe_ffn_hidden_size": moe.expert_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.score_function,
        # Softmax over the chosen experts only is the same as over all and then renormalised.
        "moe_router_pre_softmax": moe.score_function == "softmax" and not moe.renormalize,
        "moe_router_num_groups": moe.num_groups,
        "moe_router_group_topk": moe.group_top_k,
        "moe_router_topk_scaling_factor": moe.scaling_factor if moe.scaling_factor != 1.0 else None,
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": moe.expert_bias,
        # Frozen, as the checkpoint has it; megatron.moe_router_bias_update_rate lets it follow the load.
        "moe_router_bias_update_rate": 0.0,
        # The policy gradient decides; megatron.moe_aux_loss_coeff and the balancing type add an auxiliary loss.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": fused,
        "expert_model_parallel_size": layout.ep_size,
        "expert_tensor_parallel_size": layout.etp_size,
    }


def _latent_attention_settings(arch: ModelArchitecture, mla: LatentAttention) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "qk_layernorm": True,
        "rotary_base": arch.rope_theta,
        "rope_type": "rope",
        # Without scaling the softmax is scaled by the head size alone.
        "rotary_scaling_factor": 1.0,
        "mscale_all_dim": 0.0,
    }
    scaling = arch.rope_scaling
    if scaling is not None:
        settings |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling["factor"],
            "original_max_position_embeddings": int(scaling["original_max_position_embeddings"]),
            "beta_fast": scaling["beta_fast"],
            "beta_slow": scaling["beta_slow"],
            "mscale": scaling["mscale"],
            "mscale_all_dim": scaling["mscale_all_dim"],
        }
    return settings


def _finalize_summed_grads(model: list[torch.nn.Module], num_tokens: Tensor | None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients without its division by a token count: the loss weights hold the denominators."""
    finalize_model_grads(model, None, **kwargs)
