"""The configuration tree as data: every key with its type, default, limits and meaning.

Used to name the nearest known key in an error and to write docs/configuration.md.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dapo_megatron.config.sections import RunConfig

# Stands for the name that the user chooses in `evaluation.sets.<name>`.
ANY_NAME = "<name>"


@dataclass(frozen=True)
class ConfigKey:
    """One key of the tree.

    Attributes:
        path: dotted key; a name chosen by the user is `<name>`.
        type_text: type with limits, as the reference page shows it.
        default: the default as YAML shows it, or None when the key is required.
        description: one sentence.
        section: the block it stands for when it has keys of its own, else None.
        is_bool: a YAML boolean is a right value.
    """

    path: str
    type_text: str
    default: str | None
    description: str
    section: type[BaseModel] | None
    is_bool: bool


def iter_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[ConfigKey]:
    """Every key below `model`, blocks before their keys, in declaration order."""
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        section, named = _section_of(info.annotation)
        yield ConfigKey(
            path=path,
            type_text=_type_text(info.annotation) + _limits_text(info),
            default=None if info.is_required() else _default_text(info),
            description=info.description or "",
            section=section,
            is_bool=_accepts_bool(info.annotation),
        )
        if section is not None:
            yield from iter_keys(section, f"{path}.{ANY_NAME}." if named else f"{path}.")


def find_key(path: Sequence[str]) -> ConfigKey | None:
    """The key that a concrete path means, with user-chosen names matched by `<name>`."""
    wanted = list(path)
    for key in iter_keys():
        parts = key.path.split(".")
        if len(parts) == len(wanted) and all(p in (w, ANY_NAME) for p, w in zip(parts, wanted, strict=True)):
            return key
    return None


def nearest_key(path: Sequence[str]) -> str | None:
    """The known key that an unknown one most probably means.

    First a sibling with a similar name, then the same last word anywhere in the tree, then a similar full path.
    """
    *parents, last = path
    keys = list(iter_keys())
    depth = len(path)
    siblings = {
        parts[-1]: ".".join([*parents, parts[-1]])
        for parts in (key.path.split(".") for key in keys)
        if len(parts) == depth and all(p in (w, ANY_NAME) for p, w in zip(parts[:-1], parents, strict=True))
    }
    shortened = [name for name in siblings if len(last) >= 3 and name.startswith(last)]
    close = shortened or difflib.get_close_matches(last, list(siblings), n=1, cutoff=0.6)
    if close:
        return siblings[close[0]]
    elsewhere = [key.path for key in keys if key.path.split(".")[-1] == last]
    if elsewhere:
        return max(elsewhere, key=lambda known: _likeness(known, ".".join(path)))
    dotted = ".".join(path)
    by_words = difflib.get_close_matches(last, {key.path.split(".")[-1] for key in keys}, n=1, cutoff=0.75)
    if by_words:
        return max((k.path for k in keys if k.path.split(".")[-1] == by_words[0]), key=lambda k: _likeness(k, dotted))
    close = difflib.get_close_matches(dotted, [key.path for key in keys], n=1, cutoff=0.7)
    return close[0] if close else None


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The block behind an annotation, and whether it is a mapping from names to such blocks."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    if get_origin(annotation) is dict:
        value = get_args(annotation)[1]
        if isinstance(value, type) and issubclass(value, BaseModel):
            return value, True
    return None, False


def _accepts_bool(annotation: Any) -> bool:
    return annotation is bool or annotation is Any or any(_accepts_bool(a) for a in get_args(annotation))


def _type_text(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if annotation is Any:
        return "any"
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in args)
    if origin in (Union, types.UnionType):
        return " \\| ".join(_type_text(arg) for arg in args)
    if origin is list:
        return f"list of {_type_text(args[0])}"
    if origin is dict:
        return "block" if _section_of(annotation)[0] is None else "blocks by name"
    if isinstance(annotation, type):
        return "block" if issubclass(annotation, BaseModel) else annotation.__name__
    return str(annotation)


def _limits_text(info: FieldInfo) -> str:
    texts = []
    for limit in info.metadata:
        match limit:
            case Gt():
                texts.append(f"> {limit.gt}")
            case Ge():
                texts.append(f">= {limit.ge}")
            case Lt():
                texts.append(f"< {limit.lt}")
            case Le():
                texts.append(f"<= {limit.le}")
            case MinLen():
                texts.append("not empty")
    return f", {', '.join(texts)}" if texts else ""


def _default_text(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or value == {}:
        return ""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
