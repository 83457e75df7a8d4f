"""docs/architecture.md and README.md say what is true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import oneloop_core

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
README_FILE = ROOT / "README.md"
README = README_FILE.read_text()


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


PAGES = [
    README_FILE,
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "bench/README.md",
    ROOT / "tools/device/README.md",
]


def links(page: Path) -> set[Path]:
    """Files that a page links to; addresses of other hosts are none."""
    found = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    return {(page.parent / target).resolve() for target in found if "://" not in target}


def test_every_page_can_be_reached_from_the_readme_and_no_link_is_broken() -> None:
    assert set(PAGES) <= links(README_FILE) | {README_FILE}
    assert not [(page.name, target) for page in PAGES for target in links(page) if not target.exists()]


def test_benches_that_pages_name_are_there() -> None:
    folder = ROOT / "bench/src/oneloop_bench"
    text = "\n".join(page.read_text() for page in PAGES)
    for name in set(re.findall(r"-m oneloop_bench\.([a-z0-9_.]+[a-z0-9])(?!\.[$<])\b", text)):
        path = folder / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name
    looped = re.search(r"for f in ([a-z_ ]+); do python3 -m oneloop_bench\.kernels\.\$f", text)
    assert looped is not None
    row = next(line for line in text.splitlines() if "tile configurations" in line)
    listed = set(re.findall(r"`([a-z0-9_]+)`", row.rsplit(":", 1)[1]))
    benches = {path.stem for path in folder.glob("kernels/*.py") if "KernelBench(" in path.read_text()}
    assert listed == benches - {"timing"} >= set(looped[1].split())


def test_the_readme_names_every_bench_of_the_makefile() -> None:
    targets = set(re.findall(r"^(bench-[a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets <= set(re.findall(r"bench-[a-z]+", README))


def test_the_readmes_requests_are_those_that_the_small_model_answers() -> None:
    """At its own temperature it makes up half of its answers: that is no first impression."""
    (body,) = re.findall(r"-d '(\{.*?\})'", README, re.DOTALL)
    request = json.loads(body)
    assert request["temperature"] == 0
    assert "capital of France" in request["messages"][0]["content"]


def test_columns_of_the_schedule_trace_are_the_documented_ones() -> None:
    source = (ROOT / "rust_core/crates/core/src/trace/columns.rs").read_text()
    columns = re.findall(r'^    \w+ = "(\w+)" counted by', source, re.MULTILINE)
    text = (ROOT / "docs/schedule-trace.md").read_text()
    listed = text.split("header counts: `", 1)[1].split("`", 1)[0]
    assert columns == re.split(r",\s+", listed)
    assert set(columns) <= {field.name for field in layout().fields}
