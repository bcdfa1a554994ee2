"""`dapo doctor`: what this machine and environment offer, and what a run would use.

Every library is imported in a process of its own with a deadline, so that a broken one is reported and nothing else.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

PROBE_TIMEOUT_S = 120.0
# Two at a time: each import takes a core and some hundred megabytes.
PROBES_AT_ONCE = 2

GB = 1024**3


@dataclass(frozen=True)
class Library:
    """A library to look for. `needed` says what fails without it; an optional one says what it adds."""

    title: str
    distribution: str
    module: str
    needed: bool
    purpose: str


LIBRARIES = (
    Library("torch", "torch", "torch", True, "everything"),
    Library("Megatron-Core", "megatron-core", "megatron.core", True, "the trainer"),
    Library("transformers", "transformers", "transformers", True, "tokenizers"),
    Library("SGLang", "sglang", "sglang", True, "the rollout engines"),
    Library("Ray", "ray", "ray", True, "the rollout service"),
    Library("math-verify", "math-verify", "math_verify", True, "math rewards"),
    Library("W&B", "wandb", "wandb", True, "metrics on the web"),
    Library("Transformer Engine", "transformer-engine", "transformer_engine.pytorch", False, "fused layers on CUDA"),
)

_PLATFORM_PROBE = """
import json, torch
import torch.distributed as dist
from dapo_megatron.platform import current_platform
p = current_platform()
flops = p.peak_flops(torch.bfloat16)
print(json.dumps({"name": p.name, "device": p.describe(), "backend": p.dist_backend, "layers": p.layer_spec,
    "peak_flops": flops, "gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(),
    "torch": torch.__version__, "cuda": torch.version.cuda}))
"""


@dataclass(frozen=True)
class Probe:
    """Outcome of a child process: its last output line, or why there is none."""

    output: str | None
    error: str


def probe(code: str) -> Probe:
    """Run Python code in a child process with a deadline."""
    env = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return Probe(None, f"no answer within {PROBE_TIMEOUT_S:.0f} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return Probe(lines[-1], "")
    complaints = done.stderr.strip().splitlines()
    return Probe(None, complaints[-1] if complaints else f"exit code {done.returncode}")


def look_at(library: Library, device: str) -> tuple[str, str, bool]:
    """`(version, state in words, usable)`. `device` is the platform's name."""
    try:
        version = importlib.metadata.version(library.distribution)
    except importlib.metadata.PackageNotFoundError:
        return "-", f"not installed (for {library.purpose})", False
    # A stock SGLang imports on a CPU only as the engines' start file prepares it.
    before = "import rollout_service.sglang_cpu_server; " if library.module == "sglang" and device != "cuda" else ""
    result = probe(f"{before}import {library.module}; print('ok')")
    if result.output == "ok":
        return version, "imports", True
    return version, f"import fails (for {library.purpose}): {result.error}", False


def diagnose(console: Console) -> int:
    """Print the report. Returns 0, or 1 when something that a run needs is missing."""
    console.print(_machine_table())
    found = probe(_PLATFORM_PROBE)
    device = json.loads(found.output)["name"] if found.output is not None else "unknown"
    with ThreadPoolExecutor(PROBES_AT_ONCE) as pool:
        states = list(pool.map(lambda library: look_at(library, device), LIBRARIES))
    console.print(_library_table(states))
    console.print(_choice_table(found, {lib.title: state[2] for lib, state in zip(LIBRARIES, states, strict=True)}))
    missing = [lib.title for lib, state in zip(LIBRARIES, states, strict=True) if lib.needed and not state[2]]
    if missing or found.output is None:
        what = ", ".join(missing) or f"the platform: {found.error}"
        console.print(f"not ready: {what}. scripts/setup_env.sh makes a complete environment.", markup=False)
        return 1
    console.print("ready", markup=False)
    return 0


def _machine_table() -> Table:
    table = _table("machine")
    memory = psutil.virtual_memory()
    table.add_row("python", f"{platform.python_version()} ({sys.executable})")
    table.add_row("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    table.add_row("cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")
    table.add_row("memory", f"{memory.available / GB:.1f} GB free of {memory.total / GB:.1f} GB")
    table.add_row("disk", f"{shutil.disk_usage(Path.cwd()).free / GB:.1f} GB free in {Path.cwd()}")
    shared = Path("/dev/shm")
    if shared.is_dir():
        table.add_row(
            "shared memory", f"{shutil.disk_usage(shared).free / GB:.1f} GB free (Ray's object store lies there)"
        )
    return table


def _library_table(states: list[tuple[str, str, bool]]) -> Table:
    table = _table("libraries")
    for library, (version, words, usable) in zip(LIBRARIES, states, strict=True):
        style = "green" if usable else "red" if library.needed else "yellow"
        table.add_row(library.title, version, f"[{style}]{escape(words)}[/{style}]")
    return table


def _choice_table(found: Probe, usable: dict[str, bool]) -> Table:
    table = _table("what a run would use")
    if found.output is None:
        table.add_row("platform", f"cannot be told: {found.error}")
        return table
    info = json.loads(found.output)
    cuda = info["name"] == "cuda"
    flops = info["peak_flops"]
    table.add_row("device", info["device"])
    table.add_row("torch", f"{info['torch']}, CUDA {info['cuda'] or 'none'}")
    table.add_row("collectives", f"{info['backend']} (gloo {_yes(info['gloo'])}, NCCL {_yes(info['nccl'])})")
    layers = "Transformer Engine's fused layers" if info["layers"] == "te" else "Megatron-Core's own layers"
    table.add_row("layers", layers)
    if info["layers"] == "te" and not usable["Transformer Engine"]:
        table.add_row("", "[red]but Transformer Engine does not import[/red]")
    table.add_row("engines", "SGLang" if cuda else "SGLang through the CPU start file (torch attention)")
    table.add_row(
        "peak, bfloat16", f"{flops / 1e12:.0f} TFLOP/s a device" if flops else "not known: MFU is not reported"
    )
    return table


def _yes(there: bool) -> str:
    return "yes" if there else "no"


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    return table
