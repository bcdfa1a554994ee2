"""The one error of this package."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint (config.json, weights, layout) cannot be used; the message names the file, the field or tensor, and the fix."""
