"""Metrics and progress: the registry of names, the sinks, the live view and the closing table."""
