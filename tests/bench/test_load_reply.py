"""Reading streams: what is counted does not depend on how the bytes are cut, nor on which events are parsed."""

import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oneloop_bench.load.checks import find_problems
from oneloop_bench.load.record import Expected, Record, Usage, pack, unpack
from oneloop_bench.load.reply import StreamReply

GOLDEN = Path(__file__).parents[1] / "api/golden"


def read(pieces, *, is_chat=False, keeps_text=False, parses_all=False):
    """A reply that got these pieces, one per second."""
    ends = []
    times = array("d")
    reply = StreamReply(times, lambda: ends.append(True), is_chat=is_chat, keeps_text=keeps_text)
    if parses_all:
        reply._learn = lambda *_: None
    reply.on_head(200, {})
    for now, piece in enumerate(pieces):
        reply.on_body(piece, float(now))
    reply.on_end(float(len(pieces)), None)
    assert ends == [True]
    return reply, times


def event(data):
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def completion(text, reason=None, **more):
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, **more}
    return {"id": "c", "model": "m", "choices": [choice], "usage": None}


def usage(prompt, completion_tokens):
    total = prompt + completion_tokens
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion_tokens,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_what_is_noted_of_a_stream():
    events = [
        completion(" a"),
        completion(" b"),
        completion('"'),
        completion(""),
        completion(" c", "length"),
        usage(3, 5),
    ]
    reply, times = read([*map(event, events), event("[DONE]")])
    assert list(times) == [0, 1, 2, 3, 4], "an empty text without a reason is a token; usage is none"
    assert reply.seen.num_texts == 4
    assert reply.seen.usage == Usage(3, 5, 8, 2)
    assert find_problems(reply.seen, Expected(prompt_len=3, max_tokens=5)) == []
    assert find_problems(reply.seen, Expected(prompt_len=4, max_tokens=5)) == ["usage"]
    assert find_problems(reply.seen, Expected(prompt_len=3, max_tokens=6)) == ["usage"]
    assert find_problems(reply.seen, Expected(num_choices=2)) == ["choices"]
    reply.seen.choices[1] = reply.seen.choices.pop(0)
    assert find_problems(reply.seen, Expected()) == ["choices"], "one, but another than was asked for"


def test_counts_that_cannot_be():
    """Fewer tokens than events with text, or more than were asked for."""
    events = [completion(" a"), completion(" b"), completion(" c", "stop")]
    for told, problems in ((2, ["usage"]), (3, []), (4, []), (5, ["usage"])):
        reply, _ = read([*map(event, [*events, usage(1, told)]), event("[DONE]")])
        assert find_problems(reply.seen, Expected(max_tokens=4)) == problems


def test_an_echo_is_no_token():
    pieces = [
        event(completion("prompt")),
        event(completion(" a", "length")),
        event(usage(1, 1)),
        event("[DONE]"),
    ]
    reply, _ = read(pieces)
    assert find_problems(reply.seen, Expected(max_tokens=1, echoes=True)) == []
    assert find_problems(reply.seen, Expected(max_tokens=1)) == ["usage"]


def test_an_end_without_text_is_no_token():
    reply, times = read(
        [event(completion(" a")), event(completion("", "stop")), event(usage(1, 2)), event("[DONE]")]
    )
    assert list(times) == [0]
    assert find_problems(reply.seen, Expected(max_tokens=9)) == []
    assert find_problems(reply.seen, Expected(max_tokens=9, ignore_eos=True)) == ["usage"], (
        "it ended too soon"
    )


def test_events_that_come_together_are_as_many_times():
    _, times = read([event(completion(" a")) * 3, event(completion(" b"))])
    assert list(times) == [0, 0, 0, 1]


def test_ids_and_log_probabilities_are_counted():
    pieces = [event(completion(" a", token_ids=[1, 2])), event(completion(" b", "length", token_ids=[3]))]
    reply, _ = read([*pieces, event(usage(1, 3)), event("[DONE]")])
    assert reply.seen.num_ids == 3
    assert find_problems(reply.seen, Expected(max_tokens=3)) == []
    reply, _ = read([*pieces, event(usage(1, 4)), event("[DONE]")])
    assert find_problems(reply.seen, Expected(max_tokens=4)) == ["usage"]


@pytest.mark.parametrize(
    "name", ["completion.sse", "chat_usage_n2.sse", "chat_continuous.sse", "chat_logprobs.sse"]
)
@pytest.mark.parametrize("size", [1, 7, 64, 1000, 1 << 20])
def test_our_own_streams_cut_anywhere(name, size):
    data = (GOLDEN / name).read_bytes()
    is_chat = name.startswith("chat")
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    reply, times = read(pieces, is_chat=is_chat, keeps_text=True)
    whole, all_times = read([data], is_chat=is_chat, keeps_text=True, parses_all=True)
    assert (reply.seen, reply.text, len(times)) == (whole.seen, whole.text, len(all_times))
    num_choices = 2 if "n2" in name else 1
    problems = find_problems(reply.seen, Expected(num_choices=num_choices))
    # Not asked for usage there is none; the golden files' own counts are those of a double that merges tokens.
    assert set(problems) <= {"usage"}


