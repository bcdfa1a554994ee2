"""Bytes of a delta weight update against a full one, in bfloat16 at learning rates 1e-6 and 1e-5; speed of the codec.

    python scripts/bench/delta_update.py [--model models/SmolLM2-135M-Instruct] [--layers 6] [--updates 16] [--versions 2]

A model is trained with AdamW as the DAPO recipe does it: float32 main weights, weight decay 0.1, gradients clipped at 1, policy
gradients of two sequences of 32 tokens with advantages of random sign, `--updates` optimizer updates for each published
version. The published weights are the main weights cast to bfloat16. For each version every tensor is encoded against the
version of before, as a publisher of the transport `delta` does it, and decoded on a copy that plays the engine, whose bytes
are compared with the trainer's at the end. Beside it: zstd on the new tensors as they are, at the same level.

`--model` is a folder with real weights (scripts/get_smollm2.py makes it), of which the first `--layers` layers are used. Without it
a model of the same shape is drawn, whose weights are spread as in such models. The first updates of Adam move the weights further than
later ones do (its averages still agree with the gradient), so a long run sends less than what is measured here.

The last line is a JSON object; `ratio` is bytes of the delta over bytes of the full update at learning rate 1e-6.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging as transformers_logging

from rollout_service.delta_codec import Words, checksum, decode, encode

TARGET = 0.1
RATES = (1e-6, 1e-5)
SEQUENCES, TOKENS = 2, 32
WARM_UP = 4  # updates before the first version, so that Adam's averages are not those of a single gradient
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def load_model(folder: str | None, layers: int) -> Any:
    torch.manual_seed(0)
    if folder is None:
        return AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=layers, **SHAPE), dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=layers, dtype=torch.float32)


def published(model: Any) -> dict[str, Words]:
    """The tensors as the engines get them, by name; a tied one once."""
    return {
        name: parameter.detach().to(torch.bfloat16).reshape(-1).view(torch.uint8).numpy().view("<u2")
        for name, parameter in model.named_parameters()
    }


def train(model: Any, optimizer: torch.optim.Optimizer, updates: int, generator: torch.Generator) -> None:
    for _ in range(updates):
        ids = torch.randint(model.config.vocab_size, (SEQUENCES, TOKENS), generator=generator)
        sign = torch.where(torch.rand(SEQUENCES, 1, generator=generator) < 0.5, -1.0, 1.0)
        logprobs = torch.log_softmax(model(ids).logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
        (-(sign * logprobs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def measure(folder: str | None, layers: int, rate: float, updates: int, versions: int) -> list[dict[str, Any]]:
    """One row for each version published at this learning rate."""
    generator = torch.Generator().manual_seed(1)
    model = load_model(folder, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    train(model, optimizer, WARM_UP, generator)
    base = published(model)
    engine = {name: words.copy() for name, words in base.items()}
    checksums = {name: checksum(words) for name, words in base.items()}
    zstd = pa.Codec("zstd", compression_level=1)
    rows = []
    for _ in range(versions):
        train(model, optimizer, updates, generator)
        new = published(model)
        started = time.perf_counter()
        encoded = {name: encode(base[name], checksums[name], words) for name, words in new.items()}
        encode_s = time.perf_counter() - started
        started = time.perf_counter()
        for name, item in encoded.items():
            held = engine[name]
            decode(memoryview(item.data), lambda _, held=held: held, held)  # type: ignore[misc]
        decode_s = time.perf_counter() - started
        assert all(np.array_equal(engine[name], words) for name, words in new.items())
        full = sum(words.nbytes for words in new.values())
        methods: dict[str, int] = {}
        for item in encoded.values():
            methods[item.method.name] = methods.get(item.method.name, 0) + 1
        rows.append(
            {
                "full": full,
                "delta": sum(len(item.data) for item in encoded.values()),
                "density": sum(item.changed for item in encoded.values()) / sum(words.size for words in new.values()),
                "zstd": sum(len(zstd.compress(words, asbytes=True)) for words in new.values()),
                "methods": methods,
                "encode_gb_per_s": full / 1e9 / encode_s,
                "decode_gb_per_s": full / 1e9 / decode_s,
            }
        )
        base, checksums = new, {name: item.checksum for name, item in encoded.items()}
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--versions", type=int, default=2)
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()  # layers that are left out are no news
    transformers_logging.disable_progress_bar()
    ratios: dict[float, float] = {}
    speeds: list[dict[str, Any]] = []
    for rate in RATES:
        rows = measure(options.model, options.layers, rate, options.updates, options.versions)
        speeds += rows
        ratios[rate] = statistics.median(row["delta"] / row["full"] for row in rows)
        for version, row in enumerate(rows, 1):
            print(
                f"lr {rate:g}, version {version}: {row['density']:.2%} of the numbers changed, {row['delta'] / 1e6:.2f} MB of "
                f"{row['full'] / 1e6:.0f} MB = {row['delta'] / row['full']:.3f} ({row['methods']}); zstd alone "
                f"{row['zstd'] / row['full']:.3f}; encode {row['encode_gb_per_s']:.2f}, decode {row['decode_gb_per_s']:.2f} GB/s"
            )
    result = {
        "name": "delta_update",
        "ratio": round(ratios[1e-6], 4),
        "target": TARGET,
        "ok": ratios[1e-6] <= TARGET,
        "ratio_lr_1e-5": round(ratios[1e-5], 4),
        "full_bytes": speeds[0]["full"],
        "updates": options.updates,
        "model": Path(options.model).name if options.model else "drawn",
        "encode_gb_per_s": round(statistics.median(row["encode_gb_per_s"] for row in speeds), 3),
        "decode_gb_per_s": round(statistics.median(row["decode_gb_per_s"] for row in speeds), 3),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
