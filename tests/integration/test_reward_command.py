"""`dapo reward` on small files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def dapo_reward(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dapo_megatron.cli", "reward", str(file), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", COLUMNS="200"),
    )


def write(path: Path, *lines: str | dict[str, object]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_each_line_gets_a_verdict_in_order_and_bad_lines_are_named(tmp_path: Path) -> None:
    file = write(
        tmp_path / "responses.jsonl",
        {"gold": "34", "response": "Answer: 34"},
        {"gold": 34, "response": "\\boxed{35}"},
        {"gold": "34", "response": "so 34 is"},
        "{not json",
        {"gold": "34"},
        {"gold": "34", "response": "\\boxed{34} and then", "finish_reason": "length"},
        {"gold": "34", "response": "\\boxed{34}", "finish_reason": "eos"},
    )
    result = dapo_reward(file)
    assert result.returncode == 1
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    bad = {"acc": None, "extracted": None, "error": "bad_line"}
    none = {"acc": 0.0, "extracted": None, "error": None}
    assert lines == [
        {"acc": 1.0, "extracted": "34", "error": None},
        {"acc": 0.0, "extracted": "35", "error": None},
        none,
        bad,
        bad,
        none,
        bad,
    ]
    assert "accuracy 0.2500, 1 right, 3 wrong (2 of them without a final answer), 3 without a verdict" in result.stderr
    assert "line 4: Expecting property name" in result.stderr
    assert "line 5: 'response' is missing" in result.stderr
    assert "line 7: 'finish_reason' is 'eos'" in result.stderr


def test_rule_extraction_and_output_file_are_options(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", *[{"gold": str(n), "response": f"\\boxed{{{n}}}"} for n in range(300)])
    out = tmp_path / "out.jsonl"
    result = dapo_reward(file, "--out", str(out), "--extraction", "strict")
    assert (result.returncode, result.stdout) == (0, "")
    assert "accuracy 0.0000" in result.stderr
    assert len(out.read_text().splitlines()) == 300
    result = dapo_reward(file, "--rule", "tests.reward_functions:with_everything")
    assert "accuracy 0.0000" in result.stderr  # it asks for another prompt
    assert sorted(tmp_path.iterdir()) == [file, out]


def test_what_cannot_be_scored_at_all_is_an_error_of_one_line(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", {"gold": "1", "response": "x"})
    for arguments, message in (
        ((str(tmp_path / "absent.jsonl"),), "no file"),
        ((str(file), "--rule", "bogus"), "'bogus' is no reward rule"),
        ((str(file), "--extraction", "loose"), "--extraction: Input should be 'strict' or 'lenient'"),
        ((str(file), "--rule", "tests.reward_functions:returns_nan"), "returned nan (float)"),
        ((str(write(tmp_path / "empty.jsonl")),), "has no lines"),
    ):
        result = dapo_reward(Path(arguments[0]), *arguments[1:])
        assert (result.returncode, result.stdout) == (2, "")
        assert message in result.stderr
        assert "Traceback" not in result.stderr
