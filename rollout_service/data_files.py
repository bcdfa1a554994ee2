"""Read data files row by row: JSONL, JSON arrays, parquet, or a data set of the Hugging Face hub.

Every fault is a `DataError` that names the file, the row (from 1) and the fix. Nothing here needs a tokenizer, torch
or transformers, so that a launch can check its data in a second or two.

The answer keeps the text it has in the file: the JSON number `4` is "4", `4.0` is "4.0" and the string "012" is "012".
"""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from rollout_service.config import DataSection

# How many rows of one file `check_files` looks at. The others are checked when the service loads them.
CHECKED_ROWS = 50_000

Messages = tuple[tuple[str, str], ...]


class DataError(ValueError):
    """A data file cannot be used as configured."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data file.

    Attributes:
        row_id: `<file stem>:<row number>`, or the text in the column `data.id_key`.
        prompt: text, or `((role, content), ...)`.
        answer: gold answer as text, never empty.
        where: file and row, for messages.
    """

    row_id: str
    prompt: str | Messages
    answer: str
    where: str


class _NumberText(str):
    """A JSON number, kept as the text that stands in the file."""


def check_files(data: DataSection) -> int:
    """Check at launch that all files can be read and hold what `data` says. Needs no tokenizer.

    Looks at the first `CHECKED_ROWS` rows of each file. Data sets of the hub are not downloaded here.

    Returns:
        The number of rows (those of hub data sets not counted).

    Raises:
        DataError: naming file, row and fix.
    """
    check_template(data.template)
    total = 0
    for index, path in enumerate(data.train):
        file = _local_file(path)
        if file is None:
            continue
        limit = None if data.max_rows is None else max(0, data.max_rows - total)
        rows = _raw_rows(file, data)
        checked = 0
        for number, row in itertools.islice(rows, CHECKED_ROWS if limit is None else min(CHECKED_ROWS, limit)):
            _row(row, path, number, index, data)
            checked += 1
        if checked == 0 and limit != 0:
            raise DataError(f"{path}: the file has no rows; remove it from the list of files or fill it")
        total += checked
        if checked == CHECKED_ROWS:
            rest = _count_rows(file) - checked
            total += rest if limit is None else min(rest, limit - checked)
    return total


def first_row(data: DataSection) -> Row | None:
    """The first row, or None when it would have to be downloaded. Raises `DataError`."""
    if _local_file(data.train[0]) is None:
        return None
    return next(iterate_rows(data.train[:1], data), None)


def check_template(template: str) -> None:
    if "{prompt}" not in template:
        raise DataError(f"data.template={template!r} does not contain {{prompt}}, so every prompt would be the same")


def load_rows(paths: Iterable[str], data: DataSection) -> list[Row]:
    """All rows of the files in order, at most `data.max_rows`. Raises `DataError`."""
    return list(iterate_rows(paths, data))


def iterate_rows(paths: Iterable[str], data: DataSection) -> Iterator[Row]:
    """As `load_rows`, one row at a time: repeated rows of a large file never lie in memory together."""
    rows = _all_rows(list(paths), data)
    return rows if data.max_rows is None else itertools.islice(rows, data.max_rows)


def _all_rows(paths: list[str], data: DataSection) -> Iterator[Row]:
    stems = [Path(path).stem for path in paths]
    for index, path in enumerate(paths):
        file = _local_file(path)
        numbered = _raw_rows(file, data) if file else _hub_rows(path)
        same_stem = stems.count(stems[index]) > 1
        for number, row in numbered:
            yield _row(row, path, number, index if same_stem else None, data)


def _local_file(path: str) -> Path | None:
    """The file, or None for the name of a hub data set."""
    file = Path(path)
    if file.is_file():
        return file
    if file.is_dir():
        raise DataError(f"{path} is a folder; give the files in it, one by one")
    if file.suffix in (".jsonl", ".json", ".parquet") or file.is_absolute() or path.startswith("."):
        raise DataError(f"{path}: no such file (looked in {Path.cwd()})")
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"{path}: no such file, and a hub data set needs the package `datasets`, which is not installed"
        )
    return None


def _hub_rows(name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    import datasets

    yield from enumerate(datasets.load_dataset(name, split="train"), start=1)


def _raw_rows(file: Path, data: DataSection) -> Iterator[tuple[int, dict[str, Any]]]:
    """`(row number, row)` of a local file; the number is the line in JSONL."""
    if file.suffix == ".parquet":
        yield from _parquet_rows(file, data)
        return
    with file.open("rb") as stream:
        start = stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    yield from _json_array_rows(file) if start.startswith(b"[") else _jsonl_rows(file)


def _decode(text: str, file: Path, number: int) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, parse_int=_NumberText, parse_float=_NumberText, parse_constant=refuse)
    except ValueError as error:
        raise DataError(f"{file}, row {number}: not valid JSON ({error}); correct or delete the row") from error


