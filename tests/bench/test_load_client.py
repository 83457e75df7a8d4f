"""The load test's client against a server with faults: what is told of each reply is what happened."""

import pytest

from oneloop_bench.load.metrics import Latencies
from oneloop_bench.load.processes import run
from oneloop_bench.load.workload import CHAT_PATH, COMPLETIONS_PATH, Asking, Job, Session, Turn
from oneloop_bench.server import free_port

FAULTS = {
    "no done": "done",
    "event after done": "done",
    "no finish": "finish_reason",
    "two finishes": "finish_reason",
    "text after finish": "finish_reason",
    "no usage": "usage",
    "wrong sum": "usage",
    "wrong prompt count": "usage",
    "wrong completion count": "usage",
    "malformed": "malformed",
}
CHAT_FAULTS = {"no role": "role", "late role": "role", "two roles": "role"}


def ask(fake, turns, *, is_chat=False, concurrency=None, starts=None, processes=1, sessions=None, **fields):
    """Records of one session per turn (or of these sessions)."""
    sessions = sessions or [Session([turn]) for turn in turns]
    streams, timeout_s = fields.pop("streams", True), fields.pop("timeout_s", 20.0)
    asking = Asking(
        "fake-model",
        CHAT_PATH if is_chat else COMPLETIONS_PATH,
        is_chat=is_chat,
        streams=streams,
        ignore_eos=True,
        extra_body=fields,
        timeout_s=timeout_s,
    )
    numbers = [sum(len(s.turns) for s in sessions[:place]) for place in range(len(sessions))]
    starts = starts or [0.0] * len(sessions)
    counts = []
    outcome = run(Job(fake.url, asking, sessions, starts, numbers, concurrency), processes, counts.append)
    assert sum(counts) == len(outcome.records)
    assert [record.index for record in outcome.records] == list(range(len(outcome.records)))
    return outcome.records


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_a_right_reply_passes_all_checks(fake, is_chat, streams):
    prompt = "five words of a prompt" if is_chat else [7] * 5
    (record,) = ask(fake, [Turn(prompt, 12)], is_chat=is_chat, streams=streams)
    assert (record.error, record.problems, record.status) == (None, [], 200)
    assert (record.prompt_tokens, record.completion_tokens) == (5, 12)
    assert len(record.times) == (12 if streams else 0), "the role is no token"
    assert record.sent <= min(record.times, default=record.end) <= record.end
    assert list(record.times) == sorted(record.times)


@pytest.mark.parametrize(("fault", "check"), FAULTS.items())
@pytest.mark.parametrize("is_chat", [False, True])
def test_each_fault_fails_its_check_and_no_other(fake, fault, check, is_chat):
    if is_chat and fault == "wrong prompt count":
        is_chat = False  # how many tokens a chat's prompt has, only the server knows
    prompt = "a b c" if is_chat else [7] * 3
    records = ask(fake, [Turn(prompt, 8)] * 2, is_chat=is_chat, concurrency=1, fault=fault)
    assert [record.problems for record in records] == [[check]] * 2
    assert all(record.is_complete for record in records)


@pytest.mark.parametrize(("fault", "check"), CHAT_FAULTS.items())
def test_faults_of_chat(fake, fault, check):
    (record,) = ask(fake, [Turn("a b c", 8)], is_chat=True, fault=fault)
    assert record.problems == [check]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("500", 'status 500: {"error": {"message": "broken"}}'),
        ("cut", "the server closed the connection"),
        ("garbage", "no HTTP reply: b'this is no HTTP'"),
        ("error in the stream", 'an error in the stream: {"message":"out of memory"}'),
    ],
)
def test_a_request_that_fails_says_why(fake, fault, message):
    good, bad = Turn([1], 6), Turn([1], 6, extra_body={"fault": fault})
    records = ask(fake, [good, bad, good], concurrency=1)
    assert [record.error for record in records] == [None, message, None]
    assert records[1].end > records[1].sent


def test_a_server_that_says_nothing(fake):
    (record,) = ask(fake, [Turn([1], 6)], fault="hang", timeout_s=0.2)
    assert record.error == "no end within 0.2 s"
    assert 0.2 <= record.end - record.sent < 5


