"""The commands `dapo convert ...`. Each imports what it needs, so that `--help` does not load torch.

Exit codes: 0 done, or the two checkpoints agree; 1 they differ; 2 a checkpoint cannot be used, or the command line is wrong.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from checkpoint_convert.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from checkpoint_convert.convert import Options
    from checkpoint_convert.job import Progress as OnProgress

app = typer.Typer(
    no_args_is_help=True, help="Convert checkpoints between Hugging Face and Megatron, look into them, compare them."
)

EXIT_DIFFERENT, EXIT_UNUSABLE = 1, 2
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16", "float32": "float32", "fp32": "float32"}  # fmt: skip
_PLAIN_INTERVAL_S = 10.0
_SHOWN = 20

Source = Annotated[Path, typer.Argument(metavar="SOURCE", help="The checkpoint folder to convert.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")]
Dtype = Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; without it every tensor keeps its own.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that OUT already holds.")]
NoSync = Annotated[
    bool, typer.Option("--no-sync", help="Do not wait for the disk; a crash of the machine may then lose OUT.")
]
HFSource = Annotated[
    Path | None,
    typer.Option(
        "--hf-source", help="Folder with config.json and tokenizer, for a Megatron checkpoint that has none beside it."
    ),
]


@app.command("hf-to-megatron")
def hf_to_megatron(
    source: Source,
    out: Out,
    dtype: Dtype = None,
    workers: Workers = 1,
    overwrite: Overwrite = False,
    no_sync: NoSync = False,
) -> None:
    """Write a Megatron distributed checkpoint, for any layout, from a Hugging Face folder."""
    with _reported():
        from checkpoint_convert import convert

        options = _options(dtype, workers, overwrite, no_sync)
        with _progress("converting") as progress:
            done = convert.hf_to_megatron(source, out, options, progress)
        typer.echo(f"wrote {done}")


@app.command("megatron-to-hf")
def megatron_to_hf(
    source: Source,
    out: Out,
    hf_source: HFSource = None,
    dtype: Dtype = None,
    max_shard_size: Annotated[str, typer.Option(help="Of a safetensors file, for example 5GB or 500MiB.")] = "5GB",
    workers: Workers = 1,
    overwrite: Overwrite = False,
    no_sync: NoSync = False,
) -> None:
    """Write a Hugging Face folder from a Megatron checkpoint, for example of a training run, saved at any layout."""
    with _reported():
        from checkpoint_convert import convert

        options, shard = _options(dtype, workers, overwrite, no_sync), _bytes(max_shard_size)
        with _progress("converting") as progress:
            done = convert.megatron_to_hf(source, out, options, hf_source, shard, progress)
        typer.echo(f"wrote {done}")


@app.command("inspect")
def inspect(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Folder of either format.")],
    every: Annotated[bool, typer.Option("--all", help="A row for every tensor; layers are not folded.")] = False,
) -> None:
    """Show a checkpoint's tensors, shapes, dtypes, layout and size."""
    with _reported():
        from checkpoint_convert.inspect import contents

        found = contents(checkpoint, fold=not every)
        table = Table("tensor", "number", "shape", "dtype", "pieces", "size", box=None)
        for column in ("number", "size"):
            next(c for c in table.columns if c.header == column).justify = "right"
        for row in found.rows:
            shape = " x ".join(map(str, row.shape)) or "scalar"
            table.add_row(row.name, str(row.count), shape, row.dtype, row.pieces, _size(row.size))
        # Wide enough for the names, also in a pipe.
        console = Console(width=None if sys.stdout.isatty() else 240)
        console.print(table, highlight=False)
        parameters = sum(row.parameters for row in found.rows)
        count, size = sum(row.count for row in found.rows), sum(row.size for row in found.rows)
        typer.echo(f"\n{found.layout}")
        typer.echo(f"{count} tensors, {parameters:,} numbers, {_size(size)}")
        if found.others:
            typer.echo(f"{found.others} further entries are not the model's (optimizer, extra states)")


@app.command("verify")
def verify(
    first: Annotated[Path, typer.Argument(metavar="A", help="Folder of either format.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Folder of either format.")],
    atol: Annotated[float, typer.Option(min=0.0, help="Absolute tolerance.")] = 0.0,
    rtol: Annotated[float, typer.Option(min=0.0, help="Relative tolerance.")] = 0.0,
    logits: Annotated[
        bool, typer.Option("--logits", help="Also run both models on sample tokens, with transformers.")
    ] = False,
    hf_source: HFSource = None,
) -> None:
    """Compare two checkpoints tensor by tensor: every bit, or within --atol and --rtol. Exit code 1 if they differ."""
    with _reported():
        from checkpoint_convert.verify import compare

        with _progress("comparing") as progress:
            found = compare(first, second, atol=atol, rtol=rtol, logits=logits, hf_source=hf_source, progress=progress)
        lines = [f"config: {difference}" for difference in found.config]
        lines += [f"{name}: only in {first}" for name in found.only_first]
        lines += [f"{name}: only in {second}" for name in found.only_second]
        for tensor in found.tensors:
            by = "" if tensor.max_abs is None else f", by at most {tensor.max_abs:.3g}"
            lines.append(f"{tensor.name}: {tensor.reason}{by}")
        for line in lines[:_SHOWN]:
            typer.echo(line)
        if len(lines) > _SHOWN:
            typer.echo(f"... and {len(lines) - _SHOWN} more")
        if found.logits is not None:
            typer.echo(f"logits differ by at most {found.logits:.3g}")
        same = found.compared - len(found.tensors)
        typer.echo(
            f"{'the checkpoints agree' if found.agree else 'THE CHECKPOINTS DIFFER'}: {same} of {found.compared} tensors are the same"
        )
    if not found.agree:
        raise typer.Exit(EXIT_DIFFERENT)


@contextmanager
def _reported() -> Iterator[None]:
    """One clear line for an error, without a traceback."""
    try:
        yield
    except CheckpointError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_UNUSABLE) from error


@contextmanager
def _progress(verb: str) -> Iterator[OnProgress]:
    """A bar with bytes, speed and time left on a terminal, a line every ten seconds elsewhere; both on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        last = time.monotonic()

        def line(done: int, total: int, resumed: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _PLAIN_INTERVAL_S:
                last = time.monotonic()
                console.print(f"{verb}: {_size(done)} of {_size(total)}", highlight=False)

        yield line
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(verb, total=None)
        began = False

        def update(done: int, total: int, resumed: int) -> None:
            nonlocal began
            if resumed and not began:
                console.print(f"going on after {_size(resumed)} of an earlier run", highlight=False)
                bar.reset(task, total=total, completed=resumed)
            began = True
            bar.update(task, completed=done, total=total)

        yield update


def _options(dtype: str | None, workers: int, overwrite: bool, no_sync: bool) -> Options:
    from checkpoint_convert.convert import Options

    return Options(None if dtype is None else _dtype(dtype), workers, overwrite, durable=not no_sync)


def _dtype(name: str) -> torch.dtype:
    import torch

    if name not in _DTYPES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(_DTYPES)}", param_hint="--dtype")
    dtype: torch.dtype = getattr(torch, _DTYPES[name])
    return dtype


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or not (size := int(float(match[1]) * _UNITS[match[2].upper()])):
        raise typer.BadParameter(f"{text!r} is no size; write for example 5GB or 500MiB", param_hint="--max-shard-size")
    return size


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
