"""Throughput of the reward pool against math-verify called directly, and against verl's math-verify scorer.

    python scripts/bench/reward_throughput.py [--workers 2] [--texts 400] [--repeats 3] [--without-verl]

The three score the same texts of about 3,275 characters in turn, `--repeats` times; medians are compared. Every run
starts fresh processes and warms them up before the clock starts.

- ours: `RewardPool` with `--workers` processes;
- direct: `math_verify.parse` and `verify` with its defaults, in as many processes that share the texts beforehand;
- verl: `verl.utils.reward_score.math_verify.compute_score` as it is: its own process pool, called from as many threads
  as that has processes (4 by default). The better of its pool of 4 and of one of `--workers` counts.

verl is downloaded by pip, without what it depends on, into a folder of its own below the user's cache folder. Without
network use --without-verl. The last line is a JSON object; `ratio` is ours over direct.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rollout_service.config import RewardSection
from rollout_service.rewards.pool import RewardPool

VERL = "verl==0.9.1"
CHARS = 3275
DIRECT_TARGET, VERL_TARGET = 0.8, 2.0
WARM_UP = 16

Text = tuple[str, str]  # gold answer, response

STEPS = [
    "Let $x = {a}$ and $y = {b}$. Substituting into the equation gives $x + y = {c}$, so we continue from there.",
    "We compute \\[ \\frac{{{a}}}{{{b}}} + \\sqrt{{{c}}} \\] and simplify each term before we compare the two sides.",
    "The number of ways is $\\binom{{{c}}}{{2}}$, which follows from the multiplication principle for {a} and {b}.",
    "Since {a} is not divisible by {b}, the remainder is {r}; we keep this in mind for the last part of the argument.",
    "By symmetry the same holds for the other case, where the value is {c} instead of {a}, as was to be expected.",
]


def answers(rng: random.Random) -> tuple[str, str]:
    """A gold answer and an equal one, in proportions like those of a mathematics set."""
    n, d = rng.randint(2, 999), rng.randint(2, 99)
    kinds = [(str(n), str(n))] * 6
    kinds += [
        (f"\\frac{{{n}}}{{{d}}}", f"\\dfrac{{{2 * n}}}{{{2 * d}}}"),
        (f"{d}\\sqrt{{2}}", f"\\sqrt{{{2 * d * d}}}"),
        (f"({n},{d})", f"({n}, {d})"),
        (f"{n / 8}", f"\\frac{{{n}}}{{8}}"),
    ]
    return rng.choice(kinds)


def make_texts(n: int) -> list[Text]:
    """Responses of about `CHARS` characters that end in a box; a third of them is wrong."""
    rng = random.Random(0)
    texts = []
    for index in range(n):
        gold, answer = answers(rng)
        if index % 3 == 2:
            answer = str(rng.randint(1000, 9999))
        end = f"\nTherefore the final answer is $\\boxed{{{answer}}}$."
        body = ""
        while len(body) + len(end) < CHARS:
            a, b = rng.randint(2, 99), rng.randint(2, 99)
            body += rng.choice(STEPS).format(a=a, b=b, c=a + b, r=a % b) + "\n"
        texts.append((gold, body[: CHARS - len(end)].rsplit("\n", 1)[0] + end))
    return texts


def ours(texts: list[Text], workers: int) -> tuple[float, int]:
    """Seconds for all texts, and how many are right."""

    async def main() -> tuple[float, int]:
        pool = RewardPool(RewardSection(workers=workers))
        await pool.start()
        try:
            await asyncio.gather(*(pool.score(gold, text, False) for gold, text in texts[:WARM_UP]))
            began = time.perf_counter()
            scores = await asyncio.gather(*(pool.score(gold, text, False) for gold, text in texts))
            return time.perf_counter() - began, sum(score.acc == 1.0 for score in scores)
        finally:
            await pool.close()

    return asyncio.run(main())


def _direct_process(texts: list[Text], barrier: Any, right: Any) -> None:
    from math_verify import parse, verify

    def score(gold: str, text: str) -> bool:
        return verify(parse(f"${gold}$"), parse(text))

    for gold, text in texts[:WARM_UP]:
        score(gold, text)
    barrier.wait(120)
    count = sum(score(gold, text) for gold, text in texts)
    with right.get_lock():
        right.value += count


def direct(texts: list[Text], workers: int) -> tuple[float, int]:
    """As `ours`."""
    context = multiprocessing.get_context("spawn")
    barrier, right = context.Barrier(workers + 1), context.Value("i", 0)
    processes = [
        context.Process(target=_direct_process, args=(texts[index::workers], barrier, right), daemon=True)
        for index in range(workers)
    ]
    for process in processes:
        process.start()
    barrier.wait(120)
    began = time.perf_counter()
    for process in processes:
        process.join(600)
    seconds = time.perf_counter() - began
    if any(process.exitcode != 0 for process in processes):
        sys.exit(f"a direct process failed: exit codes {[process.exitcode for process in processes]}")
    return seconds, right.value


def verl_scorer() -> Any:
    """verl's scorer as a module; downloads verl at the first time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dapo-megatron" / VERL.replace("==", "-")
    module = cache / "module" / "verl_math_verify.py"
    if not module.is_file():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(cache / "site"),
            VERL,
        ]
        if subprocess.run(command).returncode != 0:
            sys.exit(f"{VERL} could not be downloaded; give network access, or use --without-verl")
        module.parent.mkdir(parents=True, exist_ok=True)
        # The file needs nothing else of verl, and under this name it does not hide the library math_verify.
        shutil.copy(cache / "site" / "verl" / "utils" / "reward_score" / "math_verify.py", module)
    sys.path.append(str(module.parent))
    return importlib.import_module("verl_math_verify")


