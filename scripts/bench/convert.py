"""Speed and memory of `dapo convert` in both directions against `cp` of the same files and against transformers.

    python scripts/bench/convert.py [--megabytes 971] [--repeats 5] [--folder DIR] [--without-transformers]

Makes a random bfloat16 Llama of about 509M parameters in a temporary folder, converts it to Megatron and back, copies
its weights with `cp`, and loads and saves it with transformers, in turn, `--repeats` times; medians are compared. Files are
in the page cache, and nobody waits for the disk, `cp` and transformers do not either. The same with waiting is
measured once more: `cp` followed by fsync against a conversion that syncs, its default. Every contestant runs in a warm
process of its own, so imports do not count. Peak memory is how far the process's resident memory grew. transformers maps
the files and reads them when it saves, so its load and its save belong together.

Everything that was made is deleted. The last line is a JSON object; `ratio` is the slower direction's speed over cp's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

CP_TARGET, MEMORY_TARGET = 0.4, 0.35
# With these sizes 971 MiB in bfloat16.
SIZES = {
    "vocab_size": 32000, "hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 15, "num_attention_heads": 24,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
_PAUSE_S = 0.002

Measured = tuple[float, int]  # seconds, peak bytes


@dataclass
class Race:
    """What one contestant took, in each repetition, and its peak bytes."""

    seconds: list[float]
    peak: int


def make_model(folder: Path, megabytes: int) -> int:
    """Write a model of about that size; return the bytes of its tensors."""
    import torch
    from safetensors.torch import save_file

    from checkpoint_convert.architecture import read_architecture
    from checkpoint_convert.mapping import build_mapping, hf_shapes

    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0, "tie_word_embeddings": False,
        "dtype": "bfloat16", **SIZES,
    }  # fmt: skip

    def shapes(layers: int) -> dict[str, tuple[int, ...]]:
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        return hf_shapes(build_mapping(read_architecture(folder), "local"))

    def size(of: dict[str, tuple[int, ...]]) -> int:
        return sum(torch.Size(shape).numel() for shape in of.values()) * 2

    layer = size(shapes(2)) - size(shapes(1))
    chosen = shapes(max(1, round(((megabytes << 20) - size(shapes(1))) / layer) + 1))
    noise = torch.randint(-(2**15), 2**15, (1 << 22,), dtype=torch.int16)
    # Exponents of ordinary weights, so that no number is NaN.
    noise = (noise & ~0x7F80) | 0x3C00
    tensors = {}
    for name, shape in chosen.items():
        numbers = torch.Size(shape).numel()
        tensors[name] = noise.repeat(-(-numbers // len(noise)))[:numbers].view(torch.bfloat16).view(shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return size(chosen)


class Peak:
    """Largest anonymous and file-backed resident memory of this process while it is entered, above that at the start."""

    def __enter__(self) -> Peak:
        self._stop = threading.Event()
        self.start = self.largest = _resident()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            self.largest = max(self.largest, _resident())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self.largest - self.start


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# What the contestants do; each runs in a process of its own.


def _measured(action: Callable[[], Any], watch: bool) -> Measured:
    """Seconds, and peak bytes; these only if asked to `watch`, as that takes time."""
    with Peak() if watch else nullcontext() as peak:
        began = time.perf_counter()
        action()
        seconds = time.perf_counter() - began
    return seconds, peak.bytes if peak else 0


def to_megatron(root: Path, durable: bool, watch: bool) -> dict[str, Measured]:
    from checkpoint_convert.convert import Options, hf_to_megatron

    return {
        "hf-to-megatron": _measured(
            lambda: hf_to_megatron(root / "model", root / "made", Options(durable=durable)), watch
        )
    }


def to_hf(root: Path, durable: bool, watch: bool) -> dict[str, Measured]:
    from checkpoint_convert.convert import Options, megatron_to_hf

    return {
        "megatron-to-hf": _measured(
            lambda: megatron_to_hf(root / "megatron", root / "made", Options(durable=durable)), watch
        )
    }


def transformers(root: Path, watch: bool) -> dict[str, Measured]:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    held: list[Any] = []

    def load_model() -> None:
        held.append(AutoModelForCausalLM.from_pretrained(str(root / "model"), dtype="auto", local_files_only=True))

    load = _measured(load_model, watch)
    save = _measured(lambda: held[0].save_pretrained(str(root / "made")), watch)
    return {"transformers load": load, "transformers save": save}


def copy(root: Path, durable: bool, watch: bool) -> dict[str, Measured]:
    def action() -> None:
        subprocess.run(["cp", "-r", str(root / "model"), str(root / "made")], check=True)
        if durable:
            for path in (root / "made").iterdir():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

    return {"cp": _measured(action, watch)}


def _serve(function: Callable[..., Any], args: tuple[Any, ...], requests: Any, replies: Any) -> None:
    while (watch := requests.get()) is not None:
        try:
            replies.put((function(*args, watch), None))
        except Exception as error:
            replies.put((None, f"{type(error).__name__}: {error}"))


class Contestant:
    """A process that does the same thing each time it is asked."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._requests, self._replies = context.SimpleQueue(), context.SimpleQueue()
        self._process = context.Process(
            target=_serve, args=(function, args, self._requests, self._replies), daemon=True
        )
        self._process.start()

    def run(self, watch: bool) -> dict[str, Measured]:
        self._requests.put(watch)
        result, error = self._replies.get()
        if error:
            raise RuntimeError(error)
        return result

    def close(self) -> None:
        self._requests.put(None)
        self._process.join(10)


