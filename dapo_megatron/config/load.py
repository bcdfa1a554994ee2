"""From a YAML file and `a.b.c=value` overrides to a checked `RunConfig`, and back to YAML.

Scalars follow YAML 1.2 in the file and on the command line alike, so that `1e-6` is a number everywhere (also in
the verbatim blocks), and `on`, `012` and `12:30:45` stay the text that was typed instead of a boolean, an octal
number and a sexagesimal one. OmegaConf merges the two and resolves `${...}`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from checkpoint_convert.architecture import read_architecture
from dapo_megatron.config.errors import ConfigError
from dapo_megatron.config.passthrough import check_passthrough
from dapo_megatron.config.reference import find_key, iter_keys, nearest_key
from dapo_megatron.config.routing import routing_shape
from dapo_megatron.config.sections import RunConfig
from rollout_service.config import ServiceSettings

# A validator's message that begins with a key of its own section: `sampling.temperature=0: ...`.
_STARTS_WITH_KEY = re.compile(r"[a-z_]+(\.[a-z_]+)*[=/]")
# Files by these endings are paths; anything else in data.train may be the name of a hub data set.
_DATA_SUFFIXES = {".jsonl", ".json", ".parquet"}


class _Yaml12Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2, refusing a key that stands twice in one block."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Yaml12Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Yaml12Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, merge, type-check and complete a configuration.

    Relative paths are taken from the current folder and come back absolute, so that every process of the run, on
    whichever folder it stands, means the same files. The verbatim blocks are checked against the installed
    Megatron-Core and SGLang (`passthrough.py`).

    Args:
        path: YAML file.
        overrides: `a.b.c=value`; values are YAML.

    Raises:
        ConfigError: with every problem found.
    """
    source = str(path)
    if overrides:
        source += f" with {len(overrides)} override{'s' if len(overrides) > 1 else ''}"
    raw = _merge(source, _read(path), _parse_overrides(source, overrides))
    problems = [_bool_problem(key, value) for key, value in _leaves(raw) if _is_misplaced_bool(key, value)]
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(source, problems + [_explain(detail) for detail in error.errors()]) from None
    problems += check_passthrough(config)
    if problems:
        raise ConfigError(source, problems)
    return _with_absolute_paths(config)


