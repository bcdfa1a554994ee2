"""Small configuration, model folder and data files for tests of the launch checks. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file

# hidden != ffn != vocabulary, attention heads != key/value heads
TOY_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_model_folder(folder: Path, **fields: Any) -> Path:
    """A folder that passes the launch checks (its weights are not a whole model)."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TOY_CONFIG | fields))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"model.embed_tokens.weight": np.zeros((101, 24), np.float32)}, folder / "model.safetensors")
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_config(folder: Path, **blocks: Any) -> Path:
    """A complete small configuration with its model folder and data file; `blocks` are merged over its top level."""
    model = write_model_folder(folder / "model")
    rows = [{"prompt": f"sort {n}", "answer": str(n)} for n in range(20, 40)]
    train = write_rows(folder / "train.jsonl", rows)
    tree: dict[str, Any] = {
        "run": {"name": "toy", "dir": str(folder / "runs")},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": [str(train)], "max_prompt_length": 32},
        "rollout": {"prompts_per_step": 4, "n_samples_per_prompt": 3, "max_response_length": 16},
        "optim": {"lr_warmup_steps": 0},
        "trainer": {"total_steps": 3, "mini_batch_prompts": 2},
        "observability": {"wandb": {"mode": "off"}},
    }
    for name, block in blocks.items():
        tree[name] = tree.get(name, {}) | block
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
