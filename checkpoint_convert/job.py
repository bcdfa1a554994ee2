"""A long write of many files: in a hidden folder, resumable, in one process or several, published whole.

The hidden folder `.<name>.converting` stands beside the folder to be. Its journal has a line with the job's fingerprint
and one for every finished file, with size and checksums. A run with the same fingerprint keeps the files that
still have them; any other begins anew. A failed run removes its unfinished file and, when no file was finished, the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

from checkpoint_convert.byte_stream import OnBytes, naming_write_errors
from checkpoint_convert.errors import CheckpointError
from checkpoint_convert.export import publish, sync

JOURNAL = "journal.jsonl"
_VERIFY_BYTES = 8 << 20
_POLL_S = 0.1


@dataclass(frozen=True)
class OutputFile:
    """A file to write: its name, what goes into it, and how many bytes of tensors that is."""

    name: str
    contents: tuple[str, ...]
    size: int


class Writer(Protocol):
    """What a job does, on whichever process: one file. Must be picklable before it has written the first."""

    def write(self, output: OutputFile, path: Path, file: BinaryIO, on_bytes: OnBytes) -> list[dict[str, Any]]:
        """Write the file, and return JSON objects that describe what is in it.

        Each has `data`, `size` and `checksum` (start, length and CRC-32 of a part of the file) beside its own fields.
        """
        ...


@dataclass(frozen=True)
class Job:
    """Arguments of `run`.

    Attributes:
        outputs: all files that `writer` writes.
        fingerprint: JSON object; equal for two jobs that write the same.
        finish: called with the hidden folder and the descriptions of all files when they are there; adds the rest.
        replaceable: called with an `out_dir` that exists; raises CheckpointError if it may not be replaced.
        workers: processes; 1 works in this one.
        durable: wait until everything is on disk before it is published, so that a crash of the machine cannot lose it.
    """

    out_dir: Path
    outputs: Sequence[OutputFile]
    writer: Writer
    fingerprint: dict[str, Any]
    finish: Callable[[Path, list[list[dict[str, Any]]]], None]
    replaceable: Callable[[Path], None]
    workers: int = 1
    durable: bool = True


class Progress(Protocol):
    def __call__(self, done: int, total: int, resumed: int) -> None:
        """Bytes written so far, of how many, and how many of them by an earlier run."""
        ...


def run(job: Job, progress: Progress) -> Path:
    """Write all files of a job and publish them as `job.out_dir`.

    Raises:
        CheckpointError: `out_dir` is in the way, another process writes it, the disk is full, or the writer raised.
    """
    out_dir = job.out_dir.absolute()
    if out_dir.exists():
        job.replaceable(out_dir)
    folder = out_dir.parent / f".{out_dir.name}.converting"
    with naming_write_errors(folder, "a new folder"):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder) as journal:
        try:
            found = _resume(folder, journal, job)
            _check_room(folder, job, found)
            _write_missing(folder, journal, job, found, progress)
            job.finish(folder, [found[output.name] for output in job.outputs])
            with naming_write_errors(folder, "the finished checkpoint"):
                if job.durable:
                    for path in folder.rglob("*"):
                        if path.name != JOURNAL:
                            sync(path)
                (folder / JOURNAL).unlink()
                publish(folder, out_dir, job.durable)
        except CheckpointError:
            _clear(folder, job)
            raise
    return out_dir


@contextmanager
def _locked(folder: Path) -> Iterator[IO[str]]:
    """The journal, held by this process alone."""
    with naming_write_errors(folder / JOURNAL, "the journal"):
        journal = (folder / JOURNAL).open("a+", encoding="utf-8")
    with journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"{folder}: another conversion to this folder is running") from error
        yield journal


def _resume(folder: Path, journal: IO[str], job: Job) -> dict[str, list[dict[str, Any]]]:
    """Descriptions of the files that an earlier run of the same job finished; everything else is removed."""
    fingerprint = hashlib.sha256(json.dumps(job.fingerprint, sort_keys=True).encode()).hexdigest()
    journal.seek(0)
    lines = []
    for line in journal:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break  # the run was killed while it wrote this line
    found: dict[str, list[dict[str, Any]]] = {}
    if lines and lines[0].get("fingerprint") == fingerprint:
        wanted = {output.name for output in job.outputs}
        for line in lines[1:]:
            if line["file"] in wanted and _intact(folder / line["file"], line["bytes"], line["items"]):
                found[line["file"]] = line["items"]
    for path in folder.iterdir():
        if path.name != JOURNAL and path.name not in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with naming_write_errors(folder / JOURNAL, "the journal"):
        journal.truncate(0)
        _note(journal, {"fingerprint": fingerprint})
        for name, items in found.items():
            _note(journal, {"file": name, "bytes": (folder / name).stat().st_size, "items": items})
    return found


def _note(journal: IO[str], line: dict[str, Any]) -> None:
    journal.write(json.dumps(line, separators=(",", ":")) + "\n")
    journal.flush()


def _intact(path: Path, size: int, items: list[dict[str, Any]]) -> bool:
    if not path.is_file() or path.stat().st_size != size:
        return False
    with path.open("rb") as file:
        for item in items:
            file.seek(item["data"])
            left, checksum = item["size"], 0
            while left:
                part = file.read(min(left, _VERIFY_BYTES))
                if not part:
                    return False
                checksum = zlib.crc32(part, checksum)
                left -= len(part)
            if checksum != item["checksum"]:
                return False
    return True


def _check_room(folder: Path, job: Job, found: dict[str, list[dict[str, Any]]]) -> None:
    needed = sum(output.size for output in job.outputs if output.name not in found)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{job.out_dir}: {needed / 1e9:.2f} GB are to be written, but its disk has only {free / 1e9:.2f} GB free; make room, or name another disk"
        )


def _write_missing(
    folder: Path, journal: IO[str], job: Job, found: dict[str, list[dict[str, Any]]], progress: Progress
) -> None:
    total = sum(output.size for output in job.outputs)
    resumed = sum(output.size for output in job.outputs if output.name in found)
    missing = [output for output in job.outputs if output.name not in found]
    done = resumed

    def finished(output: OutputFile, items: list[dict[str, Any]]) -> None:
        size = (folder / output.name).stat().st_size
        with naming_write_errors(folder / JOURNAL, "the journal"):
            _note(journal, {"file": output.name, "bytes": size, "items": items})
        found[output.name] = items

    progress(done, total, resumed)
    if job.workers <= 1 or len(missing) <= 1:

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total, resumed)

        for output in missing:
            finished(output, _write_file(job.writer, output, folder, job.durable, on_bytes))
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    counter = context.Value("q", 0)
    workers = min(job.workers, len(missing))
    pool = ProcessPoolExecutor(workers, context, _start_worker, (job.writer, counter))
    try:
        running: dict[Future[list[dict[str, Any]]], OutputFile] = {
            pool.submit(_work, output, folder, job.durable): output for output in missing
        }
        while running:
            ready, _ = wait(running, _POLL_S, FIRST_COMPLETED)
            progress(resumed + counter.value, total, resumed)
            for future in ready:
                finished(running.pop(future), future.result())
    except BrokenProcessPool as error:
        raise CheckpointError(
            f"{folder}: a worker process was killed (out of memory?); run again to go on, with fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _write_file(
    writer: Writer, output: OutputFile, folder: Path, durable: bool, on_bytes: OnBytes
) -> list[dict[str, Any]]:
    path = folder / output.name
    try:
        with naming_write_errors(path, "the file"), path.open("wb", buffering=0) as file:
            items = writer.write(output, path, file, on_bytes)
            if durable:
                os.fsync(file.fileno())
    except CheckpointError:
        path.unlink(missing_ok=True)
        raise
    return items


# Of a worker process.
_writer: Writer
_counter: Any


def _start_worker(writer: Writer, counter: Any) -> None:
    global _writer, _counter
    import torch

    torch.set_num_threads(1)
    _writer, _counter = writer, counter


def _work(output: OutputFile, folder: Path, durable: bool) -> list[dict[str, Any]]:
    def on_bytes(count: int) -> None:
        with _counter.get_lock():
            _counter.value += count

    return _write_file(_writer, output, folder, durable, on_bytes)


def _clear(folder: Path, job: Job) -> None:
    """After a failure: keep finished files for another try, and nothing else."""
    if not any((folder / output.name).exists() for output in job.outputs):
        shutil.rmtree(folder, ignore_errors=True)
