"""One SGLang server, seen from outside: its endpoint, its errors, its replies, and an asynchronous client.

A reply is checked, never trimmed to fit: token ids, the ids beside the log-probs and the server's own count must
agree, and the weight versions must cover every token. What differs is an engine fault.

Requests go straight to the server whatever proxy variables the environment holds (`trust_env=False`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import aiohttp
import numpy as np

from rollout_service.config import RoutingShape
from rollout_service.routed_experts import RoutedExpertsError, parse_routed_experts
from rollout_service.sample import FinishReason, WeightVersion


class EngineError(RuntimeError):
    """An engine answered wrongly, late or not at all. The message names the engine."""


class EngineUnavailable(EngineError):
    """The engine could not be reached or closed the connection: the request may be tried on another one."""


class EngineTimeout(EngineError):
    """The engine did not answer in time."""


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """Where an engine listens, for those who push weights to it.

    Attributes:
        engine_id: index in the fleet.
        url: `http://host:port`, without a slash at the end.
        api_key: sent as a bearer token; None if the server wants none.
        tp_size: tensor parallel ranks, each of which joins a weight update group.
        alive: whether it answers now.
    """

    engine_id: int
    url: str
    api_key: str | None
    tp_size: int
    alive: bool

    @property
    def name(self) -> str:
        return f"engine {self.engine_id} ({self.url})"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, slots=True)
class Completion:
    """A checked completion.

    Attributes:
        ids: int32 `[n]`, the closing end-of-sequence id included; n = 0 only when aborted.
        logprobs: float32 `[n]`, after temperature, before top-p/top-k.
        versions: run-length weight versions; the counts sum to n.
        finish_reason: why it ended.
        routed_experts: `[p + n - 1, moe_layers, top_k]` (`routed_experts.py`) if they were asked for and it was not aborted.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    versions: tuple[tuple[WeightVersion, int], ...]
    finish_reason: FinishReason
    routed_experts: np.ndarray | None = None


def parse_completion(reply: Any, engine: str) -> Completion:
    """Turn the server's reply to `/generate` into a `Completion`.

    Raises:
        EngineError: lengths or ids inside the reply disagree, a log-prob is missing or not finite, the weight
            versions are not whole numbers that cover the tokens, or the finish reason is unknown.
    """
    try:
        ids = [int(token) for token in reply["output_ids"]]
        meta = reply["meta_info"]
        triples = meta["output_token_logprobs"]
        counted = int(meta["completion_tokens"])
        reason = meta["finish_reason"]["type"]
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{engine}: reply without {error}: {str(reply)[:300]}") from error
    if not len(ids) == len(triples) == counted:
        raise EngineError(
            f"{engine}: {len(ids)} token ids, {len(triples)} log-probs and completion_tokens={counted} in one reply "
            f"(finish reason {meta['finish_reason']})"
        )
    for position, (token, triple) in enumerate(zip(ids, triples, strict=True)):
        if triple[1] != token:
            raise EngineError(
                f"{engine}: token {position} of {counted} is {token} in output_ids but {triple[1]} beside its log-prob"
            )
        if triple[0] is None or not math.isfinite(triple[0]):
            raise EngineError(f"{engine}: log-prob of token {position} of {counted} is {triple[0]}")
    try:
        finish_reason = FinishReason(reason)
    except ValueError as error:
        raise EngineError(f"{engine}: unknown finish reason {meta['finish_reason']}") from error
    if not ids and finish_reason is not FinishReason.ABORT:
        raise EngineError(f"{engine}: an empty completion with finish reason {meta['finish_reason']}")
    return Completion(
        ids=np.array(ids, dtype=np.int32),
        logprobs=np.array([triple[0] for triple in triples], dtype=np.float32),
        versions=_parse_versions(meta, len(ids), engine),
        finish_reason=finish_reason,
    )


def _parse_versions(meta: dict[str, Any], n: int, engine: str) -> tuple[tuple[WeightVersion, int], ...]:
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": n}]
    runs: list[tuple[WeightVersion, int]] = []
    position = 0
    for span in spans:
        try:
            version = int(span["version"])
        except (TypeError, ValueError) as error:
            raise EngineError(f"{engine}: weight version {span['version']!r} is not a whole number") from error
        if span["start"] != position or not position <= span["end"] <= n:
            raise EngineError(f"{engine}: weight versions {spans} do not follow each other over {n} tokens")
        count = span["end"] - position
        position = span["end"]
        if count and runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + count)
        elif count:
            runs.append((version, count))
    if position != n:
        raise EngineError(f"{engine}: weight versions {spans} cover {position} of {n} tokens")
    return tuple(runs)


