"""The rollout service's sections of the configuration. `dapo_megatron.config` composes them into one tree.

Every field is read somewhere; unknown keys are refused. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """A frozen block of settings: unknown keys are errors, defaults are validated like given values."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class DataSection(Section):
    """Where prompts come from and how a row becomes token ids."""

    train: list[str] = Field(
        min_length=1, description="JSONL or parquet files (or one hub data set name) with the training prompts."
    )
    prompt_key: str = Field(
        "prompt", description="Column with the prompt: text, or a list of {role, content} messages."
    )
    answer_key: str = Field(
        "answer", description="Column with the gold answer; a dotted path reaches into nested columns."
    )
    id_key: str | None = Field(None, description="Column with a stable row id; null numbers the rows.")
    answer_format: Literal["plain", "gsm8k"] = Field("plain", description="`gsm8k` takes what follows the last `####`.")
    template: str = Field("{prompt}", description="Text put around the prompt; `{prompt}` stands for the row's text.")
    chat_template: Literal["auto", "always", "never"] = Field(
        "auto", description="Apply the tokenizer's chat template: `auto` if it has one."
    )
    max_prompt_length: int = Field(2048, gt=0, description="Longest prompt in tokens, template included.")
    overlong_prompts: Literal["drop", "truncate_left", "error"] = Field(
        "drop", description="What to do with longer prompts; dropped rows are counted."
    )
    drop_duplicates: bool = Field(
        True, description="Remove rows whose prompt and answer were seen before; the count is reported."
    )
    shuffle: bool = Field(True, description="Shuffle each epoch, from `run.seed` and the epoch number.")
    max_rows: int | None = Field(None, gt=0, description="Use only the first rows; null means all.")

    @field_validator("train", mode="before")
    @classmethod
    def _one_file_is_a_list_of_one(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class SamplingSection(Section):
    """How responses are sampled. The trainer divides its logits by the same temperature."""

    temperature: float = Field(1.0, ge=0, description="Sampling temperature; 0 means greedy (evaluation only).")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus; 1 is off.")
    top_k: int = Field(-1, description="Top-k; -1 is off.")
    min_p: float = Field(0.0, ge=0, lt=1, description="Minimum probability relative to the best token; 0 is off.")

    @model_validator(mode="after")
    def _one_spelling_of_off(self) -> SamplingSection:
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k={self.top_k}: use -1 to switch top-k off, or a positive number")
        return self


class EngineSection(Section):
    """The SGLang servers."""

    count: int = Field(1, gt=0, description="Number of servers.")
    tp_size: int = Field(1, gt=0, description="Tensor parallel size of each server.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weight dtype in the server; `auto` follows model.dtype."
    )
    python: str | None = Field(None, description="Python interpreter for the server process; null uses this one.")
    host: str = Field("127.0.0.1", description="Address that a server binds to.")
    max_running_requests: int = Field(64, gt=0, description="Requests decoded together in one server.")
    startup_timeout_s: float = Field(
        300.0, gt=0, description="Longest start-up of a server, from spawn to its first healthy answer."
    )
    request_timeout_s: float = Field(600.0, gt=0, description="Longest wait for one completion.")
    control_timeout_s: float = Field(
        60.0, gt=0, description="Longest wait for a control call (pause, flush, weight update)."
    )
    health_interval_s: float = Field(10.0, gt=0, description="Seconds between health probes.")
    max_restarts: int = Field(3, ge=0, description="Restarts of one server before the run stops.")


class OverlongBufferSection(Section):
    """Soft overlong punishment (DAPO eq. 13): linear over the last `len` tokens before `max_response_length`."""

    enable: bool = Field(False, description="Switch the punishment on.")
    len: int = Field(0, ge=0, description="L_cache, the length of the linear part in tokens.")
    penalty_factor: float = Field(1.0, ge=0, description="Punishment at and beyond the limit.")


class FilterGroupsSection(Section):
    """Dynamic sampling: keep a group only if its samples' scores differ."""

    enable: bool = Field(True, description="Drop groups whose samples all have the same score, and refill the slot.")
    metric: Literal["acc", "reward"] = Field(
        "acc", description="Score compared: the raw `acc` (DAPO) or the shaped reward."
    )
    max_filtered_share: float = Field(
        0.98,
        gt=0,
        le=1,
        description="Share of filtered groups, over a window of `window_groups`, at which `policy` acts.",
    )
    window_groups: int = Field(512, gt=0, description="Number of finished groups over which the share is measured.")
    policy: Literal["warn", "stop", "accept"] = Field(
        "warn",
        description="`warn` says so (terminal, events.jsonl) once per window and goes on, `stop` ends the run with the counts, `accept` says so and lets uninformative groups through until the share falls.",
    )


def check_rule_name(rule: str) -> str:
    """Refuse what is neither a built-in rule, an import path nor an address.

    Raises:
        ValueError: names the forms that a rule may have.
    """
    module, _, function = rule.partition(":")
    importable = all(part.isidentifier() for part in (*module.split("."), *function.split(".")))
    if rule in BUILTIN_RULES or importable or rule.startswith(("http://", "https://")):
        return rule
    raise ValueError(
        f"{rule!r} is no reward rule: give one of {', '.join(BUILTIN_RULES)}, an import path package.module:function, or "
        "the http:// or https:// address of a reward server"
    )


BUILTIN_RULES = ("math_verify", "dapo_exact")


class ExtraRuleSection(Section):
    """A rule whose weighted score is added to the reward. The accuracy and the group filter do not see it."""

    rule: str = Field(description="As `rollout.reward.rule`.")
    weight: float = Field(1.0, description="Factor of its score.")

    _rule_is_known = field_validator("rule")(check_rule_name)


class CurriculumSection(Section):
    """Let prompts rest that the model solves completely, pass after pass."""

    enable: bool = Field(False, description="Switch the curriculum on.")
    solved_times: int = Field(
        2, gt=0, description="Complete solutions (all samples right) in a row after which a prompt rests."
    )
    rest_epochs: int = Field(2, gt=0, description="Whole passes over the data for which it rests.")
    max_resting_share: float = Field(
        0.9, gt=0, le=1, description="Largest share of the prompts at rest; one prompt is always left."
    )


class OversamplingSection(Section):
    """Admit more prompts than there are slots, by as many as the group filter is expected to drop."""

    enable: bool = Field(
        False,
        description="Let admission run ahead by the measured keep rate; what exceeds the staleness bound after all is generated again.",
    )
    max_factor: float = Field(3.0, gt=1, description="Most admitted groups, as a multiple of the (S + 1) P slots.")


class RewardSection(Section):
    """How a response is scored."""

    rule: str = Field(
        "math_verify",
        description="Gives `acc`: `math_verify`, the paper's string rule `dapo_exact`, a function by import path (`package.module:function`), or a reward server (`http://...`).",
    )
    extraction: Literal["strict", "lenient"] = Field(
        "lenient",
        description="Where `math_verify` looks for the final answer: `strict` only in a last line `Answer: ...`, `lenient` also in the last `\\boxed{}` and after `####`.",
    )
    extra_rules: list[ExtraRuleSection] = Field(
        default_factory=list, description="Further rules, `{rule, weight}`, added to the reward but not to `acc`."
    )
    correct: float = Field(1.0, description="Reward of a right answer.")
    incorrect: float = Field(-1.0, description="Reward of a wrong answer.")
    workers: int = Field(2, gt=0, description="Worker processes of each rule that is no coroutine and no server.")
    timeout_s: float = Field(
        10.0,
        gt=0,
        description="Hard deadline for one call of a rule (a sample, a group, or an HTTP batch); a worker is killed and the sample is marked `reward_timeout`.",
    )
    memory_limit_mb: int = Field(2048, gt=0, description="Address space of one worker.")
    recycle_after: int = Field(20000, gt=0, description="Calls after which a worker is replaced by a fresh one.")
    concurrency: int = Field(16, gt=0, description="Calls in flight at once of a coroutine or a reward server.")
    http_batch_size: int = Field(32, gt=0, description="Most samples in one request to a reward server.")

    _rule_is_known = field_validator("rule")(check_rule_name)

    @model_validator(mode="after")
    def _names_are_distinct(self) -> RewardSection:
        names = [self.rule, *(extra.rule for extra in self.extra_rules)]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"extra_rules: {', '.join(sorted(twice))} is given twice; give one weight to each rule")
        return self


