"""Typed access to the fields of a HF config.json; errors name file and field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_convert.errors import CheckpointError


def read_config(model_dir: Path) -> tuple[Path, dict[str, Any]]:
    """Return path and content of `<model_dir>/config.json`.

    Raises:
        CheckpointError: no such folder or file, or not a JSON object.
    """
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise CheckpointError(
            f"{model_dir}: no such folder; give a Hugging Face model folder with config.json and safetensors"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: not found; {model_dir} is not a Hugging Face model folder") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return path, config


class Fields:
    """The values of config.json, completed by the defaults of the HF config class.

    Raises (each method):
        CheckpointError: the field is missing (or null) or has another type or range than the method's name says.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = config

    def given(self, name: str) -> bool:
        """Whether the field has a value that is not null."""
        return self.config.get(name) is not None

    def value(self, name: str) -> Any:
        if self.config.get(name) is None:
            raise CheckpointError(f"{self.path}: {name} is missing")
        return self.config[name]

    def integer(self, name: str) -> int:
        """A positive integer."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise CheckpointError(f"{self.path}: {name}={value!r} must be a positive integer")
        return value

    def count(self, name: str) -> int:
        """An integer from 0 on."""
        return 0 if self.value(name) == 0 else self.integer(name)

    def number(self, name: str) -> float:
        """A positive, finite number."""
        return positive(self.path, name, self.value(name))

    def boolean(self, name: str) -> bool:
        value = self.value(name)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {name}={value!r} must be true or false")
        return value

    def indices(self, name: str) -> tuple[int, ...]:
        """A list of integers from 0 on; missing or null is empty."""
        values = self.config.get(name) or []
        if not isinstance(values, list) or any(
            isinstance(value, bool) or not isinstance(value, int) or value < 0 for value in values
        ):
            raise CheckpointError(f"{self.path}: {name}={values!r} must be a list of layer numbers")
        return tuple(values)

    def refuse(self, reason: str) -> CheckpointError:
        """The error for a model that the fields describe and that cannot be reproduced."""
        return CheckpointError(f"{self.path}: cannot reproduce this model: {reason}")


def positive(path: Path, name: str, value: Any) -> float:
    """Return `value` as a float.

    Raises:
        CheckpointError: not a positive, finite number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise CheckpointError(f"{path}: {name}={value!r} must be a positive number")
    return float(value)