def verl(texts: list[Text], scorer: Any, processes: int) -> tuple[float, int]:
    """As `ours`, with verl's pool of `processes`."""
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool, ThreadPoolExecutor(processes) as threads:
        scorer._pool = pool
        list(threads.map(lambda text: scorer.compute_score(text[1], text[0]), texts[: 4 * WARM_UP]))
        began = time.perf_counter()
        scores = list(threads.map(lambda text: scorer.compute_score(text[1], text[0]), texts))
        seconds = time.perf_counter() - began
    scorer._pool = None
    return seconds, sum(score == 1.0 for score in scores)


def main() -> int:
    parser = argparse.ArgumentParser(description="Throughput of the reward pool.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-verl", action="store_true")
    args = parser.parse_args()
    texts = make_texts(args.texts)
    print(f"{len(texts)} texts, {statistics.mean(len(text) for _, text in texts):.0f} characters on average")
    runs: dict[str, Any] = {
        "ours": lambda: ours(texts, args.workers),
        "direct": lambda: direct(texts, args.workers),
    }
    if not args.without_verl:
        scorer = verl_scorer()
        for processes in sorted({4, args.workers}):
            runs[f"verl, pool of {processes}"] = lambda processes=processes: verl(texts, scorer, processes)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            seconds, right = run()
            rates[name].append(len(texts) / seconds)
            print(f"{name}: {rates[name][-1]:.0f} texts/s, {right} right", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["ours"] / medians["direct"]
    best_verl = max((rate for name, rate in medians.items() if name.startswith("verl")), default=None)
    verl_ratio = None if best_verl is None else medians["ours"] / best_verl
    ok = ratio >= DIRECT_TARGET and (verl_ratio is None or verl_ratio >= VERL_TARGET)
    result = {
        "name": "reward_throughput",
        "ratio": round(ratio, 3),
        "target": DIRECT_TARGET,
        "verl_ratio": None if verl_ratio is None else round(verl_ratio, 3),
        "verl_target": VERL_TARGET,
        "ok": ok,
        "texts_per_s": {name: round(rate, 1) for name, rate in medians.items()},
        "workers": args.workers,
    }
    print(json.dumps(result))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