def to_yaml(config: RunConfig) -> str:
    """The whole tree as YAML that `load_config` reads back to an equal configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape_interpolation(config.model_dump(mode="json"))))


def service_settings(config: RunConfig, run_dir: Path) -> ServiceSettings:
    """What the rollout service needs of a configuration, in one piece.

    Raises:
        CheckpointError: router replay, and a model folder whose config.json cannot be read.
    """
    return ServiceSettings(
        run_name=config.run.name,
        run_dir=str(run_dir.resolve()),
        model_path=config.model.path,
        model_dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        seed=config.run.seed,
        data=config.data,
        rollout=config.rollout,
        evaluation=config.evaluation,
        ray=config.ray,
        sglang=dict(config.sglang),
        routing=routing_shape(read_architecture(config.model.path)) if config.rollout.router_replay else None,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(str(path), [f"no such file (looked from {Path.cwd()})"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"cannot be read: {error}"]) from None
    try:
        tree = yaml.load(text, Loader=_Yaml12Loader)
    except yaml.YAMLError as error:
        raise ConfigError(str(path), [_yaml_problem(error)]) from None
    if not isinstance(tree, dict):
        raise ConfigError(str(path), ["the file holds no `key: value` block"])
    return tree


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {error.problem}"
    return f"not valid YAML: {error}"


def _parse_overrides(source: str, overrides: Sequence[str]) -> list[tuple[str, Any]]:
    parsed, problems = [], []
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not re.fullmatch(r"\w[\w-]*(\.\w[\w-]*)*", key):
            problems.append(f"override {text!r} is not of the form a.b.c=value")
            continue
        try:
            parsed.append((key, yaml.load(value, Loader=_Yaml12Loader)))
        except yaml.YAMLError as error:
            problems.append(f"override {text!r}: {_yaml_problem(error)}")
    if problems:
        raise ConfigError(source, problems)
    return parsed


def _merge(source: str, tree: dict[str, Any], overrides: list[tuple[str, Any]]) -> dict[str, Any]:
    try:
        merged = OmegaConf.create(tree)
        for key, value in overrides:
            OmegaConf.update(merged, key, value, merge=True, force_add=True)
        resolved = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(source, [str(error).strip().replace("\n", " ")]) from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    else:
        yield path, tree


def _is_misplaced_bool(path: tuple[str, ...], value: Any) -> bool:
    """A boolean for a number would be taken as 0 or 1; that is never meant."""
    if not isinstance(value, bool) or path[0] in ("megatron", "sglang"):
        return False
    key = find_key(path)
    return key is not None and not key.is_bool


def _bool_problem(path: tuple[str, ...], value: Any) -> str:
    key = find_key(path)
    expected = key.type_text.replace("\\", "") if key else "another type"
    return f"{'.'.join(path)}: {str(value).lower()} (bool) given, expected {expected}"


def _explain(detail: ErrorDetails) -> str:
    path = tuple(str(part) for part in detail["loc"])
    dotted = ".".join(path)
    given = detail.get("input")
    match detail["type"]:
        case "extra_forbidden":
            return f"{dotted}: unknown key" + _suggestion(path)
        case "missing":
            return f"{dotted}: required, but not given" + _meaning(path)
        case "value_error":
            message = str(detail["ctx"]["error"]) if "ctx" in detail else detail["msg"]
            if dotted and _STARTS_WITH_KEY.match(message):
                return f"{dotted}.{message}"
            return f"{dotted}: {message}" if dotted else message
        case "string_type":
            hint = "; put it in quotes" if isinstance(given, bool | int | float) else ""
            return f"{dotted}: {_shown(given)} given, expected text{hint}" + _meaning(path)
        case _:
            message = detail["msg"][0].lower() + detail["msg"][1:]
            return f"{dotted}: {_shown(given)} given, {message}" + _meaning(path)


def _shown(given: Any) -> str:
    if given is None:
        return "null"
    if isinstance(given, dict):
        return "a block"
    return f"{given!r} ({type(given).__name__})"


def _suggestion(path: tuple[str, ...]) -> str:
    nearest = nearest_key(path)
    if nearest is not None:
        return f"; the nearest known key is {nearest}"
    known = [key.path for key in iter_keys() if key.path.count(".") == len(path) - 1]
    siblings = [k for k in known if k.split(".")[:-1] == list(path[:-1])]
    return f"; known here: {', '.join(k.split('.')[-1] for k in siblings)}" if siblings else ""


def _meaning(path: tuple[str, ...]) -> str:
    key = find_key(path)
    return f" ({key.description.rstrip('.')})" if key is not None and key.description else ""


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    def absolute(text: str) -> str:
        return os.path.abspath(os.path.expanduser(text))

    def data_path(text: str) -> str:
        is_file = Path(text).suffix in _DATA_SUFFIXES or Path(text).expanduser().exists()
        return absolute(text) if is_file else text

    sets = {
        name: section.model_copy(update={"path": data_path(section.path)})
        for name, section in config.evaluation.sets.items()
    }
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": absolute(config.run.dir)}),
            "model": config.model.model_copy(update={"path": absolute(config.model.path)}),
            "data": config.data.model_copy(update={"train": [data_path(p) for p in config.data.train]}),
            "evaluation": config.evaluation.model_copy(update={"sets": sets}),
        }
    )


def _escape_interpolation(value: Any) -> Any:
    """Protect literal `${` in text from being taken as an interpolation when the YAML is read again."""
    if isinstance(value, dict):
        return {key: _escape_interpolation(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape_interpolation(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
