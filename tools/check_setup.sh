#!/usr/bin/env bash
# Is there what `make` needs? Asked before anything large is downloaded. First argument: the Python to use.
set -euo pipefail
python=${1:-python3}
missing=0

need() { # need <what is missing> <what to do>
    echo "missing: $1; $2" >&2
    missing=1
}

if ! command -v "$python" >/dev/null; then
    need "$python" "install Python 3.11 or later, or name one: make PYTHON=/path/to/python3"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    found=$("$python" --version 2>&1 || true)
    need "Python 3.11 or later ($python is ${found:-unusable})" "name another one: make PYTHON=/path/to/python3"
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    need "venv of $python" "install it (Debian and Ubuntu: the package python3-venv)"
fi
if ! command -v cargo >/dev/null || ! cargo --version >/dev/null 2>&1; then
    need "cargo" "install a current stable Rust with rustup, and open a new shell"
fi
if ! command -v cc >/dev/null; then
    need "cc" "install a C compiler (Debian and Ubuntu: the package build-essential)"
fi
exit "$missing"
