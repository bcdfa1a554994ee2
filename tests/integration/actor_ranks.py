"""What each rank does in the layout tests: build a real Megatron actor, compute, and report plain results."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollout_service.sample import GroupMeta, Ticket
from tests.ranks import leave_model_parallel

# `algorithm` blocks beside the default. `options` has everything on that DAPO has off.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "": {},
    "options": {
        "adv_estimator": "rloo",
        "policy_loss": "gspo",
        "loss_agg_mode": "seq-mean-token-mean",
        "overlong_filtering": True,
        "entropy_coef": 0.05,
        "kl": {"coef": 0.2, "kind": "k1"},
        "off_policy": {"bound": "mask", "mask_low": 0.5, "mask_high": 2.0},
    },
}
# Responses from this length on count as truncated.
TRUNCATED_LENGTH = 32


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of one case, its `algorithm` block and what else it tries; data-parallel size follows from the number of ranks.

    Attributes:
        padded: pad every sequence and micro-batch far beyond what the layout asks for.
        megatron: pass-through fields.
        label: name of what the pass-through fields try.
        dtype: of the model's weights.
    """

    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    max_tokens: int = 256
    algorithm: str = ""
    vp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    padded: bool = False
    distributed_optimizer: bool = True
    label: str = ""
    dtype: str = "float32"
    megatron: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        parts = [
            f"tp{self.tp}",
            f"pp{self.pp}",
            f"vp{self.vp}" if self.vp > 1 else "",
            f"ep{self.ep}" if self.ep > 1 else "",
            f"cp{self.cp}" if self.cp > 1 else "",
        ]
        parts += [f"etp{self.etp}" if self.etp else "", "sp" if self.sequence_parallel else "", f"mb{self.max_tokens}"]
        parts += ["padded" if self.padded else "", "" if self.distributed_optimizer else "plainopt"]
        parts += ["" if self.dtype == "float32" else self.dtype, self.label]
        return "-".join(part for part in parts if part)


def make_config(
    model_dir: str, layout: Layout, world_size: int, *, groups: int, group_size: int, **sections: Any
) -> Any:
    """A RunConfig for `groups` prompts of `group_size` samples in one mini-batch, unless `sections` say otherwise."""
    from dapo_megatron.config.sections import RunConfig

    tree: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": model_dir, "dtype": layout.dtype},
        "data": {"train": ["unused"], "max_prompt_length": 32},
        "rollout": {"prompts_per_step": groups, "n_samples_per_prompt": group_size, "max_response_length": 48},
        "parallel": {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vp,
            "context_parallel_size": layout.cp,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
            "sequence_parallel": layout.sequence_parallel,
            "nproc_per_node": world_size,
            "distributed_timeout_s": 120,
        },
        # Adam's step is the gradient over its own size; a large epsilon keeps the rounding of tiny gradients from becoming steps.
        "optim": {
            "lr": 1e-3,
            "lr_warmup_steps": 0,
            "clip_grad": 0.5,
            "adam_eps": 1e-3,
            "use_distributed_optimizer": layout.distributed_optimizer,
        },
        "trainer": {
            "total_steps": 3,
            "mini_batch_prompts": groups,
            "max_tokens_per_gpu": layout.max_tokens,
            "logprob_chunk_tokens": 7,
        },
        "megatron": dict(layout.megatron),
    }
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    return RunConfig.model_validate(tree)


