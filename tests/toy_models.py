"""Tiny real Hugging Face models and a character tokenizer, written to disk for tests.

Sizes are non-square on purpose (hidden != ffn != vocabulary, heads != key/value heads, heads x head_dim !=
hidden), so that a missing transpose or a mixed-up dimension cannot hide.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

CHARACTERS = string.ascii_letters + string.digits + " .,:+-*/=?()#"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + len(CHARACTERS)


_HEADS = {"head_dim": 16}  # 4 heads x 16 = 64 != hidden
_SPARSE = {"num_hidden_layers": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_SIGMOID = {**_SPARSE, "n_routed_experts": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
# Name of the transformers classes without their endings, and what the toy differs in from the settings of `make_model`.
# Those with experts have dense and sparse layers, except Mixtral; every width can be split over 4 ranks.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_SIGMOID, "num_key_value_heads": 4, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
            "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
        },
    ),
    "gemma": ("Gemma", {**_HEADS, "tie_word_embeddings": True}),
    "glm": ("Glm", _HEADS),
    "glm4_moe": ("Glm4Moe", {**_HEADS, **_SIGMOID, "attention_bias": True, "use_qk_norm": True}),
    "llama": ("Llama", _HEADS),
    "mistral": ("Mistral", {**_HEADS, "sliding_window": None}),
    "mixtral": ("Mixtral", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),  # has no head_dim of its own
    "qwen3": ("Qwen3", _HEADS),
    "qwen3_moe": ("Qwen3Moe", {**_HEADS, **_SPARSE, "num_experts": 8, "mlp_only_layers": [1], "norm_topk_prob": True}),
}  # fmt: skip


def make_tokenizer(directory: Path | str) -> int:
    """Write a character-level tokenizer (pad 0, bos 1, eos 2, unk 3, then one id per character) into `directory`.

    It adds no special tokens by itself, has no chat template and drops characters outside its alphabet. It is a
    byte-level BPE without merges, because transformers rebuilds the tokenizer of a Qwen2 folder with its own
    byte-level pre-tokenizer, whatever tokenizer.json says; this form reads the same either way.

    Returns:
        The vocabulary size, `len(tokenizer)`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [
        {" ": "\u0120"}.get(character, character) for character in CHARACTERS
    ]  # how byte-level BPE spells a space
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos, unk = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        clean_up_tokenization_spaces=False,
    )
    Path(directory).mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(str(directory))
    return len(fast)


def make_model(
    directory: Path | str,
    family: str = "qwen3",
    tie: bool = False,
    seed: int = 0,
    tokenizer: bool = True,
    weight_scale: float = 0.2,
    **overrides: Any,
) -> Path:
    """Write a random float32 model of `family` (a key of `FAMILIES`), with its tokenizer, into `directory`.

    Args:
        tie: tie the output layer to the embedding; Gemma always does.
        seed: of the weights; two seeds give two different models of the same shape.
        tokenizer: also write the tokenizer of `make_tokenizer`.
        weight_scale: standard deviation of the weights; large enough that the policy is far from uniform and
            that biases (the router's among them) and norm weights, which transformers starts at 0 and 1, matter.
        overrides: fields of the transformers config class (for example `num_hidden_layers=4`).

    Returns:
        `directory` as a Path. The vocabulary equals the tokenizer's unless overridden.
    """
    import torch
    import transformers

    if family not in FAMILIES:
        raise ValueError(f"family={family!r}: use one of {sorted(FAMILIES)}")
    class_name, family_settings = FAMILIES[family]
    config_class = getattr(transformers, f"{class_name}Config")
    model_class = getattr(transformers, f"{class_name}ForCausalLM")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = make_tokenizer(directory) if tokenizer else VOCAB_SIZE
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": True,
    }
    settings |= {**family_settings, **overrides}
    config = config_class(**settings)
    config.dtype = torch.float32
    model = model_class(config).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * weight_scale
            # Gemma's norms scale by 1 + weight.
            parameter.copy_(noise if "norm" not in name else 0.5 * noise + (0.0 if family == "gemma" else 1.0))
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * weight_scale)
    model.save_pretrained(str(directory), safe_serialization=True)
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def load_model(directory: Path | str) -> Any:
    """Load a model written by `make_model` with transformers, float32, eager attention, in eval mode."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(directory),
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # the grouped one knows no float64
        local_files_only=True,
    )
    return model.eval()


def hf_logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> Any:
    """Log-probability of `ids[1:]`, each given what comes before: float32 `[len(ids) - 1]`, of logits / temperature."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
