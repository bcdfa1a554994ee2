"""From a rank's log to the words that close a failed run."""

from __future__ import annotations

from pathlib import Path

from dapo_megatron.failure import find_cause

TRACEBACK = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "trainer.py", line 124, in _next_ticket
[rank0]:     raise ServiceError(value)
[rank0]: dapo_megatron.service_client.ServiceError: rollout service, next_batch: no batch for step 1
"""


def test_the_exception_is_found_behind_torchs_rank_prefix(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_text(TRACEBACK)
    cause = find_cause([("trainer rank 0", tmp_path / "missing.log"), ("trainer rank 0", log)])
    assert cause is not None
    assert cause.reason == (
        "dapo_megatron.service_client.ServiceError: rollout service, next_batch: no batch for step 1"
    )
    assert not cause.is_aftermath
    assert cause.tail[0] == "Traceback (most recent call last):"
