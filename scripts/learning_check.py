"""Switch DAPO's four parts off one by one on the quickstart task and draw what each does to accuracy and entropy.

    python scripts/learning_check.py                                  # six runs of 50 steps: 20 minutes or so on two cores
    python scripts/learning_check.py --seeds 1234 1235 1236           # mean curves over three seeds
    python scripts/learning_check.py --variants dapo no-clip-higher trainer.total_steps=20
    python scripts/learning_check.py --replot                         # the figure again, from the results file

Every run is `dapo run configs/quickstart.yaml` with the same seed, steps and data. Arguments of the form `a.b=value` are
overrides for all runs. Writes learning_check.json and learning_check.svg into --out. Runs that have already finished in
--runs-dir are not repeated; delete their folders to repeat them.

The accuracy drawn is that of all finished groups of a step, dropped ones included, so that variants with and without
dynamic sampling can be compared. "Same compute" means the same number of updates: dynamic sampling generates more samples
for them, which the results file counts (rollout_tokens).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from svg_chart import Panel, render

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/quickstart.yaml"

CLIP = "algorithm.clip_ratio_high=0.2"
AGGREGATION = "algorithm.loss_agg_mode=seq-mean-token-mean"
SAMPLING = "rollout.filter_groups.enable=false"
OVERLONG = "rollout.overlong_buffer.enable=false"
# Name, words for the figure, overrides.
VARIANTS: dict[str, tuple[str, list[str]]] = {
    "dapo": ("DAPO", []),
    "no-clip-higher": ("without clip-higher (0.2 / 0.2)", [CLIP]),
    "no-token-mean": ("without token mean (mean per sequence)", [AGGREGATION]),
    "no-dynamic-sampling": ("without dynamic sampling", [SAMPLING]),
    "no-overlong": ("without overlong punishment", [OVERLONG]),
    "none": ("without all four", [CLIP, AGGREGATION, SAMPLING, OVERLONG]),
}
# Column of the results file, metric of metrics.jsonl.
CURVES = {
    "accuracy": "training/filter_groups/acc",
    "entropy": "actor/entropy",
    "response_length": "response_length/mean",
    "clip_fraction": "actor/pg_clipfrac",
    "rollout_tokens": "rollout/tokens",
    "step_s": "timing_s/step",
}
PANELS = (("accuracy", "accuracy on training prompts"), ("entropy", "entropy in nats"))
SMOOTH_STEPS = 5


def run_variant(name: str, seed: int, runs_dir: Path, overrides: list[str], timeout_s: float) -> dict[str, Any]:
    """One `dapo run`; its curves and held-out accuracies. Ends the check with the run's output when it fails."""
    folder = runs_dir / f"{name}-seed{seed}"
    if not (folder / "summary.json").is_file():
        command = [sys.executable, "-m", "dapo_megatron.cli", "run", CONFIG, "--plain"]
        command += [
            f"run.dir={runs_dir}",
            f"run.name={folder.name}",
            f"run.seed={seed}",
            "observability.wandb.mode=off",
        ]
        command += [*VARIANTS[name][1], *overrides]
        began = time.monotonic()
        print(f"{folder.name}: {' '.join(command[3:])}", flush=True)
        result = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
        )
        if result.returncode != 0:
            sys.exit(f"{folder.name} failed (exit code {result.returncode}):\n{result.stdout[-4000:]}")
        print(f"{folder.name}: {time.monotonic() - began:.0f} s", flush=True)
    return read_run(folder)


def read_run(folder: Path) -> dict[str, Any]:
    """Curves by column, one value a step, and the accuracies of `summary.json`."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "timing_s/step" in line]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    curves = {column: [step.get(metric) for step in steps] for column, metric in CURVES.items()}
    finals = {key: value for key, value in summary.items() if key.startswith("accuracy_")}
    return {"curves": curves, **finals, "wall_time_s": summary["wall_time_s"]}


def draw(results: dict[str, Any]) -> str:
    """The figure: mean over seeds, then over the last few steps."""
    panels = []
    for column, title in PANELS:
        lines = {}
        for name, variant in results["variants"].items():
            curves = [run["curves"][column] for run in variant["runs"].values()]
            lines[VARIANTS[name][0]] = smooth([_mean(values) for values in zip(*curves, strict=False)])
        panels.append(Panel(title, lines))
    return render(panels, f"training step (mean of the last {SMOOTH_STEPS})")


def smooth(values: list[float | None]) -> list[float | None]:
    """Mean of each value and the few before it; missing values are left out."""
    return [_mean(values[max(0, i - SMOOTH_STEPS + 1) : i + 1]) for i in range(len(values))]


def table(results: dict[str, Any]) -> str:
    """Held-out accuracy after training, entropy at the end, generated tokens; means over seeds, as Markdown."""
    rows = ["| variant | sampled | greedy | last entropy | generated tokens |", "|---|---|---|---|---|"]
    for name, variant in results["variants"].items():
        runs = list(variant["runs"].values())
        cells = [_mean([run[f"accuracy_after_{mode}"] for run in runs]) for mode in ("sampled", "greedy")]
        cells.append(_mean([smooth(run["curves"]["entropy"])[-1] for run in runs]))
        tokens = _mean([sum(filter(None, run["curves"]["rollout_tokens"])) for run in runs])
        shown = ["-" if cell is None else f"{cell:.3f}" for cell in cells]
        rows.append(f"| {VARIANTS[name][0]} | {' | '.join(shown)} | {tokens or 0:,.0f} |")
    return "\n".join(rows)


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1234])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs" / "learning_check")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="longest duration of one run")
    parser.add_argument("--replot", action="store_true", help="only draw the figure from the results file")
    # Overrides may stand anywhere, also behind an option that takes several words.
    words = sys.argv[1:]
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    arguments = parser.parse_args([word for word in words if word not in overrides])

    results_file = arguments.out / "learning_check.json"
    if arguments.replot:
        results = json.loads(results_file.read_text(encoding="utf-8"))
    else:
        results = {"config": CONFIG, "overrides": overrides, "seeds": arguments.seeds, "variants": {}}
        for name in arguments.variants:
            runs = {
                str(seed): run_variant(name, seed, arguments.runs_dir.resolve(), overrides, arguments.timeout_s)
                for seed in arguments.seeds
            }
            results["variants"][name] = {"overrides": VARIANTS[name][1], "runs": runs}
        arguments.out.mkdir(parents=True, exist_ok=True)
        results_file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "learning_check.svg").write_text(draw(results), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
