"""Which fields of a config.json change the model's outputs in a way that this package cannot express.

A model that loads but computes something else is the worst outcome, so a field is read, known to be harmless, or refused
by name.
"""

from __future__ import annotations

from typing import Any

from checkpoint_convert.families.table import Family

# Fields that the translation reads, for every family.
_READ = {
    "model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "layer_types", "auto_map",
}  # fmt: skip

# Fields that say nothing about the function that the model computes (token ids, bookkeeping, training-time noise that
# the trainer sets itself, the router's auxiliary losses among it, old generation settings). `attention_dropout` belongs here: the trainer uses no dropout.
_HARMLESS = {
    "dtype", "torch_dtype", "transformers_version", "name_or_path", "use_cache", "initializer_range", "pretraining_tp",
    "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
    "unk_token_id", "decoder_start_token_id", "tokenizer_class", "attn_implementation", "experts_implementation", "return_dict",
    "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "num_labels",
    "problem_type", "finetuning_task", "task_specific_params", "prefix", "torchscript", "use_bfloat16", "keys_to_ignore_at_inference",
    "is_llama_config", "transformers.js_config", "license", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha", "seq_aux",
    "ep_size",
}  # fmt: skip
_HARMLESS_PREFIXES = ("_", "unsloth")
_SLIDING_WINDOW = {"use_sliding_window", "sliding_window", "max_window_layers"}

# Families that are known not to fit, each with the reason.
UNSUPPORTED = {
    "glm4": "it normalises the outputs of attention and MLP too (sandwich norms), which Megatron's layers do not",
    "gemma2": "logit soft-capping, sandwich norms and sliding windows",
    "gemma3": "sandwich norms and sliding windows",
    "gemma3_text": "sandwich norms and sliding windows",
    "qwen2_moe": "its shared expert has a gate (shared_expert_gate)",
    "qwen3_next": "linear attention layers and a gated shared expert",
    "gpt_oss": "sliding windows, attention sinks and biased experts",
    "deepseek_v2": "a group of experts is chosen by its best expert, in Megatron by several",
    "llama4": "chunked attention and rotary embeddings in some layers only",
    "phi3": "a fused query, key and value projection, and longrope",
}


def refusals(config: dict[str, Any], family: Family) -> list[str]:
    """Every field of `config` that cannot be honoured, each with the reason."""
    found: list[str] = []
    names = config.get("architectures") or [family.hf_class]
    if names != [family.hf_class]:
        found.append(f"architectures={names!r}, only {family.hf_class} is supported")
    if family.rotary_fraction is None and config.get("partial_rotary_factor") not in (None, 1, 1.0):
        found.append(f"partial_rotary_factor={config['partial_rotary_factor']!r}, only whole heads are rotated (1.0)")
    for name, wanted in family.required.items():
        value = config.get(name, family.defaults.get(name))
        allowed = wanted if isinstance(wanted, tuple) else (wanted,)
        if value is not None and value not in allowed:
            absent = "" if name in config else f" (the default of {family.hf_class}, for the field is missing)"
            only = " or ".join("null" if choice is None else repr(choice) for choice in allowed)
            found.append(f"{name}={value!r}{absent}, only {only} is supported for {family.model_type}")
    custom = [
        key
        for key, value in (config.get("auto_map") or {}).items()
        if not str(key).startswith("AutoTokenizer") and value not in family.own_code
    ]
    if custom:
        found.append(f"auto_map names the model's own code ({', '.join(custom)}), which is not run")
    if family.sliding_window:
        found += _sliding_window_refusals(config)
    other_layers = sorted({str(kind) for kind in config.get("layer_types") or [] if kind != "full_attention"})
    if other_layers:
        found.append(f"layer_types contains {', '.join(other_layers)}, only full_attention is supported")
    handled = _READ | _HARMLESS | set(family.required) | set(family.defaults) | set(family.reads)
    handled |= _SLIDING_WINDOW if family.sliding_window else set()
    for name, value in config.items():
        # null, false, 0 and empty values switch a feature off.
        if name not in handled and not name.startswith(_HARMLESS_PREFIXES) and value:
            found.append(
                f"{name}={value!r} is unknown here (remove the field if it does not change the model's outputs)"
            )
    return found


def _sliding_window_refusals(config: dict[str, Any]) -> list[str]:
    # HF gives layer i the window if use_sliding_window and i >= max_window_layers; explicit layer_types win.
    in_use = bool(config.get("use_sliding_window")) and config.get("sliding_window", 4096) is not None
    if not in_use or config.get("layer_types"):
        return []
    first, layers = config.get("max_window_layers", 28), config.get("num_hidden_layers", 0)
    if isinstance(first, int) and isinstance(layers, int) and first >= layers:
        return []
    return [
        f"use_sliding_window=true gives layers from max_window_layers={first} on a sliding window, which is not supported"
    ]
