"""Prompts: from data rows to token ids, and the cursor that hands each out once per epoch.

A prompt's text is the row's text inside `data.template`, rendered by the tokenizer's chat template if there is one
(`data.chat_template`). Its length in tokens includes everything that is sent to the engine.

torch and transformers are imported only where a tokenizer is loaded: `check_files` runs without them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout_service.config import DataSection
from rollout_service.data_files import DataError, Row, check_files, check_template, iterate_rows, load_rows

__all__ = [
    "DataError",
    "Prompt",
    "PromptSource",
    "Row",
    "check_files",
    "load_rows",
    "load_tokenizer",
    "stop_token_ids",
    "tokenize_rows",
]

logger = logging.getLogger(__name__)

_TOKENIZER_BATCH = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt as it is sent to an engine.

    Attributes:
        prompt_id: id of the data row.
        epoch: pass over the data set, from 0.
        text: rendered text, before a left truncation.
        prompt_ids: int32 `[p]`, at most `data.max_prompt_length` tokens.
        answer: gold answer.
    """

    prompt_id: str
    epoch: int
    text: str
    prompt_ids: np.ndarray
    answer: str


class PromptSource:
    """An endless stream of prompts: each exactly once per epoch, in an order fixed by `(seed, epoch)`.

    A batch may cross the end of an epoch, so the data set can be of any size, also smaller than a batch.

    Attributes:
        report: counts by name: `rows` read, `duplicates` removed, `conflicting_answers` (a prompt seen before with
            another answer, kept), `overlong` (dropped), `truncated`, `special_token_rows` (rows whose own text spells
            a special token, which the tokenizer turns into that token), `kept`, `longest` (tokens).
    """

    def __init__(self, data: DataSection, tokenizer: Any, seed: int) -> None:
        """Read, render and tokenize all rows.

        Raises:
            DataError: a row is malformed, or no prompt is left.
        """
        self._shuffle = data.shuffle
        self._seed = seed
        self._prompts, self.report = tokenize_rows(iterate_rows(data.train, data), data, tokenizer)
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self._prompts:
            digest.update(prompt.prompt_id.encode() + b"\0" + prompt.prompt_ids.tobytes() + prompt.answer.encode())
        self._fingerprint = digest.hexdigest()
        self._epoch = 0
        self._position = 0  # in the current epoch; may equal the number of prompts: the epoch then ends at `next`
        self._order = self._epoch_order(0)
        logger.info("prompts: %s", self.report)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def first(self) -> Prompt:
        """The first prompt of the files, for a launch check. The cursor stays."""
        return self._prompts[0]

    def next(self) -> Prompt:
        """The next prompt; never ends."""
        if self._position == len(self._prompts):
            self._epoch += 1
            self._position = 0
            self._order = self._epoch_order(self._epoch)
        prompt = self._prompts[self._order[self._position]]
        self._position += 1
        return Prompt(prompt.prompt_id, self._epoch, prompt.text, prompt.prompt_ids, prompt.answer)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind the last prompt that was handed out.

        Raises:
            DataError: the data, the tokenizer or the order differ from those of the checkpoint.
        """
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                "the prompts differ from those of the checkpoint (data files, data.* settings or tokenizer changed), so "
                "its position means nothing; resume with the same data, or start a new run from the exported weights"
            )
        if (state["seed"], state["shuffle"]) != (self._seed, self._shuffle):
            raise DataError(
                f"the checkpoint's prompts are ordered by run.seed={state['seed']}, data.shuffle={state['shuffle']}, "
                f"this run's by run.seed={self._seed}, data.shuffle={self._shuffle}; resume with the former"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._epoch_order(self._epoch)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        n = len(self._prompts)
        return np.random.default_rng([self._seed, epoch]).permutation(n) if self._shuffle else np.arange(n)


def tokenize_rows(
    rows: Iterator[Row] | Sequence[Row], data: DataSection, tokenizer: Any
) -> tuple[list[Prompt], dict[str, int]]:
    """Turn rows into prompts of epoch 0, and count what happened to them (see `PromptSource.report`).

    Raises:
        DataError: a row cannot be rendered, a prompt is too long under `overlong_prompts: error`, or none is left.
    """
    check_template(data.template)
    chat = _uses_chat_template(data, tokenizer)
    report = dict.fromkeys(
        ("rows", "duplicates", "conflicting_answers", "overlong", "truncated", "special_token_rows", "kept", "longest"),
        0,
    )
    special = _special_token_pattern(tokenizer)
    kept_rows = list(_without_duplicates(rows, data.drop_duplicates, report))
    prompts: list[Prompt] = []
    ids_seen: dict[str, int] = {}
    for start in range(0, len(kept_rows), _TOKENIZER_BATCH):
        batch = kept_rows[start : start + _TOKENIZER_BATCH]
        texts = [_render(row, data, tokenizer, chat) for row in batch]
        for row, text, ids in zip(batch, texts, _encode(texts, tokenizer, chat), strict=True):
            own = row.prompt if isinstance(row.prompt, str) else "\n".join(content for _, content in row.prompt)
            report["special_token_rows"] += special is not None and special.search(own) is not None
            report["longest"] = max(report["longest"], len(ids))
            fitting = _fit(ids, row, data, tokenizer, report)
            if fitting is None:
                continue
            ids_seen[row.row_id] = repeats = ids_seen.get(row.row_id, 0) + 1
            prompt_id = row.row_id if repeats == 1 else f"{row.row_id}#{repeats}"
            prompts.append(Prompt(prompt_id, 0, text, np.array(fitting, dtype=np.int32), row.answer))
    report["kept"] = len(prompts)
    if not prompts:
        raise DataError(
            f"no prompt is left of the {report['rows']} rows in {', '.join(data.train)}: {report['overlong']} are longer "
            f"than data.max_prompt_length={data.max_prompt_length} tokens (the longest has {report['longest']}); raise it "
            f"or set data.overlong_prompts=truncate_left"
        )
    if report["special_token_rows"]:
        logger.warning(
            "%d rows spell a special token such as <|im_end|> in their text; the tokenizer makes it that token",
            report["special_token_rows"],
        )
    return prompts, report


def _without_duplicates(rows: Iterator[Row] | Sequence[Row], drop: bool, report: dict[str, int]) -> Iterator[Row]:
    answers: dict[bytes, set[str]] = {}
    for row in rows:
        report["rows"] += 1
        key = hashlib.blake2b(repr(row.prompt).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        seen = answers.setdefault(key, set())
        if row.answer in seen:
            if drop:
                report["duplicates"] += 1
                continue
        elif seen:
            report["conflicting_answers"] += 1
        seen.add(row.answer)
        yield row


def _uses_chat_template(data: DataSection, tokenizer: Any) -> bool:
    has_one = bool(getattr(tokenizer, "chat_template", None))
    if data.chat_template == "always" and not has_one:
        raise DataError(
            "data.chat_template=always, but the tokenizer has no chat template; add chat_template.jinja to the model "
            "folder, or set data.chat_template=never"
        )
    return has_one and data.chat_template != "never"


def _render(row: Row, data: DataSection, tokenizer: Any, chat: bool) -> str:
    if isinstance(row.prompt, str):
        messages = [{"role": "user", "content": data.template.replace("{prompt}", row.prompt)}]
    else:
        messages = [{"role": role, "content": content} for role, content in row.prompt]
        messages[-1]["content"] = data.template.replace("{prompt}", messages[-1]["content"])
    if chat:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # the template is a program of the model's author and may raise anything
            raise DataError(f"{row.where}: the tokenizer's chat template refuses the prompt: {error}") from error
    if not isinstance(row.prompt, str) and (data.chat_template != "never" or len(messages) > 1):
        fix = (
            "set data.chat_template=never to use the text of prompts with a single message"
            if len(messages) == 1
            else "only prompts with a single message work without one"
        )
        raise DataError(
            f"{row.where}: the prompt is a list of {len(messages)} message(s), but "
            f"{'data.chat_template=never' if data.chat_template == 'never' else 'the tokenizer has no chat template'}; "
            f"add chat_template.jinja to the model folder, or {fix}"
        )
    return messages[-1]["content"]


def _encode(texts: list[str], tokenizer: Any, chat: bool) -> list[list[int]]:
    # A chat template writes its own special tokens. Plain text gets those that the tokenizer adds by itself (BOS).
    # `apply_chat_template(tokenize=True)` is avoided: what it returns (ids or a dictionary) depends on the version.
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=not chat)["input_ids"]
    if not chat and tokenizer.eos_token_id is not None:
        for ids, text in zip(encoded, texts, strict=True):
            if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
                ids.pop()  # a tokenizer that closes every text would end the prompt before the answer
    return encoded


def _fit(ids: list[int], row: Row, data: DataSection, tokenizer: Any, report: dict[str, int]) -> list[int] | None:
    """The ids within the limit, or None for a dropped row. Left truncation keeps a leading BOS and the end."""
    if not ids:
        raise DataError(f"{row.where}: the tokenizer makes no token of the prompt")
    limit = data.max_prompt_length
    if len(ids) <= limit:
        return ids
    if data.overlong_prompts == "error":
        raise DataError(
            f"{row.where}: the prompt has {len(ids)} tokens, data.max_prompt_length={limit}; raise it, shorten the row, "
            f"or set data.overlong_prompts=drop"
        )
    if data.overlong_prompts == "drop":
        report["overlong"] += 1
        return None
    report["truncated"] += 1
    head = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    return head + ids[len(ids) - (limit - len(head)) :]


def _special_token_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    tokens = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    return re.compile("|".join(map(re.escape, sorted(tokens - {""})))) if tokens - {""} else None


def load_tokenizer(model_path: str, trust_remote_code: bool) -> Any:
    """The tokenizer of a local model folder; never goes to the network.

    Raises:
        DataError: the folder is missing or holds no usable tokenizer.
    """
    if not Path(model_path).is_dir():
        raise DataError(f"model.path={model_path}: no such folder")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DataError(
            f"model.path={model_path}: the tokenizer cannot be loaded ({error}); copy tokenizer.json and "
            f"tokenizer_config.json of the model into the folder"
        ) from error


def stop_token_ids(model_path: str, tokenizer: Any) -> list[int]:
    """Every id that may end a turn: the union of config.json, generation_config.json and the tokenizer, sorted.

    Each of the three alone is incomplete for some models. Whether a response was cut is told by its finish reason,
    never by comparing its last id with one of these.

    Raises:
        DataError: a file holds something else than ids, or there is no id at all, so that no response could end.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = Path(model_path) / name
        if not file.is_file():
            continue
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{file}: not valid JSON ({error})") from error
        for section in (config, config.get("text_config") or {}):
            value = section.get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            if not all(item is None or type(item) is int for item in values):
                raise DataError(f"{file}: eos_token_id is {value!r}; expected an id or a list of ids")
            found.update(item for item in values if item is not None)
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    if not found:
        raise DataError(
            f"{model_path}: neither config.json, generation_config.json nor the tokenizer names an end-of-sequence id; "
            f"add eos_token_id to generation_config.json"
        )
    return sorted(found)
