#!/usr/bin/env bash
# Makes the CPU environment (.venv) with everything pinned. A second call with nothing to do takes a moment.
#
#   PYTHON           interpreter to make it with (default: python3), 3.11 or newer
#   VENV             where it goes (default: .venv in the repository)
#   TORCH_INDEX_URL  package index to take torch from, for example PyTorch's own index of CPU builds
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"
TORCH="torch==2.13.0"
STAMP="$VENV/.dapo-setup"

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

# What the environment depends on. The interpreter counts only when the environment is made.
wanted="$(cat requirements/cpu.lock requirements/cpu-no-deps.txt pyproject.toml scripts/setup_env.sh | sha256sum | cut -d' ' -f1)"
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ] && [ -x "$VENV/bin/dapo" ]; then
    exit 0
fi

started=$SECONDS
if [ ! -x "$VENV/bin/python" ]; then
    command -v "$PYTHON" >/dev/null 2>&1 || fail "$PYTHON not found; install Python 3.11 or newer, or set PYTHON=/path/to/python3.11"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "$PYTHON is $("$PYTHON" --version 2>&1), but Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"
    say "making $VENV with $("$PYTHON" --version 2>&1)"
    "$PYTHON" -m venv "$VENV" || fail "could not make $VENV; on Debian and Ubuntu: apt-get install python3-venv"
fi
rm -f "$STAMP"
"$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$VENV holds $("$VENV/bin/python" --version), but Python 3.11 or newer is needed; remove it and call again"

pip() { "$VENV/bin/python" -m pip -qq --disable-pip-version-check "$@"; }
# pip's remarks that SGLang's CUDA dependencies are absent are expected and would only worry the reader.
pip_no_deps() { pip install --no-deps "$@" 2> >(grep -v -e 'dependency resolver' -e ' requires .* not installed' -e ' requires .* but you have ' >&2 || true); }

say "1/4 torch (about 1 minute for a CPU build; set TORCH_INDEX_URL to an index of CPU builds if a CUDA build is downloaded)"
pip install "$TORCH" -c requirements/cpu.lock ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
say "2/4 SGLang and what its own pins would replace by CUDA builds (about 20 s)"
pip_no_deps -r requirements/cpu-no-deps.txt
say "3/4 all other packages, pinned (about 1 minute)"
pip_no_deps -r requirements/cpu.lock
say "4/4 this project (a few seconds)"
pip_no_deps -e .

printf '%s\n' "$wanted" >"$STAMP"
say "done in $((SECONDS - started)) s: $VENV"
