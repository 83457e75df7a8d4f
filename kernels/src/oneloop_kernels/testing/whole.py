"""Compiling what was recorded (`recorded`) for sm_90 without a GPU, and what of the kernels no compilation looked at.

Triton's interpreter takes what its compiler does not: a name that is one shape in a branch and another behind it, a
loop that changes a type. The compiler's front end finds such faults, in the statements that it walks through. So every
recorded launch goes through the front end; some of each kernel, which between them have every constant, type and
option that was recorded, are compiled to the end, and looked at: see `sass`.

`compile_recorded` runs this module as a program: see `main`.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from oneloop_kernels.testing.recorded import name_of
from oneloop_kernels.testing.sass import disassembled, overwritten_operands

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Place = tuple[str, str, int, int]
"""Module and name of a function; line and column in it."""
_INTERPRETED: Final = "INTERPRETED"
"""In names of constants that say that the interpreter runs a kernel: what depends on them is never compiled."""
_OPTIONS: Final = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")
"""Those that launches give."""
_OPERAND_IN_REGISTERS: Final = re.compile(r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*\{")
_TOLD: Final = 1500
"""Characters of an error's text: its end says what is wrong."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """failures: a text per launch that does not compile. unseen: statements, and functions, that no launch has.

    num_whole: launches that were compiled to the end.
    """

    failures: list[str]
    unseen: list[str]
    num_whole: int


def compile_recorded(jobs: Sequence[str]) -> Outcome:
    """jobs: of `compiling.jobs`. In fresh processes without the interpreter, as many as there are CPUs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=json.dumps(jobs), env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the kernels could not be compiled:\n{done.stderr[-4000:]}")
    return Outcome(**json.loads(done.stdout))


def representatives(jobs: Iterable[str]) -> list[str]:
    """Some of the jobs of each kernel: between them they have every value of a constant, type of an argument and
    option that is in any of them."""
    by_kernel: dict[str, list[tuple[str, set[str]]]] = {}
    for job in jobs:
        content = json.loads(job)
        by_kernel.setdefault(json.dumps(content["kernel"]), []).append((job, _facts(content)))
    chosen = []
    for entries in by_kernel.values():
        missing = set().union(*(facts for _, facts in entries))
        while missing:
            job, facts = max(entries, key=lambda entry: len(entry[1] & missing))
            chosen.append(job)
            missing -= facts
    return chosen


def _facts(content: dict[str, Any]) -> set[str]:
    facts = {json.dumps(("type", *entry)) for entry in content["signature"]}
    facts |= {json.dumps(("constant", *entry)) for entry in content["constants"]}
    return facts | {json.dumps(("option", *entry)) for entry in content["options"] if entry[0] in _OPTIONS}


@contextmanager
def _places_seen() -> Iterator[set[Place]]:
    """Within, the places in functions of kernels that Triton's front end walks through."""
    from triton.compiler.code_generator import CodeGenerator

    visit, seen = CodeGenerator.visit, set[Place]()

    def remember(self: Any, node: Any) -> Any:
        if hasattr(node, "lineno"):  # some statements are Triton's own
            function = self.jit_fn.fn
            seen.add((function.__module__, function.__name__, node.lineno, node.col_offset))
        return visit(self, node)

    CodeGenerator.visit = remember
    try:
        yield seen
    finally:
        CodeGenerator.visit = visit


def _front_end(job: str) -> None:
    """What `triton.compile` does first, and only where its cache has nothing."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    from oneloop_kernels.compiling.jobs import decode

    source, target, given = decode(job)
    backend = make_backend(target)
    options = backend.parse_options(given)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    source.make_ir(target, options, functions, modules, context)


def _back_end(job: str) -> None:
    """All of it; nothing where the cache has it. RuntimeError where a product's operand is overwritten."""
    import triton

    from oneloop_kernels.compiling.jobs import decode

    source, target, options = decode(job)
    compiled = triton.compile(source, target=target, options=options)
    if _OPERAND_IN_REGISTERS.search(compiled.asm["ptx"]):
        overwritten = overwritten_operands(disassembled(compiled.asm["cubin"]))
        if overwritten:
            raise RuntimeError("\n".join(overwritten))


def _compile(entry: tuple[str, bool]) -> tuple[str | None, set[Place]]:
    """entry: a job, and whether to compile it to the end. → what is wrong with it; the places that were looked at."""
    job, whole = entry
    with _places_seen() as seen:
        try:
            if whole:
                _back_end(job)
            if not seen:
                _front_end(job)
        except Exception as error:
            text = f"{error}"[-_TOLD:]
            return f"{name_of(job)}: {type(error).__name__}: {text}\nof {json.loads(job)['constants']}", seen
    return None, seen


def unseen(seen: set[Place]) -> list[str]:
    """Statements and alternatives of the package's kernels that are not among the places."""
    from triton.runtime.jit import JITFunction

    import oneloop_kernels

    found = []
    for module in pkgutil.walk_packages(oneloop_kernels.__path__, f"{oneloop_kernels.__name__}."):
        for name, function in vars(import_module(module.name)).items():
            if isinstance(function, JITFunction) and function.fn.__module__ == module.name:
                found += _unseen_in(function.parse(), (module.name, name), seen)
    return found


def _unseen_in(tree: ast.Module, function: tuple[str, str], seen: set[Place]) -> list[str]:
    """tree: of the function alone."""
    where = ".".join(function)
    if all(place[:2] != function for place in seen):
        return [f"{where}: no launch of it is compiled"]
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    return [
        f"{where}, line {node.lineno} of it: {ast.unparse(node).splitlines()[0]}"
        for statement in definition.body
        for node in _compiled_nodes(statement)
        if (*function, node.lineno, node.col_offset) not in seen
    ]


def _compiled_nodes(node: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    """Statements in it, and the alternatives of its conditional expressions, but for what only the interpreter runs."""
    if isinstance(node, ast.stmt):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        yield node
    for name, value in ast.iter_fields(node):
        for_interpreter = isinstance(node, ast.If | ast.IfExp) and _INTERPRETED in ast.unparse(node.test)
        if for_interpreter and name == "body":
            continue
        if isinstance(node, ast.IfExp) and name in ("body", "orelse"):
            yield value
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _compiled_nodes(child)


def main() -> None:
    """A JSON list of jobs on standard input, an `Outcome` on standard output."""
    jobs = json.load(sys.stdin)
    whole = representatives(jobs)
    others = set(jobs).difference(whole)
    entries = [(job, True) for job in whole] + [(job, False) for job in sorted(others)]
    seen: set[Place] = set()
    failures = []
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as processes:
        for failure, places in processes.imap_unordered(_compile, entries):
            seen |= places
            if failure is not None:
                failures.append(failure)
    json.dump(asdict(Outcome(sorted(failures), unseen(seen), len(whole))), sys.stdout)


if __name__ == "__main__":
    main()
