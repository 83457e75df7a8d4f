"""One compilation as a line of JSON: another process does it, and leaves it in Triton's cache under the same key.

Triton's key is made from the text of the constants, attributes and options, so that their types must come through
(tuples, data types). What cannot be written down is not sent: the process that needs it compiles it.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITCallable

if TYPE_CHECKING:
    from collections.abc import Mapping

_PACKAGE: Final = __name__.split(".", 1)[0]
_AS_THEY_ARE: Final = (bool, int, float, str, type(None))


def encode(source: Any, target: Any, options: Mapping[str, object]) -> str | None:
    """A line for `decode`; None for what it could not make again: a kernel of others, a constant of another type."""
    try:
        job = {
            "kernel": _plain(source.fn),
            "signature": [[name, _plain(kind)] for name, kind in source.signature.items()],
            "constants": [[list(path), _plain(value)] for path, value in source.constants.items()],
            "attributes": [[list(path), _plain(value)] for path, value in source.attrs.items()],
            "options": [[name, _plain(value)] for name, value in options.items()],
            "target": [target.backend, target.arch, target.warp_size],
        }
    except TypeError:
        return None
    return json.dumps(job)


def decode(line: str) -> tuple[ASTSource, GPUTarget, dict[str, Any]]:
    """Source, target and options for `triton.compile`."""
    job = json.loads(line)
    kernel = _value(job["kernel"])
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(
        kernel,
        {name: _value(kind) for name, kind in job["signature"]},
        {tuple(path): _value(value) for path, value in job["constants"]},
        {tuple(path): _value(value) for path, value in job["attributes"]},
    )
    return source, GPUTarget(*job["target"]), {name: _value(value) for name, value in job["options"]}


def _plain(value: Any) -> Any:
    """TypeError for what `_value` could not give back. A dict of one entry says what JSON has no type for."""
    if type(value) in _AS_THEY_ARE:
        return value
    if type(value) is list:
        return [_plain(entry) for entry in value]
    if type(value) is tuple:
        return {"tuple": [_plain(entry) for entry in value]}
    if type(value) is tl.dtype:
        return {"dtype": value.name}
    if type(value) is tl.constexpr:
        return {"constexpr": _plain(value.value)}
    if isinstance(value, JITCallable):
        module, name = value.fn.__module__, value.fn.__name__
        if module.startswith(f"{_PACKAGE}.") and vars(sys.modules[module]).get(name) is value:
            return {"kernel": [module, name]}
    raise TypeError(f"{value!r} has no form in JSON")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(entry) for entry in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    match kind:
        case "tuple":
            return tuple(_value(entry) for entry in content)
        case "dtype":
            return tl.dtype(content)
        case "constexpr":
            return tl.constexpr(_value(content))
        case "kernel":
            module, name = content
            if not module.startswith(f"{_PACKAGE}."):
                raise ValueError(f"{module} is no module of {_PACKAGE}")
            return vars(import_module(module))[name]
    raise ValueError(f"a job holds a value of unknown kind: {kind}")
