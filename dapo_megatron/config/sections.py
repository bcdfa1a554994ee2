"""The trainer's sections of the configuration. The service's sections live in `rollout_service.config`.

Every field is read somewhere; unknown keys are refused. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from dapo_megatron.config.algorithm_section import AlgorithmSection
from rollout_service.config import DataSection, EvaluationSection, RaySection, RolloutSection, Section


class RunSection(Section):
    """Name and place of a run."""

    name: str = Field(
        min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="Name of the run; its folder is `<dir>/<name>`."
    )
    dir: str = Field("runs", description="Folder that holds the run folders.")
    seed: int = Field(1234, ge=0, description="Seed of shuffling, sampling and initialisation.")


class ModelSection(Section):
    """The starting checkpoint."""

    path: str = Field(description="Hugging Face folder (config.json, safetensors, tokenizer).")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Dtype of the trainer's weights; optimizer state and gradients stay float32."
    )
    trust_remote_code: bool = Field(
        False, description="Let transformers run code from the model folder (tokenizer only)."
    )


class ParallelSection(Section):
    """How the model is split. Data-parallel size = processes / (TP x CP x PP)."""

    tensor_model_parallel_size: int = Field(1, gt=0, description="TP: each layer's weights split over this many ranks.")
    pipeline_model_parallel_size: int = Field(1, gt=0, description="PP: layers split into this many stages.")
    virtual_pipeline_model_parallel_size: int = Field(
        1,
        gt=0,
        description="VPP: chunks of layers on each pipeline rank, interleaved to shorten the bubble; needs PP > 1.",
    )
    context_parallel_size: int = Field(
        1, gt=0, description="CP: each sequence split over this many ranks; needs Transformer Engine."
    )
    expert_model_parallel_size: int = Field(
        1, gt=0, description="EP: routed experts spread over this many ranks of a stage's TP x CP x DP."
    )
    expert_tensor_parallel_size: int | None = Field(
        None, gt=0, description="TP inside each routed expert; null takes tensor_model_parallel_size."
    )
    sequence_parallel: bool = Field(
        False, description="Split activations along the sequence between TP regions; needs TP > 1."
    )
    nnodes: int = Field(1, gt=0, description="Machines under torchrun.")
    nproc_per_node: int = Field(1, gt=0, description="Processes per machine.")
    distributed_timeout_s: float = Field(
        600.0,
        gt=0,
        description="Longest wait in a collective before the rank stops with an error; Megatron's own groups round it to whole minutes, at least one.",
    )

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.ranks_per_replica

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one copy of the model, experts aside."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    @property
    def virtual_stages(self) -> int | None:
        """VPP as Megatron spells it: None without interleaving."""
        size = self.virtual_pipeline_model_parallel_size
        return size if size > 1 else None

    @property
    def expert_tensor_parallel(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def token_alignment(self) -> int:
        """A packed micro-batch is padded to a multiple of this many tokens, so that CP and sequence parallelism can split it."""
        return self.sequence_alignment * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    @property
    def sequence_alignment(self) -> int:
        """Each packed sequence is padded to a multiple of this many tokens: context parallelism cuts it into 2 x CP pieces."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def micro_batch_multiple(self) -> int:
        """Interleaved pipelines take micro-batches in rounds of the pipeline size."""
        return self.pipeline_model_parallel_size if self.virtual_pipeline_model_parallel_size > 1 else 1


