"""Checks of the verbatim `megatron:` and `sglang:` blocks, from the installed packages' source text.

The fields are read out of the source with `ast`, because importing Megatron-Core or SGLang takes many seconds and
needs torch. A package that is not installed here (SGLang on a trainer-only machine) is not checked.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

from dapo_megatron.config.sections import RunConfig

# Fields that the typed tree sets. Given in a verbatim block they would contradict it, so they are refused.
_MEGATRON_OWNED = {
    "tensor_model_parallel_size": "parallel.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "parallel.pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline_model_parallel_size",
    "context_parallel_size": "parallel.context_parallel_size",
    "expert_model_parallel_size": "parallel.expert_model_parallel_size",
    "expert_tensor_parallel_size": "parallel.expert_tensor_parallel_size",
    "sequence_parallel": "parallel.sequence_parallel",
    "moe_enable_routing_replay": "rollout.router_replay",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "lr": "optim.lr",
    "min_lr": "optim.min_lr",
    "weight_decay": "optim.weight_decay",
    "adam_beta1": "optim.adam_beta1",
    "adam_beta2": "optim.adam_beta2",
    "adam_eps": "optim.adam_eps",
    "clip_grad": "optim.clip_grad",
    "use_distributed_optimizer": "optim.use_distributed_optimizer",
    "check_for_nan_in_grad": "trainer.max_nonfinite_updates",
}
# Fields that the checkpoint decides.
_MEGATRON_ARCHITECTURE = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
    "layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm add_bias_linear add_qkv_bias gated_linear_unit "
    "activation_func rotary_interleaved multi_latent_attention num_moe_experts moe_layer_freq moe_ffn_hidden_size "
    "moe_shared_expert_intermediate_size moe_router_topk moe_router_score_function moe_router_pre_softmax "
    "moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor moe_router_enable_expert_bias "
    "moe_shared_expert_gate moe_latent_size mtp_num_layers softmax_scale softmax_type window_size window_attn_skip_freq "
    "no_rope_freq qk_l2_norm attention_output_gate experimental_attention_variant linear_attention_freq glu_linear_offset "
    "activation_func_clamp_value apply_residual_connection_post_layernorm heterogeneous_block_specs is_hybrid_model"
).split()
# Fields on which the trainer's own correctness rests.
_MEGATRON_FIXED = {
    "calculate_per_token_loss": "token losses carry their global weight already",
    "variable_seq_lengths": "packed micro-batches differ in length",
    "finalize_model_grads_func": "the trainer sums gradients itself",
    "perform_initialization": "weights come from the checkpoint",
    "hidden_dropout": "dropout would make the old log-probs differ from the new",
    "attention_dropout": "dropout would make the old log-probs differ from the new",
    "moe_grouped_gemm": "the layers that the device has decide it",
}
_SGLANG_OWNED = {
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "host": "rollout.engine.host",
    "tp_size": "rollout.engine.tp_size",
    "dtype": "rollout.engine.dtype",
    "max_running_requests": "rollout.engine.max_running_requests",
    "random_seed": "run.seed",
    "enable_return_routed_experts": "rollout.router_replay",
}
_SGLANG_FIXED = {
    "port": "each engine gets a free port",
    "api_key": "the service makes one",
    "skip_tokenizer_init": "prompts are sent as token ids",
    "weight_version": "the service counts versions",
    "dp_size": "rollout.engine.count servers stand side by side",
    "config": "give the arguments themselves",
}

_MEGATRON_CLASSES = {
    "core/model_parallel_config.py": "ModelParallelConfig",
    "core/transformer/transformer_config.py": "TransformerConfig",
    "core/optimizer/optimizer_config.py": "OptimizerConfig",
    "core/distributed/distributed_data_parallel_config.py": "DistributedDataParallelConfig",
}


def check_passthrough(config: RunConfig) -> list[str]:
    """Every problem of the two blocks: unknown field, wrong type, or a field that a typed key sets."""
    problems = []
    if config.megatron:
        fields = megatron_fields()
        for key, value in config.megatron.items():
            owner = _MEGATRON_OWNED.get(key)
            if key in _MEGATRON_ARCHITECTURE:
                problems.append(f"megatron.{key}: the model folder's config.json decides it; remove the key")
            elif key in _MEGATRON_FIXED:
                problems.append(f"megatron.{key}: fixed by the trainer ({_MEGATRON_FIXED[key]}); remove the key")
            else:
                problems += _check_field("megatron", key, value, owner, fields, "Megatron-Core")
    if config.sglang:
        # A server run by another interpreter may be another version: its own parser checks the arguments.
        fields = sglang_fields() if config.rollout.engine.python is None else {}
        for key, value in config.sglang.items():
            if key in _SGLANG_FIXED:
                problems.append(f"sglang.{key}: fixed by the rollout service ({_SGLANG_FIXED[key]}); remove the key")
            else:
                problems += _check_field("sglang", key, value, _SGLANG_OWNED.get(key), fields, "SGLang")
    return problems


@lru_cache(maxsize=1)
def megatron_fields() -> dict[str, ast.expr]:
    """Annotation by field name of the three Megatron dataclasses; empty when Megatron-Core is not installed."""
    root = _package_folder("megatron")
    fields: dict[str, ast.expr] = {}
    for relative, class_name in _MEGATRON_CLASSES.items():
        if root is not None and (root / relative).is_file():
            fields |= _annotated_fields(root / relative, class_name)
    return fields


@lru_cache(maxsize=1)
def sglang_fields() -> dict[str, ast.expr]:
    """Annotation by server argument; empty when SGLang is not installed.

    `ServerArgs` lists its fields itself, or (0.5.23) is assembled from the classes in `arg_groups/fields`.
    """
    root = _package_folder("sglang")
    if root is None:
        return {}
    fields = _annotated_fields(root / "srt" / "server_args.py", "ServerArgs")
    for file in sorted((root / "srt" / "arg_groups" / "fields").glob("*.py")):
        fields |= _annotated_fields(file, None)
    return fields


def _package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    # A namespace package (megatron) may span several folders.
    candidates = [Path(location) for location in spec.submodule_search_locations]
    return next((folder for folder in candidates if (folder / "core").is_dir() or (folder / "srt").is_dir()), None)


def _annotated_fields(file: Path, class_name: str | None) -> dict[str, ast.expr]:
    fields: dict[str, ast.expr] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and class_name in (None, node.name):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    if not item.target.id.startswith("_"):
                        fields[item.target.id] = item.annotation
    return fields


def _check_field(
    block: str, key: str, value: Any, owner: str | None, fields: dict[str, ast.expr], package: str
) -> list[str]:
    if owner is not None:
        return [f"{block}.{key}: set {owner} instead"]
    if not fields:
        return []
    if key not in fields:
        hint = _sglang_spelling(key, fields) if block == "sglang" else None
        close = [hint] if hint else difflib.get_close_matches(key, list(fields), n=1, cutoff=0.6)
        return [
            f"{block}.{key}: the installed {package} has no such field" + (f"; nearest: {close[0]}" if close else "")
        ]
    if not _fits(value, fields[key]):
        text = ast.unparse(_without_metadata(fields[key]))
        return [f"{block}.{key}: {value!r} ({type(value).__name__}) given, {package} wants {text}"]
    return []


def _sglang_spelling(key: str, fields: dict[str, ast.expr]) -> str | None:
    """Command-line spelling (`--mem-fraction-static`) to the field's name."""
    name = key.lstrip("-").replace("-", "_")
    return name if name in fields else None


