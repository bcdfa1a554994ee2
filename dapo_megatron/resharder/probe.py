"""Do the engines compute the same log-probs as the trainer? Asked with a few real sequences after a weight update."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from dapo_megatron.actor.actor import Actor, reporting_rank
from dapo_megatron.batching.pack import pack
from dapo_megatron.service_client import ServiceClient


@dataclass(frozen=True)
class ProbeResult:
    """Differences in nats between the trainer's and the engines' log-probs of the same tokens under the same weights."""

    max_abs_diff: float
    mean_abs_diff: float
    worst_engine: int
    engines: int  # that were asked: all that are up with the current weights


def probe_engines(
    actor: Actor,
    service: ServiceClient,
    sequences: list[tuple[np.ndarray, np.ndarray]],
    *,
    timeout_s: float,
) -> ProbeResult:
    """Compare trainer and engines on `(prompt_ids, response_ids)` pairs, without temperature. Collective over all ranks."""
    ours = trainer_logprobs(actor, sequences)
    theirs = service.probe(
        [[*p.tolist(), *r.tolist()] for p, r in sequences], [len(p) for p, _ in sequences], timeout_s
    )
    worst, worst_engine, total, count = 0.0, -1, 0.0, 0
    for engine_id, logprobs in sorted(theirs.items()):
        diff = np.abs(np.concatenate(logprobs).astype(np.float64) - ours)
        if not np.isfinite(diff).all():
            raise RuntimeError(f"engine {engine_id} returned a log-prob that is not finite after the weight update")
        total, count = total + float(diff.sum()), count + diff.size
        if diff.max() >= worst:
            worst, worst_engine = float(diff.max()), engine_id
    if not count:
        raise RuntimeError("no engine answered the log-prob probe")
    return ProbeResult(worst, total / count, worst_engine, len(theirs))


def trainer_logprobs(actor: Actor, sequences: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Untempered log-probs of all response tokens, float64, concatenated; the same array on every rank."""
    parallel = actor.config.parallel
    # One micro-batch each: together the sequences may exceed the token budget.
    batches = [
        pack([pair], pad_to_multiple=parallel.token_alignment, sequence_multiple=parallel.sequence_alignment)
        for pair in sequences
    ]
    outputs = actor.logprobs(batches, temperature=1.0)
    if outputs:
        flat = torch.cat([logprobs for logprobs, _ in outputs])
    else:
        flat = torch.zeros(sum(len(response) for _, response in sequences), device=actor.layout.device)
    dist.broadcast(flat, src=reporting_rank())
    return flat.double().cpu().numpy()
