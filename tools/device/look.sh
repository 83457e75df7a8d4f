#!/usr/bin/env bash
# The first call on a device machine: is everything there, and how soon does a finished step wake the loop?
set -uo pipefail
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem --format=csv,noheader
uname -r
nproc
python3 - <<'P'
import importlib, importlib.metadata as metadata, sys
print(sys.version)
for name in ("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "aiohttp",
             "orjson", "gguf", "jinja2", "prometheus_client", "tqdm", "psutil", "pytest", "pytest_asyncio", "blockbuster",
             "hypothesis", "uvloop", "oneloop_core", "oneloop_kernels", "oneloop", "oneloop_bench"):
    try:
        module = importlib.import_module(name)
        try:
            version = metadata.version(name.replace("_", "-"))
        except metadata.PackageNotFoundError:
            version = getattr(module, "__version__", "")
        print(f"{name:18} {version:12} {module.__file__}")
    except Exception as error:
        print(f"{name:18} FAILS: {error!r}")
P
python3 -m oneloop_bench.completion