def make_groups(vocab: int, groups: int, group_size: int, seed: int) -> list[dict[str, Any]]:
    """Random packed groups with ragged lengths, mixed rewards and behaviour log-probs; group g has prompt g."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        lengths = rng.integers(1, 40, group_size)
        total = int(lengths.sum())
        made.append(
            {
                "packed": {
                    "prompt_ids": rng.integers(4, vocab, rng.integers(2, 20)).astype(np.int32),
                    "response_ids": rng.integers(4, vocab, total).astype(np.int32),
                    "behaviour_logprobs": (-4 + rng.normal(0, 0.5, total)).astype(np.float32),
                    "token_versions": np.zeros(total, np.int32),
                    "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                },
                "rewards": rng.choice([-1.0, 1.0, 0.3], group_size).astype(np.float32),
            }
        )
    return made


def make_ticket(groups: list[dict[str, Any]]) -> Ticket:
    """A ticket whose references are indices into `groups`."""
    metas = []
    for order, group in enumerate(groups):
        lengths = np.diff(group["packed"]["offsets"]).astype(np.int32)
        metas.append(
            GroupMeta(
                order=order,
                prompt_id=f"p{order}",
                epoch=0,
                prompt_length=len(group["packed"]["prompt_ids"]),
                response_lengths=lengths,
                rewards=group["rewards"],
                acc=(group["rewards"] > 0).astype(np.float32),
                truncated=lengths >= TRUNCATED_LENGTH,
                oldest_version=0,
                newest_version=0,
                admitted_version=0,
            )
        )
    return Ticket(step=1, groups=metas, refs=list(range(len(groups))), stats={})


def poisoned_update_changes(actor: Any, loss_batches: list[Any]) -> list[str]:
    """Names of parameters that an update with an infinite advantage changed; it must be refused and change none."""
    before = snapshot(actor)
    poisoned = [dataclasses.replace(batch, advantages=batch.advantages * float("inf")) for batch in loss_batches]
    result = actor.update(poisoned)
    actor.gather_parameters()
    assert not result.step.applied
    return [name for name, tensor in snapshot(actor).items() if not tensor.equal(before[name])]


def reference_after_updates(actor: Any, packed: list[Any], initial: list[Any]) -> dict[str, bool]:
    """Whether the reference still gives the initial log-probs and the policy keeps its own weights, both bit for bit."""
    before = snapshot(actor)
    reference = actor.reference_logprobs(packed)
    policy = [logprobs for logprobs, _ in actor.logprobs(packed)]
    restored = all(tensor.equal(before[name]) for name, tensor in snapshot(actor).items())
    rows = [i for i, logprobs in enumerate(initial) if logprobs.numel()]
    return {
        "initial": len(reference) == len(initial) and all(reference[i].equal(initial[i]) for i in rows),
        "policy_moved": all(not policy[i].equal(initial[i]) for i in rows),
        "restored": restored,
    }


def snapshot(actor: Any) -> dict[str, Any]:
    """Copies of this rank's parameters by global name."""
    from dapo_megatron.actor.weights import named_global_parameters

    tensors = named_global_parameters(actor.chunks, actor.mapping, actor.expert_offset)
    return {name: tensor.detach().clone() for name, tensor in tensors}


def whole_gradients(actor: Any, loss_batches: list[Any]) -> dict[str, Any]:
    """Gradients of the mini-batch loss by HF name, on rank 0; the distributed optimizer would keep only its share."""
    from tests.merged_state import merged

    config = actor.chunks[0].config
    finalize = config.finalize_model_grads_func
    config.finalize_model_grads_func = lambda model, tokens, **kwargs: finalize(
        model, tokens, **(kwargs | {"force_all_reduce": True})
    )
    actor.accumulate_gradients(loss_batches)
    config.finalize_model_grads_func = finalize
    # Replicas along TP add up the same numbers in another order.
    return merged(actor, lambda p: p.main_grad if hasattr(p, "main_grad") else p * 0, atol=1e-6)


