"""Reading data files: what is read, and how each kind of fault is named."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rollout_service.config import DataSection
from rollout_service.data_files import CHECKED_ROWS, DataError, check_files, load_rows


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def section(path: str | list[str], **settings: Any) -> DataSection:
    return DataSection(train=[path] if isinstance(path, str) else path, **settings)


def answers(path: str, **settings: Any) -> list[str]:
    return [row.answer for row in load_rows([path], section(path, **settings))]


def test_answers_keep_the_text_of_the_file(tmp_path: Path) -> None:
    lines = ['"4"', "4", "4.0", '"012"', "-1e3", '" 5 "', "12345678901234567890123"]
    path = write(tmp_path / "rows.jsonl", *(f'{{"prompt": "p", "answer": {answer}}}' for answer in lines))
    assert answers(path) == ["4", "4", "4.0", "012", "-1e3", "5", "12345678901234567890123"]
    assert check_files(section(path)) == 7


def test_gsm8k_takes_what_follows_the_last_marker(tmp_path: Path) -> None:
    row = {"question": "How many clips?", "answer": "48/2 = <<48/2=24>>24\n#### no\n#### 1,072"}
    path = write(tmp_path / "gsm8k.jsonl", json.dumps(row))
    data = section(path, prompt_key="question", answer_format="gsm8k")
    (loaded,) = load_rows([path], data)
    assert (loaded.row_id, loaded.prompt, loaded.answer) == ("gsm8k:1", "How many clips?", "1,072")
    assert check_files(data) == 1


def test_dotted_keys_reach_into_nested_columns_unless_a_column_has_that_name(tmp_path: Path) -> None:
    nested = {"prompt": "p", "reward_model": {"ground_truth": "34"}, "extra": {"index": 7}}
    literal = {"prompt": "p", "reward_model.ground_truth": "35", "extra": {"index": 8}}
    path = write(tmp_path / "rows.jsonl", json.dumps(nested), json.dumps(literal))
    rows = load_rows([path], section(path, answer_key="reward_model.ground_truth", id_key="extra.index"))
    assert [(row.answer, row.row_id) for row in rows] == [("34", "7"), ("35", "8")]


def test_parquet_with_message_lists_and_nested_answers(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"p{i}"}], "reward_model": {"ground_truth": str(i)}, "other": i}
        for i in range(5)
    ]
    path = str(tmp_path / "dapo.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    data = section(path, answer_key="reward_model.ground_truth", max_rows=3)
    assert check_files(data) == 3
    assert [(row.prompt, row.answer, row.row_id) for row in load_rows([path], data)] == [
        ((("user", f"p{i}"),), str(i), f"dapo:{i + 1}") for i in range(3)
    ]
    with pytest.raises(DataError, match=r"row 1: no column 'answer'.*other, prompt, reward_model"):
        check_files(section(path))


def test_integer_columns_of_parquet_stay_integers_and_nulls_are_named(tmp_path: Path) -> None:
    path = str(tmp_path / "ints.parquet")
    table = pyarrow.table({"prompt": ["a", "b", "c"], "answer": pyarrow.array([4, 12, None], pyarrow.int64())})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError, match=r"ints\.parquet, row 3: 'answer' is null"):
        check_files(section(path))
    assert answers(path, max_rows=2) == ["4", "12"]


def test_a_json_array_reads_like_jsonl(tmp_path: Path) -> None:
    path = write(tmp_path / "set.json", "[", '{"problem": "p", "answer": 012x}', "]")
    with pytest.raises(DataError, match=r"set\.json, row 1: not valid JSON"):
        check_files(section(path, prompt_key="problem"))
    path = write(tmp_path / "set.json", "[", '{"problem": "p", "answer": 12},', '{"problem": "q", "answer": "13"}', "]")
    assert answers(path, prompt_key="problem") == ["12", "13"]


GOOD = '{"prompt": "p", "answer": "1"}'
FAULTS = [
    ('{"prompt": "p", "answer": "1"', r"row 2: not valid JSON .*correct or delete the row"),
    ('{"prompt": "p", "answer": 012}', r"row 2: not valid JSON"),
    ('{"prompt": "p", "answer": NaN}', r"row 2: not valid JSON \(NaN"),
    ("", r"row 2: the line is empty; delete it"),
    ("[1, 2]", r"row 2: a list instead of an object"),
    ('"text"', r"row 2: a str instead of an object"),
    ("{}", r"row 2: no column 'prompt', the columns are none"),
    ('{"Prompt": "p", "answer": "1"}', r"row 2: no column 'prompt', .*did you mean data\.prompt_key=Prompt\?"),
    ('{"prompt": "p", "ansver": "1"}', r"row 2: no column 'answer', .*did you mean data\.answer_key=ansver\?"),
    ('{"prompt": "", "answer": "1"}', r"row 2: the prompt 'prompt' is empty"),
    ('{"prompt": " \\n", "answer": "1"}', r"row 2: the prompt 'prompt' is empty"),
    ('{"prompt": null, "answer": "1"}', r"row 2: the prompt 'prompt' is null"),
    ('{"prompt": 5, "answer": "1"}', r"row 2: the prompt 'prompt' is a number instead of text"),
    ('{"prompt": [], "answer": "1"}', r"row 2: the prompt 'prompt' is an empty list"),
    ('{"prompt": ["hi"], "answer": "1"}', r"row 2: a message of 'prompt' is not"),
    ('{"prompt": [{"role": "user"}], "answer": "1"}', r"row 2: a message of 'prompt' is not"),
    ('{"prompt": [{"role": "user", "content": ""}], "answer": "1"}', r"row 2: the last message of 'prompt' is empty"),
    ('{"prompt": "p", "answer": null}', r"row 2: 'answer' is null"),
    ('{"prompt": "p", "answer": [4]}', r"row 2: 'answer' is a list instead of text or a number"),
    ('{"prompt": "p", "answer": true}', r"row 2: 'answer' is a bool"),
    ('{"prompt": "p", "answer": "  "}', r"row 2: the answer 'answer' is empty"),
    ('{"prompt": "p\\ud800", "answer": "1"}', r"row 2: 'prompt' holds half of a surrogate pair"),
]


@pytest.mark.parametrize(("line", "message"), FAULTS)
def test_a_malformed_row_is_named_with_file_row_and_cause(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", GOOD, line, GOOD)
    with pytest.raises(DataError, match=message) as caught:
        check_files(section(path))
    assert str(caught.value).startswith(path)
    with pytest.raises(DataError, match=message):
        load_rows([path], section(path))


def test_other_file_faults(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="the file has no rows"):
        check_files(section(empty))
    with pytest.raises(DataError, match=r"missing\.jsonl: no such file"):
        check_files(section(str(tmp_path / "missing.jsonl")))
    with pytest.raises(DataError, match="is a folder"):
        check_files(section(str(tmp_path)))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(GOOD.encode() + b'\n{"prompt": "caf\xe9", "answer": "1"}\n')
    with pytest.raises(DataError, match="row 2: not UTF-8"):
        check_files(section(str(latin)))
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="not a readable parquet file"):
        check_files(section(str(broken)))
    good = write(tmp_path / "good.jsonl", GOOD)
    with pytest.raises(DataError, match=r"no `####` in 'answer'"):
        check_files(section(good, answer_format="gsm8k"))
    with pytest.raises(DataError, match=r"data\.template"):
        check_files(section(good, template="Solve it."))


def test_a_hub_name_without_the_datasets_package_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="needs the package `datasets`"):
        check_files(section("openai/gsm8k"))


def test_blank_lines_at_the_end_and_a_byte_order_mark_are_harmless(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n\r\n\n")
    assert check_files(section(str(path))) == 1


def test_files_with_the_same_stem_give_different_row_ids(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    paths = [write(tmp_path / folder / "train.jsonl", GOOD, GOOD) for folder in ("a", "b")]
    rows = load_rows(paths, section(paths))
    assert [row.row_id for row in rows] == ["train@0:1", "train@0:2", "train@1:1", "train@1:2"]


def test_max_rows_counts_over_all_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", GOOD, GOOD, GOOD) for name in "ab"]
    for limit, expected in ((None, 6), (5, 5), (3, 3), (2, 2)):
        data = section(paths, max_rows=limit)
        assert check_files(data) == len(load_rows(paths, data)) == expected


def test_twenty_thousand_rows_are_checked_in_two_seconds_without_torch(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "a problem " * 30, "answer": "34"})
    path = write(tmp_path / "rows.jsonl", *[row] * 20_000)
    program = (
        "import sys, time; began = time.perf_counter()\n"
        "from rollout_service.config import DataSection\n"
        "from rollout_service.prompts import check_files\n"
        "assert check_files(DataSection(train=[sys.argv[1]])) == 20_000\n"
        "assert not {'torch', 'transformers', 'pyarrow', 'datasets'} & set(sys.modules)\n"
        "print(time.perf_counter() - began)"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) < 2.0


def test_rows_beyond_the_checked_ones_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *[GOOD] * (CHECKED_ROWS + 10))
    began = time.perf_counter()
    assert check_files(section(path)) == CHECKED_ROWS + 10
    assert check_files(section(path, max_rows=CHECKED_ROWS + 3)) == CHECKED_ROWS + 3
    assert time.perf_counter() - began < 10.0
