"""The rotary embedding of a config.json, in transformers 5's spelling (`rope_parameters`) or older ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint_convert.config_fields import positive
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.families.table import Family

# Numbers of a scaled rope: name -> default; None: must be given.
_LLAMA3 = {
    "factor": None, "low_freq_factor": None, "high_freq_factor": None, "original_max_position_embeddings": None,
}  # fmt: skip
_YARN = {"factor": None, "original_max_position_embeddings": None, "beta_fast": 32.0, "beta_slow": 1.0}
_YARN_MSCALES = ("mscale", "mscale_all_dim")
_Blocks = dict[str, dict[str, Any]]


def read_rope(
    path: Path, config: dict[str, Any], family: Family, max_positions: int
) -> tuple[float, float, dict[str, Any] | None]:
    """Return base, rotated fraction of a head, and the scaling (see `ModelArchitecture.rope_scaling`).

    Raises:
        CheckpointError: an unknown kind of rope, an unknown or missing number, or places that contradict each other.
    """
    blocks = {name: config.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    for name, block in blocks.items():
        if not isinstance(block, dict) or any(isinstance(value, dict) for value in block.values()):
            raise CheckpointError(f"{path}: {name} must be one flat object; settings per layer type are not supported")
    theta = _agreed(path, config, blocks, "rope_theta", "rotary bases", family.rope_theta)
    fraction = _agreed(path, config, blocks, "partial_rotary_factor", "rotary fractions", family.rotary_fraction or 1.0)
    if family.rotary_fraction is None and fraction != 1.0:
        raise CheckpointError(f"{path}: partial_rotary_factor={fraction!r}: only whole heads are rotated (1.0)")
    if fraction > 1.0:
        raise CheckpointError(f"{path}: partial_rotary_factor={fraction!r} is above 1")

    kinds = {name: block.get("rope_type", block.get("type", "default")) for name, block in blocks.items() if block}
    scaled = {name: kind for name, kind in kinds.items() if kind != "default"}
    for name, kind in scaled.items():
        if kind not in family.rope_types:
            raise CheckpointError(
                f"{path}: {name}.rope_type={kind!r} is not supported; supported for {family.model_type} are "
                f"{' and '.join(map(repr, family.rope_types))}"
            )
    for name, block in blocks.items():
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        known |= {"llama3": {*_LLAMA3}, "yarn": {*_YARN, *_YARN_MSCALES, "truncate"}}.get(scaled.get(name, ""), set())
        unknown = sorted(key for key in set(block) - known if block[key] is not None)
        if unknown:
            raise CheckpointError(f"{path}: {name} has unsupported fields: {', '.join(unknown)}")
    if not scaled:
        return theta, fraction, None
    read = {"llama3": _llama3, "yarn": _yarn}
    scalings = [read[kind](path, name, blocks[name], max_positions) for name, kind in scaled.items()]
    if scalings[0] != scalings[-1]:
        raise CheckpointError(f"{path}: rope_parameters and rope_scaling contradict each other; keep one")
    return theta, fraction, scalings[0]


def _agreed(path: Path, config: dict[str, Any], blocks: _Blocks, field: str, what: str, default: float) -> float:
    """The one value of `field`, wherever it stands."""
    places = {f"{name}.{field}": block.get(field) for name, block in blocks.items()}
    places[field] = config.get(field)
    given = {name: positive(path, name, value) for name, value in places.items() if value is not None}
    if len(set(given.values())) > 1:
        raise CheckpointError(f"{path}: contradicting {what} {given}; keep one")
    return next(iter(given.values()), default)


def _numbers(
    path: Path, name: str, block: dict[str, Any], wanted: Mapping[str, float | None], max_positions: int
) -> dict[str, Any]:
    defaults = {**wanted, "original_max_position_embeddings": float(max_positions)}
    values = {key: defaults[key] if block.get(key) is None else block[key] for key in wanted}
    missing = [key for key, value in values.items() if value is None]
    if missing:
        kind = block.get("rope_type", block.get("type"))
        raise CheckpointError(f"{path}: {name} of type {kind} lacks {', '.join(missing)}")
    return {key: positive(path, f"{name}.{key}", value) for key, value in values.items()}


def _llama3(path: Path, name: str, block: dict[str, Any], max_positions: int) -> dict[str, Any]:
    values = _numbers(path, name, block, _LLAMA3, max_positions)
    if values["high_freq_factor"] <= values["low_freq_factor"]:
        raise CheckpointError(f"{path}: rope scaling needs high_freq_factor above low_freq_factor")
    return {"rope_type": "llama3", **values}


def _yarn(path: Path, name: str, block: dict[str, Any], max_positions: int) -> dict[str, Any]:
    """YaRN as in HF `_compute_yarn_parameters` and `yarn_apply_mscale`, in Megatron's terms.

    Both multiply cosine and sine by m(mscale) / m(mscale_all_dim) and the attention scale by m(mscale_all_dim)^2, with
    m(s) = 0.1 s ln(factor) + 1; but HF takes m(1) for the first where one of the two is missing, and then Megatron's
    defaults (1 and 0) say the same, unless mscale_all_dim is the one given.
    """
    values = _numbers(path, name, block, _YARN, max_positions)
    if block.get("truncate") not in (None, True):
        raise CheckpointError(f"{path}: {name}.truncate={block['truncate']!r}: only true is supported")
    mscale, all_dim = (block.get(key) or 0 for key in _YARN_MSCALES)
    if all_dim and not mscale:
        raise CheckpointError(f"{path}: {name} has mscale_all_dim but no mscale, which Megatron cannot express")
    if not all_dim:
        return {"rope_type": "yarn", **values, "mscale": 1.0, "mscale_all_dim": 0.0}
    scales = {key: positive(path, f"{name}.{key}", block[key]) for key in _YARN_MSCALES}
    return {"rope_type": "yarn", **values, **scales}