def test_a_server_that_says_nothing_is_not_asked_again(fake):
    """Over a connection that was used before, as over a new one."""
    good, bad = Turn([1], 6), Turn([1], 6, extra_body={"fault": "hang"})
    records = ask(fake, [good, bad], concurrency=1, timeout_s=0.3)
    assert [record.error for record in records] == [None, "no end within 0.3 s"]
    assert len(fake.bodies) == 2


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_host_that_is_no_name(fake, host):
    fake.url = f"http://{host}:1"
    (record,) = ask(fake, [Turn([1], 6)])
    assert record.error.startswith("no connection: ")


@pytest.mark.parametrize("more", [{"n": "x"}, {"max_completion_tokens": "x"}])
def test_fields_of_the_wrong_type_are_the_servers_to_refuse(fake, more):
    (record,) = ask(fake, [Turn([1], 6, extra_body=more)])
    assert (record.error, record.problems) == (None, [])


def test_nobody_listens(fake):
    fake.url = f"http://127.0.0.1:{free_port()}"
    (record,) = ask(fake, [Turn([1], 6)])
    assert record.error.startswith("no connection: ")


def test_times_are_those_of_the_events(fake):
    (record,) = ask(fake, [Turn([1], 5)], delay=0.05)
    latencies = Latencies.of([record])
    assert len(latencies.itl) == 4
    assert all(0.03 < gap < 0.5 for gap in latencies.itl)
    assert latencies.tpot[0] == pytest.approx(sum(latencies.itl) / 4)
    assert latencies.e2el[0] >= latencies.ttft[0] + sum(latencies.itl)


def test_connections_are_used_again(fake):
    ask(fake, [Turn([1], 3)] * 20, concurrency=4)
    assert fake.num_connections == 4
    assert fake.most_at_once <= 4


def test_a_connection_that_was_closed_in_between_is_no_failure(fake):
    """The server closes after each reply without a word: what was sent into that is sent again."""
    records = ask(fake, [Turn([1], 3)] * 6, concurrency=1, fault="close after")
    assert all(record.is_complete and not record.problems for record in records)
    assert len(fake.bodies) == 6


def test_requests_go_when_they_are_due(fake):
    starts = [0.0, 0.1, 0.1, 0.3]
    records = ask(fake, [Turn([1], 2)] * 4, starts=starts)
    begin = records[0].scheduled
    for record, start in zip(records, starts, strict=True):
        assert record.scheduled - begin == pytest.approx(start)
        assert 0 <= record.sent - record.scheduled < 0.09


@pytest.mark.parametrize("is_chat", [False, True])
def test_turns_follow_one_another_with_what_was_said(fake, is_chat):
    session = Session([Turn(" one", 2), Turn(" two", 2), Turn(" three", 1)], system="be brief")
    ask(fake, [], is_chat=is_chat, sessions=[session])
    if is_chat:
        said = [[message["content"] for message in body["messages"]] for body in fake.bodies]
        roles = [message["role"] for message in fake.bodies[-1]["messages"]]
        assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
        assert said[2] == ["be brief", " one", " w0 last", " two", " w0 last", " three"]
    else:
        assert fake.bodies[2]["prompt"] == "be brief one w0 last two w0 last three"


def test_a_turn_that_fails_ends_its_session(fake):
    bad = Turn("b", 2, extra_body={"fault": "500"})
    sessions = [Session([Turn("a", 2), bad, Turn("c", 2)]), Session([Turn("d", 2)])]
    records = ask(fake, [], sessions=sessions, concurrency=1)
    assert [record.is_complete for record in records] == [True, False, False, True]
    assert records[2].error == "not sent: an earlier turn failed"
    assert len(fake.bodies) == 3


def test_several_processes(fake):
    turns = [Turn([place], 2) for place in range(1, 12)]
    records = ask(fake, turns, processes=3, concurrency=5)
    assert all(record.is_complete and not record.problems for record in records)
    assert sorted(body["prompt"][0] for body in fake.bodies) == list(range(1, 12))
    assert fake.most_at_once <= 5


def test_a_process_that_fails_is_told(fake, monkeypatch, capfd):
    monkeypatch.setattr("oneloop_bench.load.processes.__name__", "no_such_module")
    with pytest.raises(RuntimeError, match="a client process ended with status 1"):
        ask(fake, [Turn([1], 2)] * 2, processes=2)
    assert "No module named" in capfd.readouterr().err
