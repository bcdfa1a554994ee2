"""Launch checks: what the configuration says against the model folder and the data files, before anything starts."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path

from checkpoint_convert.architecture import ModelArchitecture, read_architecture
from checkpoint_convert.errors import CheckpointError
from dapo_megatron.config.algorithm_section import is_import_path
from dapo_megatron.config.errors import ConfigError
from dapo_megatron.config.passthrough import megatron_fields, sglang_fields
from dapo_megatron.config.routing import router_replay_problems
from dapo_megatron.config.sections import RunConfig
from rollout_service.prompts import DataError, check_files
from rollout_service.rewards.launch_check import check_custom_rules

# Any one of these makes a folder loadable by AutoTokenizer.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# Fields with which a user splits layers over pipeline stages unevenly.
_UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
)
# With these the embedding and the output layer take a layer's place in the first and the last stage.
_COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_REFUSED_BALANCING = {
    "global_aux_loss": "accumulates over steps, which the trainer does not reset",
    "seq_aux_loss": "takes a packed micro-batch for one sequence",
    "sinkhorn": "routes otherwise than the engines do",
}
_LARGEST_HEADER_BYTES = 100_000_000


def check_launch(config: RunConfig, source: str) -> list[str]:
    """Check everything that can be known without a process, in a few seconds.

    Args:
        source: what the user gave, for the error's first line.

    Returns:
        Remarks worth a line: legal settings that rarely mean what they say.

    Raises:
        ConfigError: every problem of the model folder, the layout and the data files.
    """
    problems = _check_model(config) + _check_data(config) + _check_algorithm(config)
    if not problems:  # the rules are tried on a row of the data
        problems = check_custom_rules(config.rollout.reward, config.data)
    if problems:
        raise ConfigError(source, problems)
    return _remarks(config)


def _check_model(config: RunConfig) -> list[str]:
    folder = Path(config.model.path)
    if not folder.is_dir():
        return [f"model.path: no folder {folder}; give a Hugging Face folder (config.json, safetensors, tokenizer)"]
    problems = _check_weight_files(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        problems.append(f"model.path: {folder} holds no tokenizer ({', '.join(_TOKENIZER_FILES)})")
    try:
        arch = read_architecture(folder)
    except CheckpointError as error:
        return [*problems, f"model.path: {error}"]
    if arch.family == "qwen3_moe" and arch.moe is not None and not all(arch.moe.moe_layers):
        problems.append(
            f"model.path: {folder} has dense layers between its expert layers (mlp_only_layers, decoder_sparse_step), which SGLang "
            "ignores for qwen3_moe: the engines would compute another model"
        )
    return problems + check_layout(config, arch)


def check_layout(config: RunConfig, arch: ModelArchitecture) -> list[str]:
    """Whether the model can be split as asked, on the trainer's side and on the engines'."""
    problems = []
    tp = config.parallel.tensor_model_parallel_size
    for key, size in (
        ("parallel.tensor_model_parallel_size", tp),
        ("rollout.engine.tp_size", config.rollout.engine.tp_size),
    ):
        fits = [n for n in range(1, arch.num_attention_heads + 1) if not _tp_problems(arch, n)]
        for problem in _tp_problems(arch, size):
            problems.append(f"{key}={size} {problem}; possible sizes: {', '.join(map(str, fits))}")
    problems += _stage_problems(config, arch)
    problems += _expert_problems(config, arch)
    if arch.latent_attention is not None and tp > 1 and not config.parallel.sequence_parallel:
        problems.append(
            "parallel.sequence_parallel must be true for a model with latent attention and tensor_model_parallel_size above 1"
        )
    problems += router_replay_problems(config, arch)
    if config.parallel.context_parallel_size > 1 and importlib.util.find_spec("transformer_engine") is None:
        problems.append(
            f"parallel.context_parallel_size={config.parallel.context_parallel_size} needs Transformer Engine, which is not installed; "
            "set it to 1"
        )
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    if longest > arch.max_position_embeddings:
        problems.append(
            f"data.max_prompt_length + rollout.max_response_length = {longest} is beyond the model's "
            f"max_position_embeddings={arch.max_position_embeddings}; lower one of them"
        )
    return problems


def _stage_problems(config: RunConfig, arch: ModelArchitecture) -> list[str]:
    """Whether the layers can be dealt out to pipeline ranks and their virtual stages."""
    parallel, layers = config.parallel, arch.num_layers
    layers += sum(bool(config.megatron.get(field)) for field in _COUNTED_AS_LAYERS)
    pp, vp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    if config.megatron.get("pipeline_model_parallel_layout") is not None:
        return []  # Megatron checks a layout against the layers when it parses it
    ends = [config.megatron[field] for field in _UNEVEN_STAGES[:2] if config.megatron.get(field) is not None]
    if ends:
        middle, left = pp - len(ends), layers - sum(ends)
        if (middle > 0 and (left <= 0 or left % middle)) or (middle <= 0 and left):
            return [
                f"megatron.{_UNEVEN_STAGES[0]} and _last_: {left} of {layers} layers are left for {middle} pipeline stages, which does "
                "not come out even"
            ]
        if any(end % vp for end in ends) or (middle > 0 and left // middle % vp):
            return [f"parallel.virtual_pipeline_model_parallel_size={vp} does not divide the layers of every stage"]
        return []
    if layers % pp:
        divisors = [str(n) for n in range(1, layers + 1) if layers % n == 0]
        return [
            f"parallel.pipeline_model_parallel_size={pp} does not divide the model's {layers} layers; use one of "
            f"{', '.join(divisors)}, or split unevenly with megatron.{_UNEVEN_STAGES[0]}"
        ]
    if layers // pp % vp:
        fits = [str(n) for n in range(1, layers // pp + 1) if layers // pp % n == 0]
        return [
            f"parallel.virtual_pipeline_model_parallel_size={vp} does not divide the {layers // pp} layers of a pipeline stage; use one of "
            f"{', '.join(fits)}"
        ]
    return []


def _expert_problems(config: RunConfig, arch: ModelArchitecture) -> list[str]:
    parallel, moe = config.parallel, arch.moe
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel
    if moe is None:
        given = ep > 1 or parallel.expert_tensor_parallel_size is not None
        return ["parallel.expert_*: the model has no routed experts; remove these keys"] if given else []
    problems = []
    if moe.num_experts % ep:
        fits = [str(n) for n in range(1, moe.num_experts + 1) if moe.num_experts % n == 0]
        problems.append(
            f"parallel.expert_model_parallel_size={ep} does not divide the model's {moe.num_experts} experts; use one of {', '.join(fits)}"
        )
    if moe.expert_ffn_hidden_size % etp:
        problems.append(
            f"parallel.expert_tensor_parallel_size={etp} does not divide an expert's intermediate size {moe.expert_ffn_hidden_size}"
        )
    balancing = config.megatron.get("moe_router_load_balancing_type", "none")
    for kind, reason in _REFUSED_BALANCING.items():
        if kind in (balancing if isinstance(balancing, list) else [balancing]):
            problems.append(f"megatron.moe_router_load_balancing_type: {kind} {reason}; use aux_loss")
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        problems.append(
            "parallel.sequence_parallel must be true for a model with routed experts and tensor_model_parallel_size above 1"
        )
    return problems


def _tp_problems(arch: ModelArchitecture, tp: int) -> list[str]:
    problems = []
    if arch.num_attention_heads % tp:
        problems.append(f"does not divide the model's {arch.num_attention_heads} attention heads")
    if arch.num_query_groups % tp and tp % arch.num_query_groups:
        problems.append(f"neither divides nor is a multiple of the model's {arch.num_query_groups} key/value heads")
    if arch.ffn_hidden_size % tp and (arch.moe is None or not all(arch.moe.moe_layers)):
        problems.append(f"does not divide the model's intermediate size {arch.ffn_hidden_size}")
    if arch.moe is not None and (arch.moe.shared_ffn_hidden_size or 0) % tp:
        problems.append(f"does not divide the shared experts' intermediate size {arch.moe.shared_ffn_hidden_size}")
    return problems


def _check_weight_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            return [f"model.path: {index} is no safetensors index: {error}"]
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            return [f"model.path: {folder} holds no *.safetensors file (other weight formats are not read)"]
    return [f"model.path: {problem}" for file in files if (problem := _safetensors_problem(file)) is not None]


def _safetensors_problem(file: Path) -> str | None:
    """Compare a file's size with what its header promises: finds missing, cut and placeholder files at once."""
    if not file.is_file():
        return f"{file} is missing, but the index names it"
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _LARGEST_HEADER_BYTES + 1
        if length > min(size, _LARGEST_HEADER_BYTES):
            return f"{file} ({size} bytes) is no safetensors file; was the download complete?"
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return f"{file} has an unreadable safetensors header; was the download complete?"
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    expected = 8 + length + end
    return None if size == expected else f"{file} has {size} bytes instead of {expected}; was the download complete?"