def same_weights(first: Path, second: Path) -> bool:
    from checkpoint_convert.verify import compare

    return compare(first, second).agree


def race(root: Path, contestants: dict[str, Contestant], repeats: int) -> dict[str, Race]:
    """All in turn: once to warm up, when memory is watched, and then `repeats` times for the clock."""
    found: dict[str, Race] = {}
    for repeat in range(repeats + 1):
        for contestant in contestants.values():
            for name, (seconds, peak) in contestant.run(watch=repeat == 0).items():
                if repeat == 0:
                    found[name] = Race([], peak)
                else:
                    found[name].seconds.append(seconds)
            shutil.rmtree(root / "made", ignore_errors=True)
    for contestant in contestants.values():
        contestant.close()
    return found


def report(title: str, found: dict[str, Race], size: int) -> dict[str, float]:
    """Print medians; return seconds by name."""
    print(title)
    seconds = {name: statistics.median(race.seconds) for name, race in found.items()}
    for name, race in found.items():
        print(
            f"  {name:18} {seconds[name]:6.3f} s  {size / seconds[name] / 1e9:5.2f} GB/s  "
            f"{seconds['cp'] / seconds[name]:5.2f} of cp  {race.peak / 2**20:6.0f} MiB above the start"
        )
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed and memory of checkpoint conversion.")
    parser.add_argument("--megabytes", type=int, default=971)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="Where the temporary folder is made; needs four times the model.")
    parser.add_argument("--without-transformers", action="store_true")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="dapo-convert-bench-", dir=args.folder))
    try:
        size = make_model(root / "model", args.megabytes)
        print(f"Llama, {size / 2 / 1e6:.0f}M parameters, bfloat16, {size / 2**20:.0f} MiB, in {root}")
        from checkpoint_convert.convert import Options, hf_to_megatron, megatron_to_hf

        hf_to_megatron(root / "model", root / "megatron", Options())
        megatron_to_hf(root / "megatron", root / "made", Options())
        exact = same_weights(root / "model", root / "made")
        print(f"round trip bit-identical: {exact}", flush=True)
        shutil.rmtree(root / "made")
        contestants = {
            "cp": Contestant(copy, root, False),
            "to megatron": Contestant(to_megatron, root, False),
            "to hf": Contestant(to_hf, root, False),
        }
        if not args.without_transformers:
            contestants["transformers"] = Contestant(transformers, root)
        found = race(root, contestants, args.repeats)
        seconds = report("page cache to page cache:", found, size)
        contestants = {
            "cp": Contestant(copy, root, True),
            "to megatron": Contestant(to_megatron, root, True),
            "to hf": Contestant(to_hf, root, True),
        }
        synced_seconds = report("until it is on disk:", race(root, contestants, 2), size)
    finally:
        shutil.rmtree(root)
    directions = ("hf-to-megatron", "megatron-to-hf")
    ratios = {name: seconds["cp"] / seconds[name] for name in directions}
    memory = max(found[name].peak for name in directions) / size
    ok = exact and min(ratios.values()) >= CP_TARGET and memory <= MEMORY_TARGET
    result = {
        "name": "convert",
        "ratio": round(min(ratios.values()), 3),
        "target": CP_TARGET,
        "memory": round(memory, 3),
        "memory_target": MEMORY_TARGET,
        "ok": ok,
        "exact": exact,
        "gb_per_s": {name: round(size / value / 1e9, 3) for name, value in seconds.items()},
        "synced_ratio": round(min(synced_seconds["cp"] / synced_seconds[name] for name in directions), 3),
        "mib": round(size / 2**20),
    }
    print(json.dumps(result))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