def _jsonl_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    blank = None
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                blank = blank or number
                continue
            if blank is not None:  # blank lines at the end of a file are harmless
                raise DataError(f"{file}, row {blank}: the line is empty; delete it")
            yield number, _object(_decode(_utf8(line, file, number), file, number), file, number)


def _json_array_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, row in enumerate(_decode(_utf8(file.read_bytes(), file, 1), file, 1), start=1):
        yield number, _object(row, file, number)


def _utf8(raw: bytes, file: Path, number: int) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}, row {number}: not UTF-8 ({error}); convert the file to UTF-8") from error


def _object(row: Any, file: Path, number: int) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{file}, row {number}: a {type(row).__name__} instead of an object with named columns")
    return row


def _parquet_rows(file: Path, data: DataSection) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            columns = set(parquet.schema_arrow.names)
            wanted = [key for key in (data.prompt_key, data.answer_key, data.id_key) if key is not None]
            present = sorted({name for key in wanted for name in (key, key.split(".")[0]) if name in columns})
            number = 0
            for batch in parquet.iter_batches(batch_size=4096, columns=present):
                for row in batch.to_pylist():
                    number += 1
                    # Columns that were not read still belong in the message about a missing one.
                    yield number, row if len(present) >= len(set(wanted)) else dict.fromkeys(sorted(columns)) | row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a readable parquet file ({error})") from error


def _count_rows(file: Path) -> int:
    if file.suffix == ".parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(file).num_rows)
    with file.open("rb") as stream:
        start = stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        stream.seek(0)
        if start.startswith(b"["):
            return len(json.load(stream))
        return sum(1 for line in stream if line.strip())


def _row(row: dict[str, Any], path: str, number: int, file_index: int | None, data: DataSection) -> Row:
    where = f"{path}, row {number}"
    prompt = _prompt(_column(row, data.prompt_key, "prompt_key", where), data.prompt_key, where)
    answer = _text(_column(row, data.answer_key, "answer_key", where), data.answer_key, where)
    if data.answer_format == "gsm8k":
        _, marker, answer = answer.rpartition("####")
        if not marker:
            raise DataError(
                f"{where}: no `####` in {data.answer_key!r}; use data.answer_format=plain or correct the row"
            )
    if not answer.strip():
        raise DataError(f"{where}: the answer {data.answer_key!r} is empty; fill it or delete the row")
    if data.id_key is not None:
        row_id = _text(_column(row, data.id_key, "id_key", where), data.id_key, where)
    else:
        stem = Path(path).stem
        row_id = f"{stem}:{number}" if file_index is None else f"{stem}@{file_index}:{number}"
    return Row(row_id, prompt, answer.strip(), where)


def _column(row: dict[str, Any], key: str, setting: str, where: str) -> Any:
    """The value of a column; a dotted key reaches into nested columns unless a column has that very name."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            columns = ", ".join(_column_names(row)) or "none"
            near = difflib.get_close_matches(key, _column_names(row), n=1, cutoff=0.5)
            hint = f"; did you mean data.{setting}={near[0]}?" if near else f"; set data.{setting}"
            raise DataError(f"{where}: no column {key!r}, the columns are {columns}{hint}")
        value = value[part]
    return value


def _column_names(row: dict[str, Any]) -> list[str]:
    names = []
    for name, value in row.items():
        names.append(name)
        if isinstance(value, dict):
            names.extend(f"{name}.{inner}" for inner in value)
    return names


def _text(value: Any, key: str, where: str) -> str:
    if isinstance(value, str):  # also a JSON number, as its text
        return _encodable(str(value), key, where)
    missing = value is None or value != value  # NaN is how pandas writes a missing number
    if missing or isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        what = "null" if missing else f"a {type(value).__name__}"
        raise DataError(f"{where}: {key!r} is {what} instead of text or a number; correct or delete the row")
    return str(value)


def _encodable(text: str, key: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {key!r} holds half of a surrogate pair ({error.reason}); correct the row") from error
    return text


def _prompt(value: Any, key: str, where: str) -> str | Messages:
    if isinstance(value, str) and not isinstance(value, _NumberText):
        if not value.strip():
            raise DataError(f"{where}: the prompt {key!r} is empty; fill it or delete the row")
        return _encodable(value, key, where)
    if not isinstance(value, list):
        what = "null" if value is None else f"a {type(value).__name__.strip('_').replace('NumberText', 'number')}"
        raise DataError(f"{where}: the prompt {key!r} is {what} instead of text or a list of messages")
    if not value:
        raise DataError(f"{where}: the prompt {key!r} is an empty list of messages; fill it or delete the row")
    messages = []
    for message in value:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if type(role) is not str or type(content) is not str:
            raise DataError(
                f"{where}: a message of {key!r} is not {{role: text, content: text}} but {str(message)[:80]}"
            )
        messages.append((role, _encodable(content, key, where)))
    if not messages[-1][1].strip():
        raise DataError(f"{where}: the last message of {key!r} is empty; fill it or delete the row")
    return tuple(messages)
