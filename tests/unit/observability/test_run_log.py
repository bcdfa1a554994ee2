"""What rank 0 writes of events, steps, evaluations and samples; the other ranks write nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dapo_megatron.config import load_config
from dapo_megatron.observability.jsonl import read_jsonl
from dapo_megatron.observability.run_log import RunLog
from rollout_service.evaluation import evaluation_metrics
from rollout_service.sample import FinishReason, Group, GroupMeta, Sample, Ticket, pack_group
from tests.config_files import write_config
from tests.toy_models import make_tokenizer


def group(order: int, responses: list[list[int]], accs: list[float]) -> Group:
    samples = [
        Sample(
            response_ids=np.array(ids, np.int32),
            behaviour_logprobs=np.zeros(len(ids), np.float32),
            versions=((3, 1), (4, len(ids) - 1)),
            finish_reason=FinishReason.STOP,
            acc=acc,
            reward=2 * acc - 1,
        )
        for ids, acc in zip(responses, accs, strict=True)
    ]
    return Group(order, f"train:{order}", 0, np.array([7, 8], np.int32), "1", samples)


def test_everything_lands_in_its_file(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path), ["observability.samples_per_step=2"])
    make_tokenizer(config.model.path)
    groups = [group(1, [[10, 11, 12], [13, 14]], [1.0, 0.0]), group(2, [[20, 21], [22, 23]], [0.0, 1.0])]
    store = [pack_group(g) for g in groups]
    ticket = Ticket(5, [GroupMeta.of(g) for g in groups], [0, 1], {})
    log = RunLog(config, tmp_path / "run", active=True)
    log.event("load_model", path="m")
    log.step(5, {"actor/pg_loss": 0.25})
    samples = [g.samples for g in groups]
    results = {"greedy": evaluation_metrics([[s[0]] for s in samples]), "sampled": evaluation_metrics(samples)}
    log.evaluation(config.trainer.total_steps, "dev", results)
    log.samples(5, ticket, lambda refs: [store[ref] for ref in refs])
    log.close()

    assert [e["event"] for e in read_jsonl(tmp_path / "run" / "events.jsonl")] == ["load_model"]
    step, evaluation = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert step["actor/pg_loss"] == 0.25
    assert evaluation["val-core/dev/sampled/acc/mean@2"] == 0.5
    assert evaluation["val-core/dev/sampled/acc/best@2"] == 1.0
    assert evaluation["val-core/dev/greedy/acc/mean@1"] == 0.5
    assert evaluation["val-aux/dev/sampled/response_length_mean"] == 2.25
    first, second = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert (first["prompt_id"], first["acc"], first["reward"]) == ("train:1", 1.0, 1.0)
    assert first["versions"] == [3, 4]
    assert len(first["response"]) >= 3
    assert (second["prompt_id"], second["acc"]) == ("train:2", 0.0)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = RunLog(load_config(write_config(tmp_path)), tmp_path / "run", active=False)
    log.event("load_model")
    log.step(1, {"actor/pg_loss": 0.25})
    log.evaluation(1, "dev", {})
    log.samples(1, Ticket(1, [], [], {}), lambda refs: [])
    log.summary({})
    log.close()
    assert not (tmp_path / "run").exists()
