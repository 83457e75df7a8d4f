#!/usr/bin/env bash
# Collects, in ignored folders, what a run on the device machine needs beside the tracked files:
#   .whl/                     the core as an abi3 wheel, and the packages that machine's image lacks
#   .work/anchors.tar.xz      the workloads' drivers, model configurations and tokenizers
#   .work/smollm2.part{1,2}   the embedded model in two halves, one for each of two calls
# usage: tools/device/prepare.sh [core|wheels|anchors|model …]     (default: all four)
# ANCHORS names the folder with the drivers (default: ../shared/anchors beside the checkout).
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
python=${PYTHON:-$root/.venv/bin/python}
anchors=${ANCHORS:-$root/../shared/anchors}
# Versions are those of requirements.lock; what else they need is in the image (tools/device/README.md).
packages=(
    orjson gguf jinja2 pytest pytest-asyncio pytest-timeout blockbuster pluggy iniconfig
    aiohttp aiohappyeyeballs aiosignal frozenlist multidict propcache yarl # newer ones than the image holds
)
built_here=(forbiddenfruit) # has no wheel; pure Python

core() { # the extension module, built for every Python from 3.11 on
    rm -f .whl/oneloop_core-*.whl
    (cd rust_core && "${python%/*}/maturin" build --release --locked --interpreter "$python" --out "$root/.whl")
}

locked() { # locked NAME: its requirement with the version of requirements.lock
    local version
    version=$(sed -n "s/^$1==\([^ ;\\]*\).*/\1/p" requirements.lock)
    [ -n "$version" ] || { echo "$1 is not in requirements.lock" >&2; exit 1; }
    echo "$1==$version"
}

wheels() {
    local platforms=() names=() name tag
    for tag in 2_{39,36,35,34,31,28,27,24,17,12,5}; do platforms+=(--platform "manylinux_${tag}_x86_64"); done
    platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
    for name in "${packages[@]}" "${built_here[@]}"; do rm -f ".whl/${name//-/_}-"*.whl; done
    for name in "${packages[@]}"; do names+=("$(locked "$name")"); done
    "$python" -m pip download --disable-pip-version-check -q --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp "${platforms[@]}" -d .whl "${names[@]}"
    for name in "${built_here[@]}"; do
        "$python" -m pip wheel --disable-pip-version-check -q --no-deps -w .whl "$(locked "$name")"
    done
}

pack_anchors() {
    tar -C "$anchors" --exclude=./peer -cJf .work/anchors.tar.xz .
}

model() {
    local file
    file=$("$python" -m oneloop.loader.embedded | tail -1)
    split -n 2 --numeric-suffixes=1 -a 1 "$file" .work/smollm2.part
}

mkdir -p .whl .work
[ $# -gt 0 ] || set -- core wheels anchors model
for what in "$@"; do
    case $what in
        core | wheels | model) "$what" ;;
        anchors) pack_anchors ;;
        *) echo "unknown: $what (core, wheels, anchors or model)" >&2; exit 2 ;;
    esac
done
du -cbh .whl/*.whl .work/anchors.tar.xz .work/smollm2.part? 2>/dev/null