def _check_data(config: RunConfig) -> list[str]:
    """Read every data file once. A hub data set is left to the service, which downloads it."""
    problems = []
    try:
        check_files(config.data)
    except DataError as error:
        problems.append(f"data.train: {error}")
    for name, section in config.evaluation.sets.items():
        try:
            check_files(config.data.model_copy(update={"train": [section.path], "max_rows": section.max_rows}))
        except DataError as error:
            problems.append(f"evaluation.sets.{name}.path: {error}")
    return problems


def _check_algorithm(config: RunConfig) -> list[str]:
    """Call third-party estimators and losses on a tiny example. The built-in ones are covered by tests and need no torch here."""
    algorithm = config.algorithm
    if not is_import_path(algorithm.adv_estimator) and not is_import_path(algorithm.policy_loss):
        return []
    from dapo_megatron.algorithm.contract import ContractError, check_advantage_estimator, check_policy_loss

    problems = []
    for key, check in (
        ("adv_estimator", lambda: check_advantage_estimator(algorithm)),
        ("policy_loss", lambda: check_policy_loss(algorithm)),
    ):
        try:
            check()
        except ContractError as error:
            problems.append(f"algorithm.{key}: {error}")
    return problems


def _remarks(config: RunConfig) -> list[str]:
    remarks = config.algorithm.remarks()
    steps, warmup = config.trainer.total_steps, config.optim.lr_warmup_steps
    if warmup > steps:
        remarks.append(
            f"optim.lr_warmup_steps={warmup} is above trainer.total_steps={steps}: the learning rate only reaches "
            f"{config.optim.lr * steps / warmup:.3g} of optim.lr={config.optim.lr:g}"
        )
    if (config.evaluation.before_training or config.evaluation.after_training) and not config.evaluation.sets:
        remarks.append("evaluation.sets is empty: no accuracy before and after training")
    if config.sglang and config.rollout.engine.python is not None:
        remarks.append("the sglang block is not checked, because rollout.engine.python names another interpreter")
    elif config.sglang and not sglang_fields():
        remarks.append("the sglang block is not checked, because SGLang is not installed here")
    if config.megatron and not megatron_fields():
        remarks.append("the megatron block is not checked, because Megatron-Core is not installed here")
    return remarks
