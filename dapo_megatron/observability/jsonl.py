"""Append-only JSON lines that survive a crash, and a reader that follows a file while it grows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any


def plain(value: Any) -> Any:
    """A value as strict JSON knows it: NumPy and torch scalars become numbers, NaN and infinities null.

    Raises:
        TypeError: the value is neither a scalar, text, list nor mapping.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if not isinstance(value, int | float):
        if not hasattr(value, "item"):
            raise TypeError(f"{type(value).__name__} cannot be written as JSON")
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class JsonlWriter:
    """One JSON object a line. A line is written in one call and flushed, so a crash loses at most that line.

    If a crash cut the last line of an existing file, the next line starts on a line of its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        if _ends_inside_a_line(path):
            self._file.write(b"\n")

    def write(self, record: dict[str, Any]) -> None:
        line = json.dumps(plain(record), allow_nan=False, ensure_ascii=False) + "\n"
        self._file.write(line.encode())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JsonlFollower:
    """Reads the complete lines that were added since the last call; a file that does not exist yet is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read_new(self) -> list[dict[str, Any]]:
        """New objects in order. A line that is cut or no JSON object (left by a crash) is passed over."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [record for line in data[:end].splitlines() if (record := _parse(line)) is not None]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a file."""
    return JsonlFollower(path).read_new()


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _ends_inside_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, 2)
        if file.tell() == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
