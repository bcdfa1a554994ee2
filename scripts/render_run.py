"""Draw the terminal view and the closing table of a finished run as an SVG: `render_run.py runs/quickstart out.svg`."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from dapo_megatron.config.load import load_config
from dapo_megatron.observability.live import PlainView
from dapo_megatron.observability.summary import read_summary, summary_table


def main(run_dir: Path, out: Path) -> None:
    config = load_config(run_dir / "resolved_config.yaml")
    summary = read_summary(run_dir)
    if summary is None:
        sys.exit(f"{run_dir} has no summary.json: the run did not finish")
    console = Console(record=True, width=170, file=io.StringIO(), force_terminal=True)
    lines = Console(record=True, width=170, file=io.StringIO())
    PlainView(run_dir, config.trainer.total_steps, lines).update()
    text = lines.export_text().splitlines()
    steps = [index for index, line in enumerate(text) if line.startswith("step")]
    console.print(f"$ dapo run configs/{config.run.name}.yaml --plain", style="bold")
    root = f"{run_dir.resolve().parent.parent}/"
    for line in [*text[: steps[3]], "...", *text[steps[-3] :]]:
        console.print(line.replace(root, ""), markup=False, highlight=False, overflow="ellipsis", no_wrap=True)
    # Folders of the machine that the run happened on say nothing to a reader.
    shown = summary | {"checkpoint_hf": f"runs/{run_dir.name}/checkpoint_hf"}
    console.print(summary_table(Path("runs", run_dir.name), shown))
    svg = console.export_svg(title=f"dapo run {run_dir.name}")
    # The fonts would be fetched from the internet; a monospaced one of the reader's does as well.
    out.write_text(re.sub(r"@font-face\s*{[^}]*}", "", svg), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
