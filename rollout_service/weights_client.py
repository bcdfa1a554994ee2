"""Synchronous calls with which a trainer gives new weights to one engine.

A distributed update is `begin_update()`, one `receive()` per bucket beside the broadcast of the same tensors,
`end_update(version)`. The engine is paused meanwhile (`RolloutService.pause_for_update`). `init_group` and `receive`
block until the other side takes part, so call them from a thread, and look at the reply before entering a collective
that the engine may have refused to join.
"""

from __future__ import annotations

from typing import Any

import requests

from rollout_service.engine import EngineEndpoint, EngineError
from rollout_service.sample import WeightVersion


class WeightsClient:
    """Weight updates of one engine. One thread at a time.

    Every call raises `EngineError`, with the engine's name and its reply, when the engine refuses, fails or does not
    answer within the timeout.
    """

    def __init__(self, endpoint: EngineEndpoint, timeout_s: float) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._session = requests.Session()
        self._session.trust_env = False  # engines are reached directly, whatever proxy the environment names
        self._session.headers.update(endpoint.headers)

    def close(self) -> None:
        self._session.close()

    def init_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a weight update group; blocks until all `world_size` members have come.

        Args:
            rank_offset: rank of the engine's first tensor parallel rank; the publisher is rank 0.
            group_name: never used before on this engine (the name of a group whose publisher died stays taken).
            backend: `gloo` or `nccl`.
        """
        self._post(
            "/init_weights_update_group",
            {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": group_name,
                "backend": backend,
            },
        )

    def destroy_group(self, group_name: str) -> None:
        self._post("/destroy_weights_update_group", {"group_name": group_name})

    def begin_update(self) -> None:
        """Open an update session; without one the engine refuses `receive`."""
        self._post("/begin_weight_update", {"selector": "all"})

    def receive(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], source: str, load_format: str | None = None
    ) -> None:
        """Let the engine take these tensors from `source` and load them.

        Args:
            names: HF names.
            dtypes: as torch spells them, without `torch.` (`bfloat16`).
            source: name of a weight update group whose rank 0 makes one broadcast per tensor, in this order; with a
                `load_format` of `weight_loader`, what that asks for.
        """
        self._post(
            "/update_weights_from_distributed",
            {
                "names": names,
                "dtypes": dtypes,
                "shapes": shapes,
                "group_name": source,
                "load_format": load_format,
                "flush_cache": False,  # once for the whole update, when the service resumes
            },
        )

    def end_update(self, version: WeightVersion) -> None:
        """Close the session and make `version` the engine's weight version.

        The version is set after the last tensor is in place, so an update that breaks off keeps the old one and the
        service sees that this engine did not get the weights. Tokens sampled before it keep their own version.
        """
        self._post("/end_weight_update", {})
        self._set_version(version)

    def update_from_disk(self, path: str, version: WeightVersion) -> None:
        """Load a HF folder that the engine can read, as `version`; a bad folder leaves the weights as they were."""
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        self._post("/update_weights_from_disk", body)

    def checksum(self) -> dict[str, Any]:
        """The engine's own checksums: `{"ranks": [{"checksums": {name: hex, ...}, ...}], "per_engine_checksum": hex}`.

        Names and shapes are the engine's (fused QKV and gate-up), one entry per tensor parallel rank.
        """
        reply = self._post("/weights_checker", {"action": "checksum"})
        return {key: value for key, value in reply.items() if key not in ("success", "message")}

    def scramble(self) -> None:
        """Overwrite all parameters with random numbers; until it gets its weights again, the engine reports version -1."""
        self._set_version(-1)
        self._post("/weights_checker", {"action": "reset_tensors"})

    def server_info(self) -> dict[str, Any]:
        return self._call("GET", "/server_info", None)

    def weight_version(self) -> WeightVersion:
        """The version of the weights that the engine says it holds."""
        info = self._call("GET", "/model_info", None)
        try:
            return int(info["weight_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self.endpoint.name}: no whole-number weight version in {str(info)[:200]}") from error

    def _set_version(self, version: WeightVersion) -> None:
        # The server's default would abort the requests that wait for the end of the pause.
        self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        name = self.endpoint.name
        try:
            response = self._session.request(method, self.endpoint.url + path, json=body, timeout=self.timeout_s)
        except requests.Timeout as error:
            raise EngineError(f"{name} did not answer {path} in {self.timeout_s:g} s") from error
        except requests.RequestException as error:
            raise EngineError(f"{name} does not answer {path}: {error}") from error
        if not response.ok:
            raise EngineError(f"{name} refused {path} with {response.status_code}: {response.text[:500]}")
        try:
            reply = response.json()
        except requests.JSONDecodeError as error:
            raise EngineError(f"{name} answered {path} with {response.text[:200]!r}") from error
        if not isinstance(reply, dict) or reply.get("success") is False:
            raise EngineError(f"{name} refused {path}: {str(reply)[:500]}")
        return reply
