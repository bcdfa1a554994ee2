"""Peak memory and time of the fused log-probs against the plain path, forward and backward, at a vocabulary of 151,936.

    python scripts/bench/logprobs.py [--rows 1536] [--hidden 896] [--repeats 3] [--threads 2] [--entropy-bonus]

The two get the same hidden states, output layer and loss, in float32 and in bfloat16:

- ours: `linear_logprobs` with its default of 1,024 rows at a time;
- plain: linear layer, division by the temperature in place, `.float().log_softmax`, gather, and the entropy from the same
  log-probs. Without --entropy-bonus the loss is of the log-probs alone, and the plain path computes its entropy without
  a graph, which is its cheapest form.

Each measurement is a process of its own that does one forward and backward pass, after a warm-up with few rows. Bytes
are the highest resident memory during that pass (`VmHWM`, set back just before it; Linux only) less the resident memory
before it: results, gradients and all that is alive in between, but not the inputs. Medians of `--repeats` rounds, in
which the processes take turns. The hidden size is that of Qwen2.5-0.5B; a larger one makes the products dearer, of which
ours has four and the plain path three. The last line is a JSON object; `ratio` is bytes of plain over ours, `time_ratio`
seconds of plain over ours, each the lower one of the two dtypes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VOCAB = 151_936
BYTES_TARGET, TIME_TARGET = 4.0, 1.0
TEMPERATURE = 1.0
WARM_UP_ROWS = 16
DTYPES = ("float32", "bfloat16")
VARIANTS = ("plain", "ours")


def resident(key: str) -> int:
    """A field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def measure(variant: str, dtype_name: str, rows: int, hidden_size: int, entropy_bonus: bool) -> dict[str, float]:
    """One forward and backward pass in this process."""
    import torch
    from torch import Tensor

    from dapo_megatron.actor.logprobs import linear_logprobs

    def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden, weight).div_(TEMPERATURE)
        logp = logits.float().log_softmax(-1)
        picked = logp.gather(-1, targets[:, None]).squeeze(-1)
        with torch.set_grad_enabled(entropy_bonus):
            return picked, -(logp.exp() * logp).sum(-1)

    def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprobs(hidden, weight, targets, temperature=TEMPERATURE, vocab_size=VOCAB)

    function = {"plain": plain, "ours": ours}[variant]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, dtype_name)
    hidden = torch.randn(rows, hidden_size, generator=generator).to(dtype)
    # Logits have a standard deviation of 3.
    weight = torch.empty(VOCAB, hidden_size, dtype=dtype).normal_(0, 3 / hidden_size**0.5, generator=generator)
    targets = torch.randint(VOCAB, (rows,), generator=generator)
    advantages = torch.randn(rows, generator=generator)

    def step(n: int) -> dict[str, float]:
        some_hidden, leaf = hidden[:n].detach().requires_grad_(), weight.detach().requires_grad_()
        began = time.perf_counter()
        logprobs, entropy = function(some_hidden, leaf, targets[:n])
        forward = time.perf_counter() - began
        loss = -(logprobs * advantages[:n]).mean()
        if entropy_bonus:
            loss = loss - 0.01 * entropy.mean()
        loss.backward()
        seconds = time.perf_counter() - began
        assert some_hidden.grad is not None and leaf.grad is not None
        return {
            "seconds": seconds,
            "forward_seconds": forward,
            "mean_logprob": logprobs.mean().item(),
            "mean_entropy": entropy.mean().item(),
            "grad_hidden": some_hidden.grad.float().norm().item(),
            # Of one row in 64: a float32 copy of all would be counted.
            "grad_weight": leaf.grad[::64].float().norm().item(),
        }

    step(WARM_UP_ROWS)
    Path("/proc/self/clear_refs").write_text("5")  # set VmHWM back
    before = resident("VmRSS")
    result = step(rows)
    result["bytes"] = resident("VmHWM") - before
    return result


def in_new_process(variant: str, dtype: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", variant, dtype]
    command += ["--rows", str(args.rows), "--hidden", str(args.hidden)]
    command += ["--entropy-bonus"] if args.entropy_bonus else []
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    if done.returncode != 0:
        sys.exit(f"{variant}, {dtype}: exit code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def check_agreement(dtype: str, plain: dict[str, float], ours: dict[str, float]) -> None:
    tolerance = {"float32": 1e-4, "bfloat16": 1e-2}[dtype]
    for key in ("mean_logprob", "mean_entropy", "grad_hidden", "grad_weight"):
        if abs(plain[key] - ours[key]) > tolerance * abs(plain[key]):
            sys.exit(f"{dtype}: {key} of the two differs: {plain[key]} and {ours[key]}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory and time of log-probs.")
    parser.add_argument("--rows", type=int, default=1536)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--entropy-bonus", action="store_true", help="the loss takes the entropy, too")
    parser.add_argument("--measure", nargs=2, metavar=("VARIANT", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure, args.rows, args.hidden, args.entropy_bonus)))
        return 0
    runs: dict[tuple[str, str], list[dict[str, float]]] = {(d, v): [] for d in DTYPES for v in VARIANTS}
    for _ in range(args.repeats):
        for (dtype, variant), results in runs.items():
            results.append(result := in_new_process(variant, dtype, args))
            print(
                f"{dtype} {variant}: {result['bytes'] / 2**30:.2f} GiB, {result['seconds']:.2f} s "
                f"(forward {result['forward_seconds']:.2f} s)",
                flush=True,
            )
    for dtype in DTYPES:
        check_agreement(dtype, runs[dtype, "plain"][0], runs[dtype, "ours"][0])
    medians = {
        (d, v, key): statistics.median(result[key] for result in results)
        for (d, v), results in runs.items()
        for key in ("bytes", "seconds")
    }
    ratios = {
        (d, key): medians[d, "plain", key] / medians[d, "ours", key] for d in DTYPES for key in ("bytes", "seconds")
    }
    ratio = min(ratios[d, "bytes"] for d in DTYPES)
    time_ratio = min(ratios[d, "seconds"] for d in DTYPES)
    ok = ratio >= BYTES_TARGET and time_ratio >= TIME_TARGET
    details: dict[str, Any] = {
        d: {
            "ratio": round(ratios[d, "bytes"], 2),
            "time_ratio": round(ratios[d, "seconds"], 2),
            **{f"{v}_mib": round(medians[d, v, "bytes"] / 2**20) for v in VARIANTS},
            **{f"{v}_s": round(medians[d, v, "seconds"], 2) for v in VARIANTS},
        }
        for d in DTYPES
    }
    result = {
        "name": "logprobs",
        "ratio": round(ratio, 2),
        "target": BYTES_TARGET,
        "time_ratio": round(time_ratio, 2),
        "time_target": TIME_TARGET,
        "ok": ok,
        **details,
        "rows": args.rows,
        "hidden": args.hidden,
        "vocab": VOCAB,
        "threads": args.threads,
        "entropy_bonus": args.entropy_bonus,
    }
    print(json.dumps(result))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
