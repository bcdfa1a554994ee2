"""Start file of SGLang: the stock server and the engine's side of our weight transports (`weight_loader.py`).

Run it like `python -m sglang.launch_server`, with the same arguments. The hooks are registered at module level, because
SGLang's children are spawned and import this main script again. On a CPU `sglang_cpu_server.py` prepares the ground. The engine's Python may be one in which this package is not
installed, and the rest of what is installed beside it must not shadow the engine's own packages, so the package is
loaded from its folder, whatever the import path.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def load_package() -> None:
    """Make `rollout_service` importable: this folder, and nothing that lies beside it."""
    name, folder = "rollout_service", Path(__file__).resolve().parent
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def serve() -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


load_package()
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    import rollout_service.sglang_cpu_server  # noqa: F401  (before anything of SGLang)
from rollout_service import weight_loader  # noqa: E402

weight_loader.install()

if __name__ == "__main__":
    serve()
