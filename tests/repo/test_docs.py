"""docs/architecture.md and README.md say what is true."""

from __future__ import annotations

import re
from pathlib import Path

import oneloop_core

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
README = (ROOT / "README.md").read_text()


def layout() -> oneloop_core.SlabLayout:
    config = oneloop_core.CoreConfig(num_blocks=64, vocab_size=100, max_model_len=256)
    return oneloop_core.Core(config).layout


def documented_fields() -> dict[str, str]:
    """Field name → dtype, from the table of the slab."""
    section = ARCHITECTURE.split("## The slab", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    fields: dict[str, str] = {}
    for row in rows:
        prefix = ""
        dtype = row[2].strip()
        for name, own in re.findall(r"`([a-z_]+)`(?: \(([if]\d\d)\))?", row[1]):
            if name.startswith("_"):
                name = prefix + name
            else:
                prefix = name.split("_", 1)[0]
            fields[name] = own or dtype
    return fields


def test_slab_table_is_the_layout() -> None:
    assert documented_fields() == {field.name: field.dtype for field in layout().fields}


def test_header_names_are_the_layout() -> None:
    row = next(line for line in ARCHITECTURE.splitlines() if line.startswith("| `header`"))
    names = row.split("by name: `", 1)[1].split("`", 1)[0].split(", ")
    assert set(names) == set(layout().header)


def test_every_folder_of_the_package_is_in_the_map() -> None:
    folders = {
        p.name for p in (ROOT / "py_engine/src/oneloop").iterdir() if p.is_dir() and p.name != "__pycache__"
    }
    table = ARCHITECTURE.split("## What is where", 1)[1].split("\n## ", 1)[0]
    assert not {name for name in folders if f"/{name}`" not in table}


def test_readme_names_real_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)) | {
        name for line in re.findall(r"^([a-z -]+):", makefile, re.MULTILINE) for name in line.split()
    }
    used = set(re.findall(r"make ([a-z-]+)", README))
    assert used
    assert used <= targets
