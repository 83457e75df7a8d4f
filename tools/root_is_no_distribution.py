"""Build backend of the workspace root: refuses, and says what to install instead."""

from typing import NoReturn


def _refuse(*_args: object, **_kwargs: object) -> NoReturn:
    raise SystemExit(
        "The root of oneloop is a workspace, not a distribution. Run `make install`, or install the parts:\n"
        "    pip install ./rust_core ./kernels ./py_engine"
    )


build_wheel = build_sdist = build_editable = get_requires_for_build_wheel = (
    get_requires_for_build_editable
) = _refuse
