"""Training speed of the packed actor against plain transformers and against TRL's GRPO trainer.

    pip install -e '.[bench]'
    python scripts/bench/train_vs_trl.py [--repeats 3] [--samples 24] [--model FOLDER] [--without-trl]

All start from the same weights, each in its process, and in turn, never two at a time, do the same step `--repeats` times on
one ragged batch: a log-prob pass, then one update (loss of DAPO with given old log-probs, gradient clipping, AdamW).
Float32, one thread each; the first step warms up and does not count.

- ours: the batch packed as in training (`step_batch.assemble`), `actor.Actor` with world size 1;
- plain: the same model in transformers with torch's AdamW, micro-batches of `--micro-batch` samples, each padded to its
  longest, logits and `log_softmax` over all positions;
- trl: `GRPOTrainer.train()` with `loss_type="dapo"` as it is, except that completions are given instead of generated.
  Its defaults hold but for gradient checkpointing, which is off, because the others have none.
- trl-rows: the same, with TRL's output layer restricted to response tokens. TRL does that by itself where Triton runs;
  on a CPU it scores every position, which no GPU user would see.

Tokens are prompt and response tokens, without padding. The losses of the first update must agree to 1e-5 relative.
`ratio` is ours over trl for the update alone, `response_rows_ratio` ours over trl-rows; `with_logprobs` is `ratio` with the
log-prob pass included. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from train_contestants import Batch, Contestant, Ours, Plain, Settings, make_batch, make_model, serve_trl

TARGET = 1.5
LOSS_TOLERANCE = 1e-5
TIMEOUT_S = 600.0


def serve(name: str, model_dir: str, settings: Settings, connection: Connection) -> None:
    """Process of one contestant: says that it is ready, then answers commands with (seconds, result)."""
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        if name.startswith("trl"):
            serve_trl(model_dir, settings, connection, response_rows=name == "trl-rows")
            return
        contestant: Contestant = {"ours": Ours, "plain": Plain}[name](model_dir, settings)
        connection.send((0.0, None))
        calls: dict[str, Callable[[Batch], Any]] = {"logprobs": contestant.logprobs, "update": contestant.update}
        while True:
            command, batch = connection.recv()
            if command == "stop":
                connection.send((0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
                return
            began = time.perf_counter()
            result = calls[command](batch)
            connection.send((time.perf_counter() - began, result))
    except EOFError:
        return  # the main process is gone
    except Exception:
        connection.send((None, traceback.format_exc()))


class Process:
    """A contestant in a process of its own, so that no library's patches or threads reach another's."""

    def __init__(self, name: str, model_dir: str, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._connection, child = context.Pipe()
        self._process = context.Process(target=serve, args=(name, model_dir, settings, child), daemon=True)
        self._process.start()
        child.close()
        self._receive("start")

    def call(self, command: str, batch: Batch | None = None) -> tuple[float, Any]:
        """Seconds that the command took in the process, and its result."""
        self._connection.send((command, batch))
        return self._receive(command)

    def _receive(self, command: str) -> tuple[float, Any]:
        if not self._connection.poll(TIMEOUT_S):
            sys.exit(f"{self.name} did not answer {command!r} within {TIMEOUT_S:g} s")
        try:
            seconds, result = self._connection.recv()
        except EOFError:
            sys.exit(f"{self.name} died in {command!r}")
        if seconds is None:
            sys.exit(f"{self.name} failed in {command!r}:\n{result}")
        return seconds, result

    def stop(self) -> int:
        """End the process; returns its peak memory in bytes."""
        _, peak_kib = self.call("stop")
        self._process.join(60)
        return int(peak_kib) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description="Training speed of the packed actor against transformers and TRL.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-response", type=int, default=400)
    parser.add_argument("--micro-batch", type=int, default=8, help="samples in a padded micro-batch (TRL's default: 8)")
    parser.add_argument("--max-tokens", type=int, default=2048, help="tokens in a packed micro-batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="Hugging Face folder instead of the random model")
    parser.add_argument("--without-trl", action="store_true")
    args = parser.parse_args()
    if args.samples % args.group_size or args.samples % args.micro_batch or args.group_size < 2:
        parser.error("--samples must be a multiple of --group-size, at least 2, and of --micro-batch")
    if not args.without_trl and importlib.util.find_spec("trl") is None:
        parser.error("TRL is not installed: pip install -e '.[bench]', or use --without-trl")
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            make_model(Path(folder))
        return compare(args, args.model or folder)


def compare(args: argparse.Namespace, model_dir: str) -> int:
    from checkpoint_convert.architecture import read_architecture
    from dapo_megatron.observability.flops import UPDATE_PASSES, TokenCounts, forward_flops

    settings = Settings(args.samples, args.group_size, args.max_response, args.micro_batch, args.max_tokens)
    arch = read_architecture(model_dir)
    batch = make_batch(arch.vocab_size, args.samples, args.group_size, args.max_response, args.seed)
    pairs = [(len(prompt), len(response)) for prompt, response in batch.samples]
    longest = max(p for p, _ in pairs) + max(n for _, n in pairs)
    forward = forward_flops(arch, TokenCounts.of(*zip(*pairs, strict=True))).total
    print(
        f"{len(pairs)} samples, {batch.tokens} tokens, {batch.response_tokens} of them in responses; "
        f"padded to one length {1 - batch.tokens / (longest * len(pairs)):.0%} would be padding"
    )
    names = ["ours", "plain"] + ([] if args.without_trl else ["trl", "trl-rows"])
    processes = {name: Process(name, model_dir, settings) for name in names}

    logprobs = {name: process.call("logprobs", batch)[1] for name, process in processes.items()}
    for name in names[1:]:
        gap = max(float(np.abs(a - b).max()) for a, b in zip(logprobs["ours"], logprobs[name], strict=True))
        print(f"largest difference of log-probs, ours and {name}: {gap:.1e} nats")
    # Old log-probs that differ from the present ones: the loss and its clipping then depend on every log-prob.
    rng = np.random.default_rng(args.seed)
    old = [(values + rng.normal(0, 0.15, len(values))).astype(np.float32) for values in logprobs["plain"]]
    batch = replace(batch, old_logprobs=old)

    first = {name: process.call("update", batch)[1] for name, process in processes.items()}
    losses = {name: loss for name, (loss, _) in first.items()}
    gap = max(abs(loss - losses["plain"]) for loss in losses.values()) / abs(losses["plain"])
    agree = gap <= LOSS_TOLERANCE
    norms = ", ".join(f"{name} {norm:.6f}" for name, (_, norm) in first.items())
    print(
        f"first loss {losses['plain']:.7f}, largest relative difference {gap:.1e}; gradient norms {norms}", flush=True
    )

    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(args.repeats):
        for name, process in processes.items():
            scoring, update = process.call("logprobs", batch)[0], process.call("update", batch)[0]
            seconds[name].append((scoring, update))
            print(f"{name}: log-probs {scoring:.2f} s, update {update:.2f} s", flush=True)
    peaks = {name: process.stop() for name, process in processes.items()}

    updates = {name: statistics.median(update for _, update in runs) for name, runs in seconds.items()}
    steps = {name: statistics.median(map(sum, runs)) for name, runs in seconds.items()}
    for name in names:
        flops = UPDATE_PASSES * forward / updates[name]
        print(
            f"{name}: {batch.tokens / updates[name]:.0f} tokens/s in the update, {batch.tokens / steps[name]:.0f} with the "
            f"log-prob pass, {flops / 1e9:.1f} GFLOP/s of the model's, peak memory {peaks[name] / 2**20:.0f} MiB"
        )
    ratios = {name: updates[name] / updates["ours"] for name in names[1:]}
    ratio = ratios.get("trl")
    ok = agree and (ratio is None or ratio >= TARGET)
    result = {
        "name": "train_vs_trl",
        "ratio": None if ratio is None else round(ratio, 3),
        "target": TARGET,
        "ok": ok,
        "with_logprobs": None if ratio is None else round(steps["trl"] / steps["ours"], 3),
        "response_rows_ratio": None if ratio is None else round(ratios["trl-rows"], 3),
        "plain_ratio": round(ratios["plain"], 3),
        "loss_difference": float(f"{gap:.1e}"),
        "tokens_per_s": {name: round(batch.tokens / value, 1) for name, value in updates.items()},
        "gflops": {name: round(UPDATE_PASSES * forward / value / 1e9, 2) for name, value in updates.items()},
        "peak_mib": {name: round(value / 2**20) for name, value in peaks.items()},
    }
    print(json.dumps(result))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
