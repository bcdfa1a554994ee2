"""The configuration: one typed tree from a YAML file and `a.b.c=value` overrides, checked before anything starts.

Nothing in this package imports torch, Ray, Megatron or SGLang, so that a mistake is reported within seconds.
"""

from __future__ import annotations

from dapo_megatron.config.errors import ConfigError
from dapo_megatron.config.load import load_config, service_settings, to_yaml
from dapo_megatron.config.sections import RunConfig

__all__ = ["ConfigError", "RunConfig", "load_config", "service_settings", "to_yaml"]
