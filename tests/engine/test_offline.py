"""LLM and EngineThread: blocking calls on top of the engine, in order, inside and outside of event loops."""

import subprocess
import sys
import threading

import pytest

from oneloop import LLM, SamplingParams
from oneloop.config import EngineConfig
from oneloop.engine.async_engine import AsyncEngine
from oneloop.errors import ConfigError, EngineDeadError, RequestError
from oneloop.tokenize.templates import ChatTemplate

GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture
def llm(kit, monkeypatch):
    """An LLM over the fake executor (reached through the same door as the real one)."""
    executor = kit.FakeExecutor()
    monkeypatch.setattr("oneloop.engine.async_engine.create_executor", lambda config, start_times: executor)
    monkeypatch.setattr("oneloop.engine.assembly.load_tokenizer", lambda *_, **__: kit.ByteTokenizer())
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_num_queued_reqs": 3}
    with LLM("fake", use_tqdm=False, **sizes) as model:
        model.executor = executor
        yield model


def test_results_in_order(kit, llm):
    prompts = [f"prompt {'x' * (number % 5)}{number}" for number in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=1 + number % 13) for number in range(40)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].text for output in outputs] == [
        kit.greedy_text(prompt, 1 + number % 13) for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    "prompts", ["one", {"prompt": "one"}, list(b"one"), ["one"], [list(b"one")], [{"prompt": "one"}]]
)
def test_kinds_of_prompts(kit, llm, prompts):
    (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert output.outputs[0].text == kit.greedy_text("one", 10)


def test_chat(kit, llm):
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.outputs[0].text == kit.greedy_text("user: hi\nassistant: ", 10)
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2


def test_one_bad_prompt_ends_the_call_and_nothing_leaks(kit, llm):
    with pytest.raises(RequestError, match="empty"):
        llm.generate(
            [*["fine"] * 20, "", "fine"], SamplingParams(temperature=0, max_tokens=100), use_tqdm=False
        )
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate("x", [GREEDY, GREEDY])
    assert llm.generate([], use_tqdm=False) == []
    # All the room is free again: more prompts than fit go through.
    assert len(llm.generate(["again"] * 30, GREEDY, use_tqdm=False)) == 30
    assert llm._room.num_inside == 0


def test_the_prefix_cache_can_be_forgotten(kit, llm):
    def cached():
        return llm.generate("a longer prompt", GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert cached() == 0
    assert cached() == 12
    assert llm.reset_prefix_cache()
    assert cached() == 0


def test_an_llm_over_an_engine_made_by_hand(kit):
    config = EngineConfig.from_flat({"model": "fake", "max_num_seqs": 4, "max_num_batched_tokens": 32})
    executor = kit.FakeExecutor()
    with LLM.over(AsyncEngine(config, executor=executor, tokenizer=kit.ByteTokenizer())) as model:
        (output,) = model.generate("by hand", GREEDY, use_tqdm=False)
        assert output.outputs[0].text == kit.greedy_text("by hand", 10)
    assert executor.is_shut_down


@pytest.mark.parametrize("n", [1, 3, 4])
def test_more_sequences_than_the_queue_takes_wait_outside(kit, llm, n):
    """The bound of the queue is for clients that can be told to come again, and it counts sequences."""
    scheduler = llm._thread.engine.config.scheduler
    assert scheduler.max_num_queued_reqs == 3
    params = SamplingParams(n=n, temperature=0, max_tokens=5)
    outputs = llm.generate(["wait"] * 25, params, use_tqdm=False)
    assert [len(output.outputs) for output in outputs] == [n] * 25
    assert llm._thread.engine.metrics.rejected["overloaded"] == 0


def test_from_several_threads(kit, llm):
    found = {}

    def run(name):
        found[name] = llm.generate([name] * 5, GREEDY, use_tqdm=False)

    threads = [threading.Thread(target=run, args=(f"thread {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {name: {o.outputs[0].text for o in outputs} for name, outputs in found.items()} == {
        f"thread {number}": {kit.greedy_text(f"thread {number}", 10)} for number in range(4)
    }


def test_an_interrupt_aborts_what_runs(kit, llm, monkeypatch):
    class Interrupted:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            raise KeyboardInterrupt

        def __exit__(self, *_):
            pass

    with monkeypatch.context() as patch:
        patch.setattr("oneloop.engine.offline.tqdm", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["long"] * 3, SamplingParams(temperature=0, max_tokens=400))
    assert llm.generate("next", GREEDY, use_tqdm=False)[0].outputs[0].text == kit.greedy_text("next", 10)
    assert llm._thread.engine.metrics.request_success["abort"] <= 3


def test_streaming_and_leaving_early(kit, llm):
    thread = llm._thread
    outputs = thread.iterate(
        lambda: thread.engine.generate("stream", SamplingParams(temperature=0, max_tokens=300))
    )
    assert next(outputs).outputs[0].text
    outputs.close()
    assert llm.generate("after", GREEDY, use_tqdm=False)[0].finished
    assert thread.engine.metrics.request_success["abort"] == 1


def test_a_closed_llm_says_so(llm):
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("x", GREEDY, use_tqdm=False)


def test_what_it_tells_of_the_model(kit, llm):
    assert llm.get_tokenizer().encode("ab") == [97, 98]
    assert llm.model_info.vocab_size == kit.VOCAB_SIZE
    usual = llm.get_default_sampling_params()
    assert (usual.temperature, usual.top_p, usual.top_k, usual.max_tokens) == (1.0, 1.0, 0, 16)
    assert llm.generate("a", usual, use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_num_sequences", "max_num_seqs"),
        ("kv_cache_memory", "kv_cache_memory_bytes"),
        ("gpu_mem_utilization", "gpu_memory_utilization"),
    ],
)
def test_unknown_settings_are_named_with_what_may_be_meant(name, meant):
    with pytest.raises(ConfigError, match=f"{name}: no such setting; did you mean {meant}"):
        LLM("fake", **{name: 3})
    with pytest.raises(ConfigError, match="xyz: no such setting; `oneloop serve --help` lists them"):
        LLM("fake", xyz=3)


def test_bars_are_drawn_as_the_llm_was_made(kit, llm, capfd):
    llm.generate("quiet", GREEDY)
    llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert capfd.readouterr().err == ""
    llm.generate("loud", GREEDY, use_tqdm=True)
    assert "prompts" in capfd.readouterr().err


def test_no_parameters_are_a_short_answer(kit, llm):
    (output,) = llm.generate("a")
    assert len(output.outputs[0].token_ids) == 16


def test_a_role_that_no_template_knows_is_refused(kit, llm, monkeypatch):
    template = ChatTemplate("{{ messages[0].content }}", file="t")
    monkeypatch.setattr(type(llm.get_tokenizer()), "chat_template", template)
    with pytest.raises(RequestError, match="role 'x'; it is one of system"):
        llm.chat([{"role": "x", "content": "hi"}], GREEDY)


SCRIPT = """
import asyncio, sys
sys.path.insert(0, {folder!r})
import conftest, oneloop.engine.async_engine as engine, oneloop.engine.assembly as assembly
from oneloop import LLM, SamplingParams
from oneloop.config import EngineConfig
from oneloop.engine.async_engine import AsyncEngine
engine.create_executor = lambda config, start_times: conftest.FakeExecutor(delay_s=0.01)
assembly.load_tokenizer = lambda *_, **__: conftest.ByteTokenizer()

def run():
    llm = LLM("fake", use_tqdm=False)
    print(llm.generate("exit", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)[0].outputs[0].text)
    return llm

async def run_in_loop():
    return run()

llm = {run}
"""


@pytest.mark.parametrize("run", ["run()", "asyncio.run(run_in_loop())"], ids=["script", "notebook"])
def test_the_process_ends_by_itself_without_close(kit, request, run):
    """Also from inside a running event loop, which the call blocks (as in a notebook): the engine has its own."""
    script = SCRIPT.replace("{folder!r}", repr(str(request.path.parent))).replace("{run}", run)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, kit.greedy_text("exit", 3), "")


def test_the_null_executor_serves_no_model_unless_one_is_named():
    with LLM(executor="null", use_tqdm=False) as llm:
        assert llm.get_tokenizer().encode("ab") == [97, 98]
        (output,) = llm.generate(["a"], SamplingParams(max_tokens=4, n=2))
    assert [len(choice.token_ids) for choice in output.outputs] == [4, 4]