class RolloutSection(Section):
    """Generation, admission and filtering."""

    prompts_per_step: int = Field(512, gt=0, description="P: groups in one training step.")
    n_samples_per_prompt: int = Field(16, gt=1, description="G: samples in a group.")
    max_response_length: int = Field(20480, gt=0, description="L_max: longest response in tokens.")
    max_staleness: int = Field(
        1, ge=0, description="S: whole steps by which a group may be older than the trainer; 0 is synchronous."
    )
    window_fraction: float = Field(
        0.0, ge=0, le=1, description="Share of the (S + 1) P slots within which a younger group may pass a slow one."
    )
    update_mode: Literal["in_place", "drain"] = Field(
        "in_place",
        description="During a weight update running requests are kept and continue with the new weights (`in_place`), or finish first (`drain`).",
    )
    batch_timeout_s: float = Field(
        1800.0, gt=0, description="Longest wait for a batch before the trainer stops with the queue's state."
    )
    max_group_attempts: int = Field(
        3, gt=0, description="Times a group is generated again after engine or reward faults before the run stops."
    )
    router_replay: bool = Field(
        False,
        description="For models with routed experts: the engines also return which experts each token went to, and the trainer sends it to the same ones, with weights of its own.",
    )
    sampling: SamplingSection = SamplingSection()
    engine: EngineSection = EngineSection()
    filter_groups: FilterGroupsSection = FilterGroupsSection()
    curriculum: CurriculumSection = CurriculumSection()
    oversampling: OversamplingSection = OversamplingSection()
    overlong_buffer: OverlongBufferSection = OverlongBufferSection()
    reward: RewardSection = RewardSection()

    @model_validator(mode="after")
    def _check(self) -> RolloutSection:
        s = self.sampling
        if s.temperature <= 0:
            raise ValueError(
                f"sampling.temperature={s.temperature}: training needs a temperature above 0 (greedy is for evaluation.*)"
            )
        if s.top_p < 1 or s.top_k != -1 or s.min_p > 0:
            raise ValueError(
                "sampling.top_p/top_k/min_p truncate the distribution, which the trainer's log-probs do not mirror; use top_p=1, top_k=-1, min_p=0 for training"
            )
        for name, on in (("oversampling", self.oversampling.enable), ("curriculum", self.curriculum.enable)):
            if on and not self.filter_groups.enable:
                raise ValueError(
                    f"{name}.enable=true with filter_groups.enable=false: it builds on what the filter drops; "
                    f"enable the filter, or switch {name} off"
                )
        b = self.overlong_buffer
        if b.enable and b.len == 0:
            raise ValueError(
                "overlong_buffer.len=0 with overlong_buffer.enable=true: give a length above 0, or switch it off"
            )
        if b.enable and b.len > self.max_response_length:
            raise ValueError(
                f"overlong_buffer.len={b.len} is larger than max_response_length={self.max_response_length}"
            )
        return self


