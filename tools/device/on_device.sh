#!/usr/bin/env bash
# On the device machine: installs what prepare.sh collected and came along, then runs a command.
# usage: tools/device/on_device.sh [command [arguments…]]
# The command finds oneloop, oneloop_kernels, oneloop_bench and oneloop_core importable, the drivers in
# $ONELOOP_ANCHORS, and the embedded model in its cache once both of its halves have come (in one call or in two).
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
base=${DEVICE_BASE:-/tmp/oneloop}
site=$base/site
mkdir -p "$base"

wheels=$(cat .whl/*.whl | sha256sum)
if [ "$(cat "$site/.wheels" 2>/dev/null)" != "$wheels" ]; then
    rm -rf "$site"
    python3 -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --target "$site" .whl/*.whl
    echo "$wheels" >"$site/.wheels"
fi
export PYTHONPATH=$site:$root/py_engine/src:$root/kernels/src:$root/bench/src
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

if [ -e .work/anchors.tar.xz ]; then
    mkdir -p "$base/anchors"
    tar -C "$base/anchors" --no-same-owner -xJf .work/anchors.tar.xz
fi
export ONELOOP_ANCHORS=$base/anchors

for half in .work/smollm2.part?; do
    [ ! -e "$half" ] || cp "$half" "$base/"
done
if [ -e "$base/smollm2.part1" ] && [ -e "$base/smollm2.part2" ]; then
    python3 - "$base" <<'P'
import hashlib, pathlib, sys
from oneloop.loader.cache import cache_folder
from oneloop.loader.embedded import FILE_NAME, FILE_SHA256

base = pathlib.Path(sys.argv[1])
data = b"".join((base / f"smollm2.part{number}").read_bytes() for number in (1, 2))
if hashlib.sha256(data).hexdigest() != FILE_SHA256:
    raise SystemExit("the two halves are not the embedded model: run tools/device/prepare.sh model again")
cache_folder().mkdir(parents=True, exist_ok=True)
(cache_folder() / FILE_NAME).write_bytes(data)
for number in (1, 2):
    (base / f"smollm2.part{number}").unlink()
P
fi

[ $# -eq 0 ] || exec "$@"
