"""From a model's architecture to Megatron's GPTModel, wrapped for data parallelism."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from checkpoint_convert.architecture import ModelArchitecture, padded_vocab_size
from dapo_megatron.actor.layer_spec import layer_spec
from dapo_megatron.actor.process_groups import Layout
from dapo_megatron.config.sections import RunConfig
from dapo_megatron.platform import Platform

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        "qk_layernorm": arch.qk_norm,
        "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        # Dropout would make the old log-probs differ from the new ones at the first update.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp_size,
        "pipeline_model_parallel_size": layout.pp_size,
        "sequence_parallel": config.parallel.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Packed micro-batches have different lengths, so pipeline stages announce shapes to each other.
        "variable_seq_lengths": layout.pp_size > 1,
        # The default dispatcher refuses variable lengths, even for a dense model that never dispatches.
        "moe_token_dispatcher_type": "alltoall",
        "batch_p2p_comm": platform.name == "cuda",
        # Token losses carry their global weight already: Megatron must sum, never average.
        "calculate_per_token_loss": True,
        "perform_initialization": False,
        "use_cpu_initialization": platform.name == "cpu",
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "apply_rope_fusion": fused,
        "persist_layer_norm": False,
        "finalize_model_grads_func": _finalize_summed_grads,
    }
    settings |= PassThrough.sort(config.megatron).transformer
    return TransformerConfig(**settings)


def _finalize_summed_grads(model: list[torch.nn.Module], num_tokens: torch.Tensor | None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients without its division by a token count: the loss weights hold the denominators."""
    finalize_model_grads(model, None, **kwargs)


def build_model(
    arch: ModelArchitecture, config: RunConfig, layout: Layout, platform: Platform
) -> list[DistributedDataParallel]:
    """Build this rank's model chunks (one per virtual stage), uninitialised, on the rank's device.

    Returns:
        Chunks wrapped in Megatron's DDP; gradients are accumulated in float32.
    """
    cfg = transformer_config(arch, config, layout, platform)
    passed = PassThrough.sort(config.megatron)
    ddp = {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": False,
        "use_distributed_optimizer": config.optim.use_distributed_optimizer,
        # The trainer checks the gradient norm itself, so that it can skip the update and say which step and samples.
        "check_for_nan_in_grad": False,
    } | passed.ddp
    model = GPTModel(
        config=cfg,
        transformer_layer_spec=layer_spec(arch, platform.layer_spec, cfg),
        vocab_size=padded_vocab_size(arch.vocab_size, layout.tp_size),
        max_sequence_length=arch.max_position_embeddings,
        pre_process=layout.pp_rank == 0,
        post_process=layout.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=int(arch.rope_theta),
    )
    model.rotary_pos_emb.inv_freq = rotary_frequencies(arch).to(layout.device)
    model.to(device=layout.device, dtype=cfg.params_dtype)
    wrapped = DistributedDataParallel(cfg, DistributedDataParallelConfig(**ddp), model)
    wrapped.train()
    return [wrapped]


def rotary_frequencies(arch: ModelArchitecture) -> torch.Tensor:
    """Inverse frequencies of the rotary embedding, float32 `[head_dim / 2]` (HF `modeling_rope_utils`).

    Computed here because Megatron hard-codes the low and high factors and the original length of Llama-3 scaling
    and takes only integer bases.
    """
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
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
