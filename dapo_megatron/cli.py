"""The `dapo` command. Thin: each command imports what it needs, so that a wrong key is reported within a second.

Exit codes: 0 done, 1 the run failed, 2 the configuration or the command line is wrong, 128 + n stopped by signal n.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from checkpoint_convert.cli import app as convert_app
from dapo_megatron.config import ConfigError, RunConfig, load_config, service_settings, to_yaml

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="DAPO reinforcement learning: Megatron-Core actors, an asynchronous SGLang rollout service.",
)

app.add_typer(convert_app, name="convert")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, for example configs/quickstart.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides: a.b.c=value.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the resolved configuration, stop.")]
Plain = Annotated[bool, typer.Option("--plain", help="One line a step instead of the live view.")]

EXIT_CONFIG = 2


@app.command()
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    plain: Plain = False,
) -> None:
    """Train on this machine: rollout service and trainer, with a live view."""
    tree = _checked(config, overrides or [])
    if dry_run:
        typer.echo(to_yaml(tree), nl=False)
        return
    from dapo_megatron.launch import launch

    raise typer.Exit(launch(tree, plain, Console(), Console(stderr=True)))


@app.command("config")
def show_config(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check a configuration and print it resolved (the same as `run --dry-run`)."""
    typer.echo(to_yaml(_checked(config, overrides or [])), nl=False)


@app.command()
def rollout(
    config: ConfigPath,
    overrides: Overrides = None,
    prepared: Annotated[
        bool, typer.Option("--prepared", hidden=True, help="`dapo run` has checked all and made the folder.")
    ] = False,
) -> None:
    """Run the rollout service alone; `dapo train CONFIG` in another terminal trains with it."""
    from dapo_megatron.launch import child_environment
    from dapo_megatron.run_folder import RunLock, prepare_run_folder, run_folder

    if prepared:
        tree = load_config(config, overrides or [])
        _serve(tree, run_folder(tree))
        return
    tree = _checked(config, overrides or [])
    os.environ.update(child_environment(tree))
    with RunLock(tree):
        folder, moved = prepare_run_folder(tree, always_new=False)
        if moved is not None:
            typer.echo(f"an earlier run of this name was kept as {moved.name}")
        typer.echo(f"rollout service for {folder}; start the trainer with: dapo train {config}")
        _serve(tree, folder)


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    plain: Plain = False,
) -> None:
    """Train with the service of `dapo rollout CONFIG`; starts torchrun unless it is inside one."""
    if "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ:
        from dapo_megatron import train as entry

        entry.main(str(config), list(overrides or []))
        return
    tree = _checked(config, overrides or [])
    from dapo_megatron.launch import launch_trainer

    raise typer.Exit(launch_trainer(tree, config, overrides or [], plain, Console(), Console(stderr=True)))


@app.command()
def doctor() -> None:
    """Print versions, devices and back ends, and what a run would use."""
    from dapo_megatron.doctor import diagnose

    raise typer.Exit(diagnose(Console()))


@app.command()
def reward(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help='Lines {"gold", "response", "finish_reason"?}.')],
    rule: Annotated[
        str, typer.Option(help="math_verify, dapo_exact, package.module:function, or http://...")
    ] = "math_verify",
    extraction: Annotated[str, typer.Option(help="strict or lenient")] = "lenient",
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    timeout_s: Annotated[float, typer.Option(help="Deadline for one call of the rule.")] = 10.0,
    out: Annotated[Path | None, typer.Option(help="Where the verdicts go; standard output if not given.")] = None,
) -> None:
    """Score recorded responses with a reward rule of training; exit code 1 if a line has no verdict."""
    from dapo_megatron.reward_command import score

    raise typer.Exit(score(file, out, rule=rule, extraction=extraction, workers=workers, timeout_s=timeout_s))


def _checked(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Load and check; remarks go to standard error."""
    from dapo_megatron.config.validate import check_launch

    tree = load_config(path, overrides)
    for remark in check_launch(tree, str(path)):
        typer.echo(f"note: {remark}", err=True)
    return tree


def _serve(tree: RunConfig, folder: Path) -> None:
    from rollout_service.run import run_service

    run_service(service_settings(tree, folder))


def main() -> None:
    """Entry point of the console command."""
    # Before anything imports a numerical library.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        app()
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