class EvalSetSection(Section):
    """One held-out set."""

    path: str = Field(description="JSONL or parquet file; columns as in `data`.")
    greedy: bool = Field(True, description="Evaluate greedily (temperature 0, one sample).")
    sampled: bool = Field(True, description="Evaluate with `sampling` and `n` samples per prompt.")
    n: int = Field(1, gt=0, description="Samples per prompt for the sampled evaluation.")
    sampling: SamplingSection = Field(SamplingSection(), description="Sampling of the sampled evaluation.")
    max_rows: int | None = Field(None, gt=0, description="Use only the first rows; null means all.")


class EvaluationSection(Section):
    """Evaluation on the rollout engines."""

    sets: dict[str, EvalSetSection] = Field(default_factory=dict, description="Held-out sets by name.")
    before_training: bool = Field(True, description="Evaluate the starting weights.")
    after_training: bool = Field(
        True, description="Evaluate the exported HF checkpoint, reloaded from disk by the engines."
    )
    timeout_s: float = Field(1800.0, gt=0, description="Longest evaluation of one set.")


class RaySection(Section):
    """The Ray cluster that carries the service."""

    address: str | None = Field(
        None, description="Address of a running cluster (`auto` finds one); null starts a private one."
    )
    object_store_memory_mb: int = Field(512, gt=75, description="Object store of a privately started cluster.")
    start_timeout_s: float = Field(120.0, gt=0, description="Longest wait for Ray or for the service to appear.")


class RoutingShape(Section):
    """What the service must know of a model's routed experts.

    Attributes:
        num_layers: layers of the model, dense ones included.
        moe_layers: numbers of those with routed experts, ascending from 0.
        num_experts, top_k: experts of such a layer, and how many a token goes to.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int


class ServiceSettings(Section):
    """All that the service needs, handed to it in one piece by the launcher.

    Attributes:
        run_name, run_dir: run folder (absolute) for logs and dumps.
        model_path: HF folder that the engines load first.
        model_dtype: dtype of the trainer's weights, which `engine.dtype: auto` follows.
        seed: seed of shuffling and of sampling.
        sglang: verbatim server arguments.
        routing: of the model's routed experts; needed by `rollout.router_replay`.
    """

    run_name: str
    run_dir: str
    model_path: str
    model_dtype: Literal["float32", "bfloat16"]
    trust_remote_code: bool
    seed: int
    data: DataSection
    rollout: RolloutSection
    evaluation: EvaluationSection
    ray: RaySection
    sglang: dict[str, object] = Field(default_factory=dict)
    routing: RoutingShape | None = None

    @model_validator(mode="after")
    def _replay_knows_the_routing(self) -> ServiceSettings:
        if self.rollout.router_replay and self.routing is None:
            raise ValueError("rollout.router_replay=true for a model without routed experts; switch it off")
        return self
