"""Hostile chat templates: no way out of the sandbox, a second at most, no memory to speak of (T5, T6)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest

from oneloop.errors import ModelError, RequestError
from oneloop.tokenize.templates import RENDER_TIME_LIMIT_S, ChatTemplate
from oneloop.tokenize.watchdog import TimeLimitError, run_limited

USER = [{"role": "user", "content": "Hi"}]
MAX_GROWTH_BYTES = 256 << 20

ESCAPES = (
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ joiner.__init__.__globals__['__builtins__'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ ['__class__'] | map('attr', 'x') | list }}{{ '' | attr('__cl' ~ 'ass__') | string }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__mro__}'.format_map({'0': ''}) }}",
    "{{ 'x'.format.__self__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__html__ = 1 %}{{ ns }}",
    "{{ (1).__class__.__base__ }}",
    "{{ dict.__subclasses__() }}",
    "{{ (messages | map('string')).gi_frame }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{% extends '/etc/passwd' %}",
)

DOUBLED = "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"

ENDLESS = (
    "{% for a in range(10**9) %}{% for b in range(10**9) %}{% for c in range(10**9) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% if (range(99999) | sum) == 1 %}{% endif %}{% endfor %}",
)

LARGE = (
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [0] * 10**9 }}",
    "{{ 2 ** (10 ** 10) }}",
    "{{ 2 ** 100000000 }}",
    "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    DOUBLED + "{{ ns.s }}",
    DOUBLED + "{{ ns.s | tojson }}",
    DOUBLED + "{{ ns.s | string }}",
    DOUBLED + "{{ '' ~ ns.s }}",
    "{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}"
    "{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.s == ns.t }}",
    "{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}"
    "{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.s is eq ns.t }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'.zfill(10**10) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 1000000).join(('b' * 1000000)) }}",
    "{{ range(99999) | join('b' * 1000000) }}",
    "{{ ('a\n' * 1000000) | indent(4000) }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{{ strftime_now('%1000000000d') }}",
    "{{ ('a' * 8000000) | list | length }}",
    "{% macro f() %}{% for i in range(9999) %}{{ 'a' * 100000 }}{% endfor %}{% endmacro %}{{ f() }}",
    "{{ lipsum(n=10000000) }}",
    "{{ 'a'.expandtabs(10**9) }}{{ '\t'.expandtabs(10**9) }}",
    "{{ 'ab'.translate({97: 'x' * 8000000, 98: 'x' * 8000000}) }}",
)


def render(source: str) -> str:
    """What the template prints; it may be refused when it is compiled or when it is rendered."""
    return ChatTemplate(source, file="t.jinja").render(USER)


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_out(source: str) -> None:
    """An error, or nothing: never a Python object."""
    try:
        printed = render(source)
    except (RequestError, ModelError):
        return
    assert not any(
        word in printed for word in ("class", "built", "object", "module", "root:", "Environment")
    ), printed


@pytest.mark.parametrize(
    "source",
    [
        "{{ '1e999' | float | int }}",  # folded to a constant, which Python reads as the name `inf`
        "{{ 1e999 * 0 }}",
        "{{ 1 / 0 }}",
        "{{ [] | first | int(base=99) }}",
        "{{ [1] | sum(attribute='x') }}",
        "{{ {} | items | list + 1 }}",
        "{{ messages | map('nothing') | list }}",
        "{{ messages | sort(attribute='content.x.y') }}",
        "{% for x in 5 %}{% endfor %}",
        "{% set a, b = [1] %}",
        "{{ '%d' % 'x' }}",
        "{{ '{' | string % 1 }}{{ '{'.format() }}",
        "{% call nothing() %}{% endcall %}",
    ],
)
def test_whatever_it_raises_is_the_requests_fault(source: str) -> None:
    with pytest.raises((RequestError, ModelError)):
        render(source)


@pytest.mark.parametrize("source", [*ENDLESS, *LARGE])
def test_bounded_in_time_and_memory(source: str) -> None:
    process = psutil.Process()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = process.memory_info().rss
    begin = time.monotonic()
    with pytest.raises((RequestError, ModelError)) as caught:
        render(source)
    # compiling probes the template twice, so three renders
    assert time.monotonic() - begin < 3 * RENDER_TIME_LIMIT_S + 2
    peak = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    assert int(peak.split()[1]) * 1024 - before < MAX_GROWTH_BYTES
    assert len(str(caught.value)) < 400


def test_other_threads_run_meanwhile() -> None:
    template = ChatTemplate("{{ messages[0].content }}", file="t.jinja")
    endless = ChatTemplate(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", file="t"
    )
    outcome: list[str] = []

    def work() -> None:
        try:
            outcome.append(endless.render(USER))
        except RequestError as error:
            outcome.append(error.message)

    thread = threading.Thread(target=work)
    thread.start()
    lags = []
    while thread.is_alive():
        begin = time.monotonic()
        assert template.render(USER) == "Hi"
        lags.append(time.monotonic() - begin)
    assert outcome == ["the chat template ran longer than 1 s"]
    assert sorted(lags)[len(lags) // 2] < 0.05
    assert template.render(USER) == "Hi"


def test_the_limit_reaches_code_that_catches_exceptions() -> None:
    def stubborn() -> None:
        while True:
            try:
                while True:
                    pass
            except Exception:
                pass

    begin = time.monotonic()
    with pytest.raises(TimeLimitError):
        run_limited(stubborn, 0.1)
    assert time.monotonic() - begin < 2


def test_results_and_exceptions_come_back() -> None:
    assert run_limited(lambda: 3, 1.0) == 3
    with pytest.raises(ZeroDivisionError):
        run_limited(lambda: 1 // 0, 1.0)


def test_the_limit_and_the_end_may_race() -> None:
    """Whoever wins: the result or TimeLimitError, and nothing arrives afterwards."""
    outcomes = set()
    for i in range(300):

        def busy(duration: float = 0.003 * (i % 8)) -> str:
            end = time.monotonic() + duration
            while time.monotonic() < end:
                pass
            return "done"

        try:
            outcomes.add(run_limited(busy, 0.009))
        except TimeLimitError:
            outcomes.add("late")
    assert outcomes == {"done", "late"}


def test_threads_end() -> None:
    before = psutil.Process().num_threads()
    for _ in range(20):
        run_limited(lambda: None, 1.0)
        with pytest.raises(TimeLimitError):
            run_limited(lambda: [None for _ in iter(int, 1)], 0.01)
    deadline = time.monotonic() + 5
    while psutil.Process().num_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert psutil.Process().num_threads() <= before