class OptimSection(Section):
    """AdamW and its schedule. The schedule counts optimizer updates, not steps: one step has prompts_per_step / mini_batch_prompts."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Final learning rate of a decaying schedule.")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after warm-up.")
    lr_warmup_steps: int = Field(10, ge=0, description="Warm-up in training steps.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay (not on norms and biases).")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="First-moment decay.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Second-moment decay.")
    adam_eps: float = Field(1e-8, gt=0, description="Added to the denominator.")
    clip_grad: float = Field(1.0, ge=0, description="Global gradient norm limit; 0 is off.")
    use_distributed_optimizer: bool = Field(True, description="Shard optimizer state over data-parallel ranks.")


class TrainerSection(Section):
    """The step loop."""

    total_steps: int = Field(gt=0, description="Training steps; each takes one batch and publishes new weights.")
    mini_batch_prompts: int = Field(
        32, gt=0, description="Prompts in one optimizer update; divides rollout.prompts_per_step."
    )
    max_tokens_per_gpu: int = Field(16384, gt=0, description="Token budget of one packed micro-batch.")
    logprob_chunk_tokens: int = Field(
        1024, gt=0, description="Rows whose logits may exist at a time, in forward and backward."
    )
    max_nonfinite_updates: int = Field(
        3, gt=0, description="Skipped updates in a row (NaN or inf) after which the run stops."
    )


class WeightSyncSection(Section):
    """How new weights reach the engines."""

    transport: Literal["distributed", "tensor", "disk", "delta"] = Field(
        "distributed",
        description="`distributed` broadcasts over a gloo or NCCL group; `tensor` shares memory with engines of the same host (CUDA: of the same GPU); `disk` writes safetensors; `delta` broadcasts only what has changed, compressed.",
    )
    check: Literal["first", "always", "never"] = Field(
        "first",
        description="After which updates the checksums of all parameters of each engine are compared with those after a second, full transfer into scrambled ones.",
    )
    bucket_mb: float = Field(256.0, gt=0, description="Size of one transfer bucket.")
    max_publishers: int = Field(
        8,
        gt=0,
        description="Ranks that send to the engines, each over a group of its own; at least one per pipeline stage and expert slice.",
    )
    timeout_s: float = Field(
        300.0, gt=0, description="Longest wait for one phase of an update; the error names who did not answer."
    )
    probe_samples: int = Field(
        4,
        ge=0,
        description="Samples whose log-probs are compared between trainer and engine after each update; 0 is off.",
    )
    probe_tolerance: float | None = Field(
        None, gt=0, description="Largest allowed difference in nats; beyond it the run stops. null only reports."
    )


class WandbSection(Section):
    """Weights & Biases."""

    mode: Literal["auto", "online", "offline", "off"] = Field(
        "auto", description="`auto` is online when a key is set, else offline."
    )
    project: str = Field("dapo-megatron", description="Project name.")
    entity: str | None = Field(None, description="Team or user.")


class ObservabilitySection(Section):
    """Where metrics go; `metrics.jsonl` in the run folder is always written."""

    wandb: WandbSection = WandbSection()
    samples_per_step: int = Field(2, ge=0, description="Completions written to samples.jsonl at each step.")


class RunConfig(Section):
    """The whole configuration of a run."""

    run: RunSection
    model: ModelSection
    data: DataSection
    rollout: RolloutSection = RolloutSection()
    evaluation: EvaluationSection = EvaluationSection()
    ray: RaySection = RaySection()
    parallel: ParallelSection = ParallelSection()
    optim: OptimSection = OptimSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    trainer: TrainerSection
    weight_sync: WeightSyncSection = WeightSyncSection()
    observability: ObservabilitySection = ObservabilitySection()
    megatron: dict[str, Any] = Field(
        default_factory=dict,
        description="Verbatim fields of Megatron's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig.",
    )
    sglang: dict[str, Any] = Field(default_factory=dict, description="Verbatim SGLang server arguments.")

    @property
    def max_micro_batch_tokens(self) -> int:
        """Token budget of a micro-batch, which context parallelism spreads over several ranks."""
        return self.trainer.max_tokens_per_gpu * self.parallel.context_parallel_size

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        p, mini = self.rollout.prompts_per_step, self.trainer.mini_batch_prompts
        if p % mini:
            raise ValueError(f"rollout.prompts_per_step={p} is not a multiple of trainer.mini_batch_prompts={mini}")
        par = self.parallel
        split = par.ranks_per_replica
        if par.world_size % split:
            raise ValueError(
                f"{par.world_size} processes (nnodes x nproc_per_node) is not a multiple of TP x CP x PP = {split}"
            )
        expert_split = par.expert_tensor_parallel * par.expert_model_parallel_size * par.pipeline_model_parallel_size
        if par.world_size % expert_split:
            raise ValueError(
                f"{par.world_size} processes (nnodes x nproc_per_node) is not a multiple of expert TP x EP x PP = {expert_split}; "
                "lower parallel.expert_model_parallel_size or parallel.expert_tensor_parallel_size"
            )
        if par.virtual_pipeline_model_parallel_size > 1 and par.pipeline_model_parallel_size == 1:
            raise ValueError(
                "parallel.virtual_pipeline_model_parallel_size above 1 needs parallel.pipeline_model_parallel_size above 1"
            )
        if par.sequence_parallel and par.tensor_model_parallel_size == 1:
            raise ValueError("parallel.sequence_parallel=true needs parallel.tensor_model_parallel_size above 1")
        if self.weight_sync.transport == "tensor" and par.nnodes > 1:
            raise ValueError(
                f"weight_sync.transport=tensor shares memory with engines of the same host, and parallel.nnodes is {par.nnodes}; "
                "take distributed or delta"
            )
        samples = mini * self.rollout.n_samples_per_prompt
        if samples < par.data_parallel_size:
            raise ValueError(
                f"a mini-batch of {samples} samples cannot be spread over {par.data_parallel_size} data-parallel ranks"
            )
        longest = self.data.max_prompt_length + self.rollout.max_response_length
        if self.max_micro_batch_tokens < longest:
            raise ValueError(
                f"trainer.max_tokens_per_gpu={self.trainer.max_tokens_per_gpu} x CP={par.context_parallel_size} is below the longest "
                f"sequence, data.max_prompt_length + rollout.max_response_length = {longest}"
            )
        for key in ("optimizer_cpu_offload", "use_precision_aware_optimizer", "overlap_param_gather"):
            if self.megatron.get(key) and not self.optim.use_distributed_optimizer:
                raise ValueError(f"megatron.{key} needs optim.use_distributed_optimizer=true")
        if self.megatron.get("optimizer_cpu_offload") and self.model.dtype == "float32":
            raise ValueError(
                "megatron.optimizer_cpu_offload needs model.dtype=bfloat16: Megatron offloads main weights, and float32 weights are their own"
            )
        if self.algorithm.kl.coef > 0 and self.megatron.get("overlap_param_gather"):
            raise ValueError(
                "algorithm.kl.coef above 0 swaps the reference weights in for a forward pass, which megatron.overlap_param_gather "
                "would overwrite while it runs; switch one of them off"
            )
        return self
