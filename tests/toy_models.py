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
_SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
# Name of the transformers classes without their endings, and what the toy differs in from the settings of `make_model`.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _HEADS),
    "mixtral": ("Mixtral", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),  # has no head_dim of its own
    "qwen3": ("Qwen3", _HEADS),
    # Three layers, the middle one dense.
    "qwen3_moe": (
        "Qwen3Moe",
        {**_HEADS, **_SPARSE, "num_hidden_layers": 3, "num_experts": 8, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
}


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
        tie: tie the output layer to the embedding.
        seed: of the weights; two seeds give two different models of the same shape.
        tokenizer: also write the tokenizer of `make_tokenizer`.
        weight_scale: standard deviation of the weights; large enough that the policy is far from uniform and
            that biases and norm weights (which transformers starts at 0 and 1) matter.
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
            parameter.copy_(1.0 + 0.5 * noise if "norm" in name else noise)
    model.save_pretrained(str(directory), safe_serialization=True)
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def load_model(directory: Path | str) -> Any:
    """Load a model written by `make_model` with transformers, float32, eager attention, in eval mode."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(directory), dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def hf_logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> Any:
    """Log-probability of `ids[1:]`, each given what comes before: float32 `[len(ids) - 1]`, of logits / temperature."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