@settings(deadline=None)
@given(
    st.lists(st.text('ab "\\\n\r\t/{}[]:,é語😀\u2028', max_size=8), min_size=1, max_size=12),
    st.data(),
    st.booleans(),
    st.sampled_from([",", ", "]),
)
def test_templates_change_nothing(texts, data, has_carriage_returns, separator):
    """Whatever the text: quotes, escapes, line ends, braces, text that looks like JSON."""
    stream = b""
    for place, text in enumerate(texts):
        found = completion(text, "length" if place == len(texts) - 1 else None)
        stream += event(json.dumps(found, ensure_ascii=place % 2 == 0, separators=(separator, ":")))
    stream += event(usage(1, len(texts))) + b": still here\n\n" + event("[DONE]")
    if has_carriage_returns:
        stream = stream.replace(b"\n", b"\r\n")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    reply, times = read(pieces, keeps_text=True)
    parsed, all_times = read([stream], keeps_text=True, parses_all=True)
    assert reply.text == parsed.text == "".join(texts)
    assert reply.seen == parsed.seen
    assert len(times) == len(all_times)
    assert find_problems(reply.seen, Expected(prompt_len=1, max_tokens=len(texts))) == []


def test_an_event_that_looks_like_the_others_but_is_not():
    """Two choices in one event: it begins and ends like the template."""
    first, both = completion(" a"), completion(" a")
    both["choices"] = [{**both["choices"][0], "finish_reason": "stop"}, {**both["choices"][0], "index": 1}]
    reply, _ = read([event(first), event(first), event(both)])
    assert sorted(reply.seen.choices) == [0, 1]
    assert reply.seen.choices[0].finish_reason == "stop"


def test_a_refusal_in_pieces():
    reply = StreamReply(array("d"), lambda: None, is_chat=False, keeps_text=False)
    reply.on_head(429, {})
    reply.on_body(b'{"error": ', 0.0)
    reply.on_body(b'"slow down"}', 0.0)
    reply.on_end(1.0, None)
    assert reply.error == 'status 429: {"error": "slow down"}'


def test_records_travel_as_they_are():
    records = [
        Record(
            3,
            1.5,
            sent=1.6,
            end=9.0,
            times=array("d", [2.0, 2.5]),
            status=200,
            problems=["usage"],
            text="naïve\n",
        ),
        Record(4, 2.5, error="cut"),
    ]
    assert unpack(pack(records)) == records


@pytest.mark.parametrize(
    "told",
    [
        {"prompt_tokens": "3", "completion_tokens": 1},
        {"prompt_tokens": 3, "completion_tokens": "1"},
        {"prompt_tokens": 3, "completion_tokens": -1},
        {"prompt_tokens": 3, "completion_tokens": 1.5},
        {"prompt_tokens": True, "completion_tokens": 1},
        {"prompt_tokens": 3, "completion_tokens": 2**63},
        {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 10**30},
        {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": "all"}},
        {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": [1]},
        {"completion_tokens": 1},
        [1],
    ],
)
def test_usage_that_is_none(told):
    pieces = [event(completion(" a", "length")), event({"choices": [], "usage": told}), event("[DONE]")]
    reply, _ = read(pieces)
    assert reply.seen.usage is None
    assert find_problems(reply.seen, Expected(max_tokens=1)) == ["usage", "malformed"]


@pytest.mark.parametrize(
    "choice", [{"index": "0"}, {"index": -1}, {"index": None}, {"text": 5}, {"text": [" a"]}]
)
@pytest.mark.parametrize("keeps_text", [False, True])
def test_choices_that_are_none(choice, keeps_text):
    odd = completion(" b", "length")
    odd["choices"][0] |= choice
    pieces = [event(completion(" a")), event(odd), event(completion(" c", "length"))]
    reply, _ = read([*pieces, event(usage(1, 3)), event("[DONE]")], keeps_text=keeps_text)
    assert find_problems(reply.seen, Expected()) == ["malformed"]
    assert reply.text == (" a c" if keeps_text else "")


@pytest.mark.parametrize("text", [b"\\x", b"\xff", b"\\ud83d", b"a\\", b"\\u12"])
def test_a_text_that_is_no_json_between_others(text):
    """It looks like the events around it, and is not skipped with them."""
    plain, bad = event(completion(" a")), event(completion("@")).replace(b"@", text)
    end = [event(completion(" c", "length")), event(usage(1, 4)), event("[DONE]")]
    reply, times = read([plain, plain, bad, plain, *end], keeps_text=True)
    assert reply.seen.num_malformed == 1
    assert (reply.text, list(times)) == (" a a a c", [0, 1, 3, 4])


def test_texts_with_escapes_are_text():
    texts = [" a", "a\nb", "日本", "\t", "😀", "\\"]
    reply, times = read([event(completion(text)) for text in texts], keeps_text=True)
    assert (reply.text, len(times), reply.seen.num_malformed) == ("".join(texts), len(texts), 0)
    escaped = [event(json.dumps(completion(text))) for text in texts]
    assert read(escaped, keeps_text=True)[0].text == reply.text


def test_where_a_refusal_sends_to():
    reply = StreamReply(array("d"), lambda: None, is_chat=False, keeps_text=False)
    reply.on_head(307, {b"location": b"http://elsewhere/v1"})
    reply.on_end(1.0, None)
    assert reply.error == "status 307: it sends to http://elsewhere/v1, which --base-url may name. "
