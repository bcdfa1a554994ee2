"""Weights folders that are replaced while the run goes on: a starting engine holds the one that it loads.

A server takes half a minute or more from its command line to its last weight, in which the trainer may have published many
versions. A file in the folder says that somebody still reads it; whoever cleans up leaves such a folder for later. Works on
any file system that both see.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HELD = ".in-use-"


@contextmanager
def held(folder: Path, reader: str) -> Iterator[bool]:
    """Keep `folder` from `remove_unless_held` inside the block; yields whether it is there.

    Args:
        reader: one name for each who may hold the folder at the same time.
    """
    mark = folder / f"{_HELD}{reader}"
    try:
        mark.touch()
    except OSError:  # gone, or not ours to write to: then nobody of this run removes it
        yield folder.is_dir()
        return
    try:
        yield True
    finally:
        mark.unlink(missing_ok=True)


def remove_unless_held(folder: Path) -> bool:
    """Remove `folder` if nobody holds it; returns whether it is gone.

    Raises:
        OSError: it could not be removed.
    """
    # Under another name nobody can begin to hold it, so the look decides.
    aside = folder.with_name(f".{folder.name}.removed")
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return True
    if any(aside.glob(f"{_HELD}*")):
        aside.rename(folder)
        return False
    shutil.rmtree(aside)
    return True
