"""GB/s of a weight update over gloo against a bare broadcast of as many bytes.

    python scripts/bench/weight_update.py [--layers 12] [--bucket-mb 32] [--repeats 9] [--publishers 8]

Four trainer ranks hold a bfloat16 Llama at TP2 x PP2 (Megatron modules, random weights). They publish it through
`DistributedTransport` to two receivers: plan, gather, merge, one group per publisher, begin to end of the update as the
resharder does it at every step. A receiver (`tests/weight_receiver.py`) is a process that answers the HTTP calls of an
SGLang server, joins the groups and receives the tensors as SGLang does, and drops them: it loads them into no model, so the
numbers are the trainer's side and the wire.

The bare broadcast sends the same number of bytes from one process to two others in one gloo group, tensor by tensor of the
bucket's size, nothing gathered, nothing asked. It is measured before and after the updates. All take the median of the
repeats after one for warming up.

The last line is a JSON object; `ratio` is GB/s of the update over GB/s of the bare broadcast.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ranks import run_ranks
from tests.weight_receiver import Receivers

TARGET = 0.8
TIMEOUT_S = 240.0
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def publish(folder: str, bucket_mb: float, publishers: int, repeats: int) -> dict[str, Any]:
    """On one trainer rank: the reports of `repeats` updates, and their wall times."""
    from dapo_megatron.platform import current_platform

    platform = current_platform()
    import torch
    import torch.distributed as dist

    from checkpoint_convert.architecture import read_architecture
    from checkpoint_convert.mapping import build_mapping
    from dapo_megatron.actor.model import build_model
    from dapo_megatron.actor.process_groups import initialize, shutdown
    from dapo_megatron.resharder.distributed import DistributedTransport
    from dapo_megatron.resharder.gather import ShardedWeights
    from dapo_megatron.resharder.plan import Destination, build_plan
    from dapo_megatron.resharder.source import source_layout
    from tests.integration.actor_ranks import Layout, make_config

    dtype = torch.bfloat16
    config = make_config(
        folder, Layout(tp=2, pp=2), 4, groups=4, group_size=2, model={"path": folder, "dtype": "bfloat16"}
    )
    here = initialize(config.parallel, platform, seed=1)
    arch = read_architecture(folder)
    mapping = build_mapping(arch, platform.layer_spec)
    chunks = build_model(arch, config, here, platform)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.uniform_(-0.1, 0.1)
    started = time.perf_counter()
    source = source_layout(chunks, mapping, here, 0)
    plan = build_plan(mapping, source, Destination(dtype.itemsize, int(bucket_mb * 2**20), publishers))
    plan_s = time.perf_counter() - started
    weights = ShardedWeights(chunks, mapping, here, 0, plan, dtype=dtype, timeout_s=60.0)
    receivers = Receivers() if here.rank == 0 else None
    walls, reports = [], []
    try:
        endpoints = [receivers.start(2, keep=False) if receivers else []]
        dist.broadcast_object_list(endpoints, src=0)
        transport = DistributedTransport(weights, backend="gloo", timeout_s=60.0)
        for version in range(1, repeats + 2):
            dist.barrier()
            began = time.perf_counter()
            reports.append(transport.send(endpoints[0], version).seconds)
            walls.append(time.perf_counter() - began)
        dist.barrier()
        transport.close()
    finally:
        if receivers is not None:
            receivers.__exit__()
    load = plan.load()
    shutdown()
    return {
        "bytes": plan.bytes,
        "buckets": len(plan.buckets),
        "load": load,
        "plan_s": plan_s,
        "connect_s": reports[0]["connect"],
        "walls": walls[1:],
        "phases": reports[1:],
    }


def bare(size: int, bucket_mb: float, repeats: int) -> list[float]:
    """On one of three processes: seconds of each broadcast of `size` bytes from rank 0."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    bucket = int(bucket_mb * 2**20)
    sizes = [bucket] * (size // bucket) + ([size % bucket] if size % bucket else [])
    source = [torch.zeros(n, dtype=torch.uint8) for n in sizes] if dist.get_rank() == 0 else []
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        started = time.perf_counter()
        for index, n in enumerate(sizes):
            # A receiver takes new memory for what comes, as an engine does.
            dist.broadcast(source[index] if source else torch.empty(n, dtype=torch.uint8), src=0)
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    dist.destroy_process_group()
    return seconds[1:]


def measure_bare(size: int, bucket_mb: float, repeats: int) -> list[float]:
    """Seconds of each repeat until the last of the three processes was through."""
    ranks = run_ranks(3, bare, size, bucket_mb, repeats, timeout_s=TIMEOUT_S)
    return [max(rank[i] for rank in ranks) for i in range(repeats)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--bucket-mb", type=float, default=32.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--publishers", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": options.layers}))
        from checkpoint_convert.architecture import read_architecture
        from checkpoint_convert.mapping import build_mapping, hf_shapes

        size = 2 * sum(math.prod(s) for s in hf_shapes(build_mapping(read_architecture(folder), "local")).values())
        bare_s = measure_bare(size, options.bucket_mb, options.repeats)
        ranks = run_ranks(
            4, publish, folder, options.bucket_mb, options.publishers, options.repeats, timeout_s=TIMEOUT_S
        )
        bare_s = statistics.median(bare_s + measure_bare(size, options.bucket_mb, options.repeats))
    first = ranks[0]
    assert first["bytes"] == size
    update_s = statistics.median(max(rank["walls"][i] for rank in ranks) for i in range(options.repeats))
    phases = {
        name: statistics.median(phase[name] for phase in first["phases"]) for name in ("begin", "gather", "send", "end")
    }
    print(f"model: {size / 1e6:.0f} MB in {first['buckets']} buckets; load of the publishers {first['load']}")
    print(f"plan {first['plan_s']:.3f} s once, connect {first['connect_s']:.3f} s once")
    print("phases: " + ", ".join(f"{name} {value:.3f} s" for name, value in phases.items()))
    print(f"update {update_s:.3f} s, {size / 1e9 / update_s:.2f} GB/s; bare broadcast {bare_s:.3f} s")
    result = {
        "bytes": size,
        "publishers": len(first["load"]),
        "update_gb_per_s": round(size / 1e9 / update_s, 3),
        "bare_gb_per_s": round(size / 1e9 / bare_s, 3),
        "ratio": round(bare_s / update_s, 3),
        "target": TARGET,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
