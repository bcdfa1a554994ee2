"""Checks of an engine's reply: whatever disagrees inside it is an engine fault, never trimmed to fit."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from rollout_service.engine import EngineError, parse_completion, parse_input_logprobs
from rollout_service.sample import FinishReason

# Recorded from a real server (five tokens, length limit), shortened to what is read.
RECORDED: dict[str, Any] = {
    "text": "Zvfbd",
    "output_ids": [55, 25, 9, 5, 7],
    "meta_info": {
        "id": "94f53960a06f49adac10ab464bafc454",
        "finish_reason": {"type": "length", "length": 5},
        "prompt_tokens": 7,
        "weight_version": "0",
        "input_token_logprobs": [],
        "output_token_logprobs": [
            [-3.3965299129486084, 55, None],
            [-2.9166886806488037, 25, None],
            [-3.5944058895111084, 9, None],
            [-4.877399444580078, 5, None],
            [-3.3585286140441895, 7, None],
        ],
        "completion_tokens": 5,
        "cached_tokens": 0,
        "weight_versions": [{"version": "0", "start": 0, "end": 5}],
    },
}


@pytest.fixture
def reply() -> dict[str, Any]:
    return copy.deepcopy(RECORDED)


def test_recorded_reply_is_read(reply: dict[str, Any]) -> None:
    got = parse_completion(reply, "engine 0")
    assert got.ids.dtype == np.int32
    assert got.ids.tolist() == [55, 25, 9, 5, 7]
    assert got.logprobs.dtype == np.float32
    np.testing.assert_allclose(got.logprobs, [-3.39653, -2.91669, -3.59441, -4.8774, -3.35853], atol=1e-5)
    assert got.versions == ((0, 5),)
    assert got.finish_reason is FinishReason.LENGTH


def test_stop_keeps_the_closing_token(reply: dict[str, Any]) -> None:
    reply["meta_info"]["finish_reason"] = {"type": "stop", "matched": 7}
    got = parse_completion(reply, "engine 0")
    assert got.finish_reason is FinishReason.STOP
    assert got.ids[-1] == 7


def test_last_id_dropped_from_the_ids_is_a_fault(reply: dict[str, Any]) -> None:
    reply["output_ids"].pop()
    with pytest.raises(EngineError, match="engine 0: 4 token ids, 5 log-probs and completion_tokens=5"):
        parse_completion(reply, "engine 0")


def test_last_logprob_dropped_is_a_fault(reply: dict[str, Any]) -> None:
    reply["meta_info"]["output_token_logprobs"].pop()
    with pytest.raises(EngineError, match="5 token ids, 4 log-probs and completion_tokens=5"):
        parse_completion(reply, "engine 0")


def test_count_above_the_ids_is_a_fault(reply: dict[str, Any]) -> None:
    reply["meta_info"]["completion_tokens"] = 6
    with pytest.raises(EngineError, match="completion_tokens=6"):
        parse_completion(reply, "engine 0")


def test_other_id_beside_the_logprob_is_a_fault(reply: dict[str, Any]) -> None:
    reply["meta_info"]["output_token_logprobs"][2][1] = 10
    with pytest.raises(EngineError, match="token 2 of 5 is 9 in output_ids but 10 beside its log-prob"):
        parse_completion(reply, "engine 0")


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf")])
def test_missing_or_infinite_logprob_is_a_fault(reply: dict[str, Any], value: float | None) -> None:
    reply["meta_info"]["output_token_logprobs"][4][0] = value
    with pytest.raises(EngineError, match="log-prob of token 4 of 5"):
        parse_completion(reply, "engine 0")


@pytest.mark.parametrize("key", ["output_ids", "meta_info"])
def test_missing_part_is_a_fault_that_names_it(reply: dict[str, Any], key: str) -> None:
    del reply[key]
    with pytest.raises(EngineError, match=key):
        parse_completion(reply, "engine 0")


def test_missing_logprobs_are_a_fault(reply: dict[str, Any]) -> None:
    del reply["meta_info"]["output_token_logprobs"]
    with pytest.raises(EngineError, match="output_token_logprobs"):
        parse_completion(reply, "engine 0")


def test_error_text_instead_of_a_reply_is_a_fault() -> None:
    with pytest.raises(EngineError, match="engine 3"):
        parse_completion("Internal Server Error", "engine 3")


def test_unknown_finish_reason_is_a_fault(reply: dict[str, Any]) -> None:
    reply["meta_info"]["finish_reason"] = {"type": "preempted"}
    with pytest.raises(EngineError, match="preempted"):
        parse_completion(reply, "engine 0")


def empty(reply: dict[str, Any], reason: str) -> dict[str, Any]:
    reply["output_ids"] = []
    reply["meta_info"] |= {
        "output_token_logprobs": [],
        "completion_tokens": 0,
        "finish_reason": {"type": reason},
        "weight_versions": [{"version": "0", "start": 0, "end": 0}],
    }
    return reply


def test_empty_completion_is_a_fault_unless_it_was_aborted(reply: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="empty completion"):
        parse_completion(empty(copy.deepcopy(reply), "stop"), "engine 0")
    aborted = parse_completion(empty(reply, "abort"), "engine 0")
    assert aborted.finish_reason is FinishReason.ABORT
    assert len(aborted.ids) == 0
    assert aborted.versions == ()


def versions(reply: dict[str, Any], *spans: tuple[str, int, int]) -> dict[str, Any]:
    reply["meta_info"]["weight_versions"] = [{"version": v, "start": s, "end": e} for v, s, e in spans]
    return reply


def test_versions_become_runs(reply: dict[str, Any]) -> None:
    assert parse_completion(versions(reply, ("3", 0, 2), ("4", 2, 5)), "e").versions == ((3, 2), (4, 3))
    assert parse_completion(versions(reply, ("3", 0, 2), ("3", 2, 5)), "e").versions == ((3, 5),)
    assert parse_completion(versions(reply, ("3", 0, 5), ("4", 5, 5)), "e").versions == ((3, 5),)


def test_one_version_for_all_tokens_when_no_spans_are_given(reply: dict[str, Any]) -> None:
    del reply["meta_info"]["weight_versions"]
    reply["meta_info"]["weight_version"] = "12"
    assert parse_completion(reply, "e").versions == ((12, 5),)


@pytest.mark.parametrize(
    "spans",
    [
        [("0", 0, 4)],  # too few tokens
        [("0", 0, 6)],  # too many
        [("0", 0, 2), ("1", 3, 5)],  # a hole
        [("0", 0, 3), ("1", 2, 5)],  # an overlap
        [("0", 1, 5)],  # not from the start
    ],
)
def test_versions_that_do_not_cover_the_tokens_are_a_fault(
    reply: dict[str, Any], spans: list[tuple[str, int, int]]
) -> None:
    with pytest.raises(EngineError, match="weight versions"):
        parse_completion(versions(reply, *spans), "engine 0")


def test_version_that_is_no_number_is_a_fault(reply: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="'default' is not a whole number"):
        parse_completion(versions(reply, ("default", 0, 5)), "engine 0")


INPUT_REPLY = {"meta_info": {"input_token_logprobs": [[None, 21, None], [-6.9, 23, None], [-5.7, 66, None]]}}


def test_input_logprobs_belong_to_the_tokens_asked() -> None:
    got = parse_input_logprobs(INPUT_REPLY, [22, 18, 21, 23, 66], 3, "engine 0", vocab_size=80)
    np.testing.assert_allclose(got, [-6.9, -5.7], atol=1e-6)
    with pytest.raises(EngineError, match="other tokens"):
        parse_input_logprobs(INPUT_REPLY, [22, 18, 21, 23, 67], 3, "engine 0", vocab_size=80)
    with pytest.raises(EngineError, match="meta_info"):
        parse_input_logprobs({}, [22, 18], 1, "engine 0", vocab_size=80)


def test_the_last_id_of_the_vocabulary_is_named_0_beside_an_input_logprob() -> None:
    reply = {"meta_info": {"input_token_logprobs": [[None, 21, None], [-6.9, 0, None], [-5.7, 66, None]]}}
    ids = [22, 18, 21, 79, 66]
    np.testing.assert_allclose(parse_input_logprobs(reply, ids, 3, "engine 0", vocab_size=80), [-6.9, -5.7], atol=1e-6)
    with pytest.raises(EngineError, match="other tokens"):
        parse_input_logprobs(reply, ids, 3, "engine 0", vocab_size=81)