def parse_input_logprobs(reply: Any, ids: list[int], start: int, engine: str, vocab_size: int) -> np.ndarray:
    """Log-probs of `ids[start:]` (float32) out of a reply whose `logprob_start_len` was `start - 1`.

    Args:
        vocab_size: of the model's config. SGLang names the last id of the vocabulary as 0 beside an input log-prob (its
            guard against the padding ids of images); the log-prob itself is the last id's.

    Raises:
        EngineError: the reply does not hold exactly these ids, or a log-prob is missing.
    """
    try:
        triples = reply["meta_info"]["input_token_logprobs"][1:]  # the first token has no log-prob
    except (KeyError, TypeError) as error:
        raise EngineError(f"{engine}: reply without {error}: {str(reply)[:300]}") from error
    if [triple[1] for triple in triples] != [token if token < vocab_size - 1 else 0 for token in ids[start:]]:
        raise EngineError(f"{engine}: input log-probs are for other tokens than the {len(ids) - start} that were asked")
    if any(triple[0] is None for triple in triples):
        raise EngineError(f"{engine}: an input log-prob is missing")
    return np.array([triple[0] for triple in triples], dtype=np.float32)


def vocabulary_size(model_path: str) -> int:
    """`vocab_size` of the model's config.json, padding rows included.

    Raises:
        EngineError: the file is missing or does not say.
    """
    file = Path(model_path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{file}: no whole-number vocab_size ({type(error).__name__}: {error})") from error


class EngineClient:
    """Asynchronous calls to one server.

    The deadline of a completion runs only while the engine is not paused. Make and use it inside one event loop, and
    `close()` it.

    Args:
        vocab_size: of the model's config; see `parse_input_logprobs`.
        routing: of the model's routed experts, if they will be asked for.
    """

    def __init__(
        self,
        endpoint: EngineEndpoint,
        vocab_size: int,
        request_timeout_s: float,
        control_timeout_s: float,
        routing: RoutingShape | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._routing = routing
        self._vocab_size = vocab_size
        self.name = endpoint.name
        self._request_timeout_s = request_timeout_s
        self._control_timeout_s = control_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._held: dict[asyncio.Timeout, float] | None = None  # while paused: what each deadline has left
        self._deadlines: set[asyncio.Timeout] = set()
        self._aborts: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._aborts:
            task.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self, prompt_ids: list[int], sampling: dict[str, Any], rid: str, routed_experts: bool = False
    ) -> Completion:
        """Complete `prompt_ids`. Cancelling the call aborts the request on the server.

        Args:
            sampling: SGLang's `sampling_params`.
            rid: request id, unique among running requests.
            routed_experts: also ask which experts the tokens went to.

        Raises:
            EngineUnavailable: the connection failed or was closed.
            EngineTimeout: no answer within the request timeout, pauses not counted.
            EngineError: refused, the reply contradicts itself (`parse_completion`), or it does not tell every token's experts.
        """
        body = {"input_ids": prompt_ids, "sampling_params": sampling, "return_logprob": True, "rid": rid}
        if routed_experts:
            body["return_routed_experts"] = True
        try:
            async with self._pausable_deadline():
                reply = await self._call("POST", "/generate", body)
        except TimeoutError as error:
            self._abort_soon(rid)
            raise EngineTimeout(f"{self.name} did not finish {rid} in {self._request_timeout_s:g} s") from error
        except asyncio.CancelledError:
            self._abort_soon(rid)
            raise
        completion = parse_completion(reply, self.name)
        if not routed_experts or completion.finish_reason is FinishReason.ABORT:
            return completion
        assert self._routing is not None, "expert choices are asked for, but not their shape"
        tokens = len(prompt_ids) + len(completion.ids)
        try:
            # Hundreds of bytes a token: other requests go on meanwhile.
            chosen = await asyncio.to_thread(parse_routed_experts, reply["meta_info"], tokens, self._routing)
        except RoutedExpertsError as error:
            raise EngineError(f"{self.name}: {error}") from error
        return replace(completion, routed_experts=chosen)

    async def input_logprobs(self, ids: list[int], start: int) -> np.ndarray:
        """Untempered log-probs of `ids[start:]` given what precedes each, float32 `[len(ids) - start]`.

        Args:
            start: at least 1, because the first token follows nothing.
        """
        if not 1 <= start < len(ids):
            raise ValueError(f"start={start} is not inside 1..{len(ids) - 1}")
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        reply = await self._control("POST", "/generate", body)
        return parse_input_logprobs(reply, ids, start, self.name, self._vocab_size)

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "retract") -> None:
        """Stop decoding. With `retract` running requests give up their cache and later continue from their tokens.

        New requests wait. Deadlines stand still until `resume()`.
        """
        self._hold_deadlines()
        await self._control("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._control("POST", "/continue_generation", {})
        self._release_deadlines()

    async def flush_cache(self) -> None:
        """Drop the prefix cache; refused by the server while requests run (not while it is paused with `retract`)."""
        await self._control("POST", "/flush_cache", {})

    async def load_from_disk(self, path: str, version: WeightVersion, timeout_s: float | None = None) -> None:
        """Replace the weights by those of a HF folder, as `version`. A bad folder leaves the server as it was."""
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        await self._control("POST", "/update_weights_from_disk", body, timeout_s)

    async def abort_all(self) -> None:
        """End every request on the server; partial outputs come back with finish reason `abort`."""
        await self._control("POST", "/abort_request", {"rid": "", "abort_all": True})

    async def health(self, timeout_s: float, generate: bool = False) -> bool:
        """Whether the server answers; with `generate` its scheduler, too, which a paused engine cannot show."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._call("GET", "/health_generate" if generate else "/health", None)
        except (TimeoutError, EngineError):
            return False
        return True

    async def server_info(self) -> dict[str, Any]:
        info = await self._control("GET", "/server_info", None)
        if not isinstance(info, dict):
            raise EngineError(f"{self.name}: /server_info answered {str(info)[:200]}")
        return info

    async def weights(self) -> tuple[WeightVersion, str]:
        """Version of the weights that the engine says it holds, and the folder that it last loaded from."""
        info = await self._control("GET", "/model_info", None)
        try:
            return int(info["weight_version"]), str(info["model_path"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self.name}: no whole-number weight version in {str(info)[:200]}") from error

    def _abort_soon(self, rid: str) -> None:
        async def abort() -> None:
            # Best effort for a request whose answer nobody waits for; the server also notices the closed connection.
            with contextlib.suppress(EngineError):
                await self._control("POST", "/abort_request", {"rid": rid}, timeout_s=5.0)

        if self._session is not None and not self._session.closed:
            task = asyncio.get_running_loop().create_task(abort())
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def _hold_deadlines(self) -> None:
        if self._held is not None:
            return
        now = asyncio.get_running_loop().time()
        self._held = {}
        for deadline in self._deadlines:
            when = deadline.when()
            if when is not None and not deadline.expired():
                self._held[deadline] = max(0.0, when - now)
                deadline.reschedule(None)

    def _release_deadlines(self) -> None:
        held, self._held = self._held or {}, None
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            if deadline.when() is None:
                deadline.reschedule(now + held.get(deadline, self._request_timeout_s))

    @contextlib.asynccontextmanager
    async def _pausable_deadline(self) -> AsyncIterator[None]:
        async with asyncio.timeout(self._request_timeout_s if self._held is None else None) as deadline:
            self._deadlines.add(deadline)
            try:
                yield
            finally:
                self._deadlines.discard(deadline)

    async def _control(self, method: str, path: str, body: Any, timeout_s: float | None = None) -> Any:
        timeout_s = self._control_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call(method, path, body)
        except TimeoutError as error:
            raise EngineTimeout(f"{self.name} did not answer {path} in {timeout_s:g} s") from error

    async def _call(self, method: str, path: str, body: Any) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self.endpoint.headers,
                trust_env=False,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._control_timeout_s),
            )
        try:
            async with self._session.request(method, self.endpoint.url + path, json=body) as response:
                status = response.status
                if status == 200 and response.content_type == "application/json":
                    reply = await response.json()
                else:
                    reply = await response.text()
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise EngineUnavailable(f"{self.name} did not take the connection for {path}") from error
            raise EngineUnavailable(f"{self.name} does not answer {path}: {error or type(error).__name__}") from error
        if status in (502, 503, 504):
            raise EngineUnavailable(f"{self.name} answered {path} with {status}: {str(reply)[:500]}")
        if status != 200 or (isinstance(reply, dict) and reply.get("success") is False):
            raise EngineError(f"{self.name} refused {path} with {status}: {str(reply)[:500]}")
        return reply
