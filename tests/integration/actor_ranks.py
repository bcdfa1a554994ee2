"""What each rank does in the layout tests: build a real Megatron actor, compute, and report plain NumPy results."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout_service.sample import GroupMeta, Ticket

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
    """Parallel sizes of one case, and its `algorithm` block; data-parallel size follows from the number of ranks."""

    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    max_tokens: int = 256
    algorithm: str = ""

    @property
    def name(self) -> str:
        return f"tp{self.tp}pp{self.pp}{'sp' if self.sequence_parallel else ''}mb{self.max_tokens}"


def make_config(
    model_dir: str, layout: Layout, world_size: int, *, groups: int, group_size: int, **sections: Any
) -> Any:
    """A RunConfig for `groups` prompts of `group_size` samples in one mini-batch, unless `sections` say otherwise."""
    from dapo_megatron.config.sections import RunConfig

    tree: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": model_dir, "dtype": "float32"},
        "data": {"train": ["unused"], "max_prompt_length": 32},
        "rollout": {"prompts_per_step": groups, "n_samples_per_prompt": group_size, "max_response_length": 48},
        "parallel": {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "sequence_parallel": layout.sequence_parallel,
            "nproc_per_node": world_size,
            "distributed_timeout_s": 120,
        },
        "optim": {"lr": 1e-3, "lr_warmup_steps": 0, "clip_grad": 0.5},
        "trainer": {
            "total_steps": 3,
            "mini_batch_prompts": groups,
            "max_tokens_per_gpu": layout.max_tokens,
            "logprob_chunk_tokens": 7,
        },
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
    import dataclasses

    from dapo_megatron.actor.weights import named_global_parameters

    before = {name: param.detach().clone() for name, param in named_global_parameters(actor.chunks)}
    poisoned = [dataclasses.replace(batch, advantages=batch.advantages * float("inf")) for batch in loss_batches]
    result = actor.update(poisoned)
    assert not result.step.applied
    return [name for name, param in named_global_parameters(actor.chunks) if not param.equal(before[name])]


def reference_after_updates(actor: Any, packed: list[Any], initial: list[Any]) -> dict[str, bool]:
    """Whether the reference still gives the initial log-probs and the policy keeps its own weights, both bit for bit."""
    from dapo_megatron.actor.weights import named_global_parameters

    before = {name: param.detach().clone() for name, param in named_global_parameters(actor.chunks)}
    reference = actor.reference_logprobs(packed)
    policy = [logprobs for logprobs, _ in actor.logprobs(packed)]
    restored = all(param.equal(before[name]) for name, param in named_global_parameters(actor.chunks))
    rows = [i for i, logprobs in enumerate(initial) if logprobs.numel()]
    return {
        "initial": len(reference) == len(initial) and all(reference[i].equal(initial[i]) for i in rows),
        "policy_moved": all(not policy[i].equal(initial[i]) for i in rows),
        "restored": restored,
    }


def run_layouts(
    cases: list[tuple[str, Layout]],
    groups: list[dict[str, Any]],
    group_size: int,
    updates: int,
    export_to: str | None = None,
) -> dict[str, dict[str, Any]]:
    """On one rank: for each (model folder, layout) log-probs, one loss and gradient norm, and weights after `updates` updates.

    Results are keyed `<folder name>/<layout name>`, with the algorithm's name in front when it has one; log-probs are keyed by sample and only on ranks that report a loss.
    """
    from dapo_megatron.platform import current_platform

    platform = current_platform()
    from megatron.core import parallel_state

    from checkpoint_convert.architecture import read_architecture
    from dapo_megatron.actor.actor import Actor
    from dapo_megatron.actor.process_groups import initialize, shutdown
    from dapo_megatron.resharder.disk import write_hf_folder
    from dapo_megatron.resharder.gather import gather_buckets, stage_publishers
    from dapo_megatron.step_batch import assemble

    world_size = int(os.environ["WORLD_SIZE"])
    results: dict[str, dict[str, Any]] = {}
    for model_dir, layout in cases:
        config = make_config(
            model_dir,
            layout,
            world_size,
            groups=len(groups),
            group_size=group_size,
            algorithm=ALGORITHMS[layout.algorithm],
        )
        case = f"{layout.algorithm}:{Path(model_dir).name}" if layout.algorithm else Path(model_dir).name
        here = initialize(config.parallel, platform, seed=1)
        actor = Actor(config, read_architecture(model_dir), here, platform)
        actor.load_hf(model_dir)
        actor.keep_reference()
        batch = assemble(
            make_ticket(groups),
            lambda refs: [groups[r]["packed"] for r in refs],
            config,
            dp_rank=here.dp_rank,
            dp_size=here.dp_size,
        )
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
        for update in range(updates):
            done = actor.update(loss_batches)
            result.setdefault("metrics", done.metrics)
            result.setdefault("grad_norm", done.step.grad_norm)
            assert done.step.applied, f"update {update} was skipped"
        if updates:
            result["reference"] = reference_after_updates(actor, batch.packed, [pair[0] for pair in outputs])
        result["skipped_update_changed"] = poisoned_update_changes(actor, loss_batches) if updates else None
        if export_to is not None:
            target = Path(export_to) / f"{case}-{layout.name}"
            buckets = iter(())
            if here.dp_rank == 0:
                buckets = gather_buckets(
                    actor.chunks,
                    actor.mapping,
                    here,
                    dtype=next(actor.chunks[0].parameters()).dtype,
                    bucket_bytes=20_000,
                )
            write_hf_folder(
                actor.mapping,
                buckets,
                here,
                stage_publishers(here),
                target=target,
                source=Path(model_dir),
                dtype=next(actor.chunks[0].parameters()).dtype,
            )
        results[f"{case}/{layout.name}"] = result
        parallel_state.destroy_model_parallel()
    shutdown()
    return results
