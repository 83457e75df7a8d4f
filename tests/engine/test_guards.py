"""The two loop guards of tests/conftest.py fail what they should, and nothing else."""

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent.parent / "conftest.py"

TESTS = {
    "blocks": """
        async def test_it(tmp_path):
            from oneloop.formats.generation import hf_generation_defaults
            (tmp_path / "generation_config.json").write_text("{}")
            try:
                hf_generation_defaults(tmp_path)  # reads a file
            except Exception:
                pass  # a guard that only raised would be silenced here
        """,
    "hogs": """
        import time
        async def test_it():
            end = time.thread_time() + 0.08
            while time.thread_time() < end:
                pass
        """,
    "hogs_in_a_background_loop": """
        import asyncio, threading, time
        def burn():
            end = time.thread_time() + 0.08
            while time.thread_time() < end:
                pass
        async def main():
            asyncio.get_running_loop().call_soon(burn)
            await asyncio.sleep(0.01)
        def test_it():
            thread = threading.Thread(target=asyncio.run, args=(main(),))
            thread.start()
            thread.join()
        """,
    "behaves": """
        import asyncio, time
        async def test_it(tmp_path):
            from oneloop.formats.generation import hf_generation_defaults
            (tmp_path / "generation_config.json").write_text("{}")
            await asyncio.to_thread(hf_generation_defaults, tmp_path)
            await asyncio.to_thread(time.sleep, 0.1)
        """,
}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocks", "blocking calls on the event loop: "),
        ("hogs", "the event loop was held: "),
        ("hogs_in_a_background_loop", "the event loop was held: "),
        ("behaves", None),
    ],
)
def test_guards_fail_what_holds_the_loop(pytester: pytest.Pytester, name: str, message: str | None) -> None:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(TESTS[name])
    result = pytester.runpytest_subprocess("-o", "asyncio_mode=auto", "-p", "no:cacheprovider")
    if message is None:
        result.assert_outcomes(passed=1)
    else:
        result.assert_outcomes(passed=1, errors=1)
        result.stdout.fnmatch_lines([f"*{message}*"])
