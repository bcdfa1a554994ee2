"""`ServiceSettings` for tests: a toy model, a small data file, short responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout_service.config import ServiceSettings


def write_sums(path: Path, rows: int) -> Path:
    """Write `rows` prompts `<a>+<b>=` with their sums, as JSONL."""
    lines = [json.dumps({"prompt": f"{n}+{n % 7}=", "answer": str(n + n % 7)}) for n in range(10, 10 + rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def service_settings(run_dir: Path, model_path: Path, **sections: Any) -> ServiceSettings:
    """Settings with `data`, `rollout`, `evaluation`, `ray`, `sglang` (dictionaries) laid over small defaults."""
    data = {"train": [str(run_dir / "train.jsonl")], "max_prompt_length": 32} | sections.pop("data", {})
    engine = {"startup_timeout_s": 120.0, "request_timeout_s": 60.0, "control_timeout_s": 30.0}
    rollout = {"prompts_per_step": 4, "n_samples_per_prompt": 3, "max_response_length": 24}
    rollout |= sections.pop("rollout", {})
    rollout["engine"] = engine | rollout.get("engine", {})
    settings = {
        "run_name": run_dir.name,
        "run_dir": str(run_dir),
        "model_path": str(model_path),
        "model_dtype": "float32",
        "trust_remote_code": False,
        "seed": 7,
        "data": data,
        "rollout": rollout,
        "evaluation": sections.pop("evaluation", {}),
        "ray": {"object_store_memory_mb": 100} | sections.pop("ray", {}),
    }
    return ServiceSettings(**(settings | sections))