def _without_metadata(annotation: ast.expr) -> ast.expr:
    """`A[T, help]` and `Annotated[T, ...]` to `T`; a quoted annotation to its expression."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _without_metadata(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Subscript) and _last_name(annotation.value) in ("A", "Annotated"):
        inner = annotation.slice
        return _without_metadata(inner.elts[0] if isinstance(inner, ast.Tuple) else inner)
    return annotation


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _fits(value: Any, annotation: ast.expr) -> bool:
    """Whether a YAML value may stand for an annotation. Types that YAML cannot express fit nothing but null."""
    node = _without_metadata(annotation)
    if isinstance(node, ast.Constant) and node.value is None:
        return value is None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _fits(value, node.left) or _fits(value, node.right)
    if isinstance(node, ast.Subscript):
        arguments = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        match _last_name(node.value):
            case "Optional":
                return value is None or _fits(value, arguments[0])
            case "Union":
                return any(_fits(value, argument) for argument in arguments)
            case "Literal":
                return any(isinstance(a, ast.Constant) and a.value == value for a in arguments)
            case "list" | "List" | "tuple" | "Tuple" | "Sequence":
                return isinstance(value, list)
            case "dict" | "Dict" | "Mapping":
                return isinstance(value, dict)
            case _:
                return False
    match _last_name(node):
        case "Any" | "object":
            return True
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "list" | "List" | "tuple" | "Tuple":
            return isinstance(value, list)
        case "dict" | "Dict":
            return isinstance(value, dict)
        case _:
            return False
