"""Reading a kernel's SASS: whether the tensor cores' operands stay in their registers as long as these are read.

A matrix product of a warpgroup (HGMMA) whose left operand is in registers reads them while the warps go on. What writes
one of them before the product has been waited for (WARPGROUP.DEPBAR) may be multiplied in its place. The compiler keeps
them apart between a product and its wait. It cannot where the program itself has a new value there: where the wait is
in the next turn of a loop, behind what makes the operand of that turn.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Final

Instruction = tuple[int, str]
"""Address, text."""

_WITHOUT_REGISTER: Final = (
    "ST", "BAR", "BRA", "SYNCS", "RED", "WARP", "EXIT", "MEMBAR", "U", "DEPBAR", "NANOSLEEP", "ACQ", "PREEXIT",
    "CALL", "RET", "BSSY", "BSYNC", "ISETP", "FSETP", "DSETP", "HSETP2", "PLOP3",
)  # fmt: skip
_PREDICATE: Final = r"^@!?U?P\w+\s+"
_PRODUCT: Final = re.compile(r"[HQI]GMMA\.\S+ R\d+, R(\d+), gdesc")
_A_REGISTERS: Final = 4
_MOST_GROUPS: Final = 9
"""Committed behind a product: more are not told apart."""


def disassembled(cubin: bytes) -> list[Instruction]:
    """By the disassembler in Triton's package."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [
        (int(address, 16), told.strip())
        for address, told in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)
    ]


def overwritten_operands(code: list[Instruction]) -> list[str]:
    """Products with a left operand in registers, and what may write one of these before the product is through."""
    after = _successors(code)
    found = []
    for place, (address, text) in enumerate(code):
        product = _PRODUCT.search(text)
        if product is None:
            continue
        operand = set(range(int(product[1]), int(product[1]) + _A_REGISTERS))
        writer = _first_writer(code, after, place, operand)
        if writer is not None:
            found.append(f"{address:#x} {text} is in flight at {code[writer][0]:#x} {code[writer][1]}")
    return found


def _first_writer(
    code: list[Instruction], after: list[list[int]], product: int, operand: set[int]
) -> int | None:
    """On some way from the product on which it is not waited for."""
    committed = int("gsb0" in code[product][1])
    ways, seen = [(place, committed) for place in after[product]], set[tuple[int, int]]()
    while ways:
        place, groups = ways.pop()
        if (place, groups) in seen:
            continue
        seen.add((place, groups))
        text = code[place][1]
        wait = re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", text)
        if wait is not None and groups > int(wait[1], 16):
            continue
        if _written(text) & operand:
            return place
        if "GMMA" in text and "gsb0" in text:
            groups = min(groups + 1, _MOST_GROUPS)
        ways += [(following, groups) for following in after[place]]
    return None


def _successors(code: list[Instruction]) -> list[list[int]]:
    """Where each instruction may be followed from."""
    places = {address: place for place, (address, _) in enumerate(code)}
    found: list[list[int]] = []
    for place, (_, text) in enumerate(code):
        branch = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        following = [place + 1] if place + 1 < len(code) else []
        if branch is not None:
            always = not text.startswith("@") and re.search(r"BRA\s+!?U?P", text) is None
            following = [places[int(branch[1], 16)], *([] if always else following)]
        elif re.match(r"(EXIT|RET)\b", text):
            following = []
        found.append(following)
    return found


def _written(text: str) -> set[int]:
    """Registers that an instruction writes, but for the sums of matrix products."""
    told = re.match(r"([A-Z][A-Z0-9_.x]*)\s+(.*)", re.sub(_PREDICATE, "", text))
    if told is None or told[1].startswith(_WITHOUT_REGISTER) or "GMMA" in told[1]:
        return set()
    name, operands = told.groups()
    results = [one.strip() for one in operands.split(",") if not re.fullmatch(r"\s*!?U?PT?\d*\s*", one)]
    register = re.match(r"R(\d+)", results[0]) if results else None
    if register is None:
        return set()
    first, parts = int(register[1]), name.split(".")
    if "128" in parts or name.startswith(("HMMA", "QMMA")):
        count = 4
    elif name.startswith("LDSM"):
        count = int(parts[-1])
    else:
        count = 2 if "64" in parts or "WIDE" in parts else 1
    return set(range(first, first + count))