def score_sequences(
    model_dir: str, layout: Layout, sequences: list[tuple[list[int], list[int]]], temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """On one rank: log-probs and entropies of all response tokens of `(prompt, response)` pairs, on the last stage."""
    from dapo_megatron.actor.process_groups import shutdown
    from dapo_megatron.batching.pack import pack
    from dapo_megatron.platform import current_platform

    platform = current_platform()
    from checkpoint_convert.architecture import read_architecture
    from dapo_megatron.actor.actor import Actor
    from dapo_megatron.actor.process_groups import initialize

    config = make_config(model_dir, layout, int(os.environ["WORLD_SIZE"]), groups=4, group_size=2)
    here = initialize(config.parallel, platform, seed=1)
    actor = Actor(config, read_architecture(model_dir), here, platform)
    actor.load_hf(model_dir)
    packed = pack([(np.array(p), np.array(r)) for p, r in sequences], config.parallel.token_alignment)
    ((logprobs, entropy),) = actor.logprobs([packed], temperature)
    shutdown()
    return logprobs.cpu().numpy(), entropy.cpu().numpy()


def run_layouts(
    cases: list[tuple[str, Layout]],
    groups: list[dict[str, Any]],
    group_size: int,
    updates: int,
    save_to: str | None = None,
) -> dict[str, dict[str, Any]]:
    """On one rank: for each (model folder, layout) log-probs, one loss and gradient norm, and `updates` updates.

    Results are keyed `<folder name>/<layout name>`, with the algorithm's name in front when it has one; log-probs are keyed by sample and
    only on ranks that report a loss. Rank 0 writes gradients and updated weights to `save_to/<case>.{grads,weights}.safetensors`.
    """
    from dapo_megatron.actor.process_groups import shutdown
    from dapo_megatron.platform import current_platform

    platform = current_platform()
    results: dict[str, dict[str, Any]] = {}
    for model_dir, layout in cases:
        case = f"{layout.algorithm}:{Path(model_dir).name}" if layout.algorithm else Path(model_dir).name
        case = f"{case}/{layout.name}"
        try:
            with _padding(layout.padded):
                results[case] = _run_case(platform, model_dir, layout, groups, group_size, updates, save_to, case)
        except Exception as error:
            raise RuntimeError(f"in case {case}") from error
        leave_model_parallel()
    shutdown()
    return results


def _run_case(
    platform: Any,
    model_dir: str,
    layout: Layout,
    groups: list[dict[str, Any]],
    group_size: int,
    updates: int,
    save_to: str | None,
    case: str,
) -> dict[str, Any]:
    from safetensors.torch import save_file

    from checkpoint_convert.architecture import read_architecture
    from dapo_megatron.actor.actor import Actor
    from dapo_megatron.actor.process_groups import initialize
    from dapo_megatron.config.validate import check_layout
    from dapo_megatron.step_batch import assemble
    from tests.merged_state import merged

    world_size = int(os.environ["WORLD_SIZE"])
    config = make_config(
        model_dir, layout, world_size, groups=len(groups), group_size=group_size, algorithm=ALGORITHMS[layout.algorithm]
    )
    arch = read_architecture(model_dir)
    assert check_layout(config, arch) == []
    here = initialize(config.parallel, platform, seed=1)
    actor = Actor(config, arch, here, platform)
    actor.load_hf(model_dir)
    actor.keep_reference()
    fetch = lambda refs: [groups[r]["packed"] for r in refs]  # noqa: E731
    batch = assemble(make_ticket(groups), fetch, config, dp_rank=here.dp_rank, dp_size=here.dp_size)
    (micro_batches,) = batch.mini_batches
    outputs = actor.logprobs([m.packed for m in micro_batches])
    result: dict[str, Any] = {"logprobs": {}, "entropy": {}}
    if here.reports_loss:
        for micro, (logprobs, entropy) in zip(micro_batches, outputs, strict=True):
            for position, sample in enumerate(micro.samples):
                of_sample = micro.packed.sample_index == position
                result["logprobs"][sample] = logprobs.cpu()[of_sample].numpy()
                result["entropy"][sample] = entropy.cpu()[of_sample].numpy()
    old = [pair[0] for pair in outputs] if outputs else [None] * len(micro_batches)
    ref = (actor.reference_logprobs(batch.packed) if config.algorithm.kl.coef else None) or [None] * len(old)
    loss_batches = [m.with_old_logprobs(o, r) for m, o, r in zip(micro_batches, old, ref, strict=True)]
    gradients = whole_gradients(actor, loss_batches)
    for update in range(updates):
        done = actor.update(loss_batches)
        result.setdefault("metrics", done.metrics)
        result.setdefault("grad_norm", done.step.grad_norm)
        assert done.step.applied, f"update {update} was skipped"
    actor.gather_parameters()
    weights = merged(actor, lambda p: p.float())
    if here.rank == 0 and save_to is not None:
        stem = case.replace("/", "@")
        for kind, tensors in (("grads", gradients), ("weights", weights)):
            tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
            save_file(tensors, f"{save_to}/{stem}.{kind}.safetensors")
    if updates:
        initial = [pair[0] for pair in outputs]
        if not config.megatron.get("overlap_param_gather"):
            result["reference"] = reference_after_updates(actor, batch.packed, initial)
        result["skipped_update_changed"] = poisoned_update_changes(actor, loss_batches)
    return result


@contextmanager
def _padding(padded: bool) -> Iterator[None]:
    """Inside, every packed sequence is padded to a multiple of 16 and every micro-batch to one of 64 tokens."""
    from dapo_megatron.config.sections import ParallelSection

    if not padded:
        yield
        return
    plain = ParallelSection.token_alignment, ParallelSection.sequence_alignment
    ParallelSection.token_alignment, ParallelSection.sequence_alignment = 64, 16  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        ParallelSection.token_alignment, ParallelSection.sequence_alignment = plain  # type: ignore[method-assign]
