"""The OpenAI client against a real HTTP server that misbehaves by script."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentq.adapters.openai_model import OpenAIModel
from agentq.domain.errors import ConfigurationError
from agentq.domain.failures import (
    FailureClass,
    FailureClassifier,
    ModelConnectionError,
    ModelError,
    ModelNotFoundError,
    ModelReplyMalformedError,
    ModelReplyRefusedError,
    ModelTimeoutError,
)
from agentq.domain.model import ModelReply, ToolCall, Usage
from agentq.ports.world import ModelRequest
from tests.support.model_server import (
    Answer,
    ModelServer,
    Turn,
    call,
    cut,
    dripping,
    failure,
    raw,
    reply,
    slow,
)

CONCURRENT = 100
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test-key")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def ask(server: ModelServer, *, timeout_seconds: float = 30, tools: bool = False) -> ModelReply:
    return OpenAIModel(base_url=server.base_url).complete(request(timeout_seconds=timeout_seconds, tools=tools))


def request(*, timeout_seconds: float = 30, tools: bool = False, model: str = "stub") -> ModelRequest:
    messages = [{"role": "user", "content": "hello"}]
    return ModelRequest(model=model, messages=messages, tools=[TOOL] if tools else [], timeout_seconds=timeout_seconds)


def failure_of(turn: Turn, *, timeout_seconds: float = 30) -> tuple[Exception, int]:
    """The error that this answer becomes, and how often the server was asked."""
    with ModelServer(turn) as server:
        with pytest.raises(ModelError) as caught:
            ask(server, timeout_seconds=timeout_seconds)
        return caught.value, len(server.requests)


def test_a_text_comes_back_with_its_tokens() -> None:
    """Usage is stored on the step; a lost count is a bill that nobody can explain."""
    with ModelServer(reply("hi")) as server:
        assert ask(server) == ModelReply(text="hi", usage=Usage(input_tokens=11, output_tokens=7))


def test_tools_and_messages_reach_the_server_and_an_empty_list_of_tools_does_not() -> None:
    """The API refuses an empty `tools`, so an agent without tools would never run."""
    with ModelServer(reply("hi")) as server:
        ask(server, tools=True)
        ask(server)
        assert server.requests[0] == {
            "model": "stub",
            "messages": [{"role": "user", "content": "hello"}],
            "tools": [TOOL],
        }
        assert "tools" not in server.requests[1]
        assert server.keys == ["Bearer test-key"] * 2


def test_parallel_calls_keep_their_order() -> None:
    """Writes are made in the order in which the model asked."""
    calls = [call("look_up", {"order": 1}, "a"), call("refund", {"order": 2}, "b")]
    with ModelServer(reply(calls=calls)) as server:
        assert ask(server).tool_calls == (
            ToolCall(id="a", name="look_up", arguments={"order": 1}),
            ToolCall(id="b", name="refund", arguments={"order": 2}),
        )


@pytest.mark.parametrize("ids", [("same", "same", "same_2"), ("", "", "")])
def test_calls_get_ids_of_their_own(ids: tuple[str, str, str]) -> None:
    """Results are matched to calls by id: two calls of one id would get each other's results."""
    calls = [call("look_up", {"n": number}, given) for number, given in enumerate(ids)]
    with ModelServer(reply(calls=calls)) as server:
        own = [made.id for made in ask(server).tool_calls]
    assert len(set(own)) == len(ids)
    assert all(own)


@pytest.mark.parametrize("arguments", ["{not json", '"a text"', "[1]", '{"a": 1'])
def test_malformed_arguments_are_kept_as_an_invalid_call(arguments: str) -> None:
    """The model's mistake is told to the model; it must not fail the run, nor the calls beside it."""
    calls = [call("look_up", arguments, "a"), call("look_up", {"order": 1}, "b")]
    with ModelServer(reply(calls=calls)) as server:
        wrong, right = ask(server).tool_calls
    assert wrong.arguments == {}
    assert wrong.arguments_error is not None
    assert "JSON" in wrong.arguments_error
    assert "\n" not in wrong.arguments_error
    assert right == ToolCall(id="b", name="look_up", arguments={"order": 1})


def test_no_arguments_at_all_are_an_empty_object() -> None:
    """Several models send an empty text for a tool that takes nothing."""
    with ModelServer(reply(calls=[call("look_up", "")])) as server:
        assert ask(server).tool_calls == (ToolCall(id="call_1", name="look_up", arguments={}),)


STATUSES = [
    (400, FailureClass.CLIENT_ERROR),
    (401, FailureClass.AUTH),
    (403, FailureClass.AUTH),
    (404, FailureClass.CONFIGURATION),
    (422, FailureClass.CLIENT_ERROR),
    (429, FailureClass.RATE_LIMIT),
    (500, FailureClass.SERVER_ERROR),
    (503, FailureClass.SERVER_ERROR),
]


@pytest.mark.parametrize(("status", "expected"), STATUSES)
def test_a_status_becomes_its_class_after_one_request(status: int, expected: FailureClass) -> None:
    """Retries of the SDK's own would multiply those of the step."""
    error, requests = failure_of(failure(status))
    assert (FailureClassifier().classify(error), requests) == (expected, 1)
    assert f"{status}: scripted failure" in str(error)


@pytest.mark.parametrize("header", ["7", "7.0"])
def test_retry_after_is_told(header: str) -> None:
    """A provider that is asked again too early keeps its doors shut for longer."""
    error, _ = failure_of(failure(429, retry_after=header))
    assert FailureClassifier().retry_after_seconds(error) == 7


def test_a_retry_after_date_is_measured_by_the_servers_own_clock() -> None:
    """Only durations cross clocks: a worker whose clock is wrong must not wait for hours."""
    answer = failure(503, retry_after="Thu, 01 Jan 2099 00:00:30 GMT", date="Thu, 01 Jan 2099 00:00:00 GMT")
    error, _ = failure_of(answer)
    assert FailureClassifier().retry_after_seconds(error) == 30


TROUBLES = [
    (cut(reply("hi")), ModelConnectionError, FailureClass.CONNECTION),
    (cut(reply("hi"), after_bytes=0), ModelConnectionError, FailureClass.CONNECTION),
    (cut(failure(500)), ModelConnectionError, FailureClass.CONNECTION),
    (raw("<html>bad gateway</html>"), ModelReplyMalformedError, FailureClass.SERVER_ERROR),
    (raw("{}"), ModelReplyMalformedError, FailureClass.SERVER_ERROR),
    (raw("[]"), ModelReplyMalformedError, FailureClass.SERVER_ERROR),
    (raw('{"choices": []}'), ModelReplyMalformedError, FailureClass.SERVER_ERROR),
    (raw('{"choices": [{"finish_reason": "stop"}]}'), ModelReplyMalformedError, FailureClass.SERVER_ERROR),
    (raw('{"error": {"message": "upstream", "code": 502}}'), ModelError, FailureClass.SERVER_ERROR),
    (raw('{"error": {"message": "upstream", "code": "odd"}}'), ModelError, FailureClass.UNKNOWN),
    (raw(""), ModelReplyMalformedError, FailureClass.SERVER_ERROR),
    (reply(None), ModelReplyMalformedError, FailureClass.SERVER_ERROR),
    (reply(""), ModelReplyMalformedError, FailureClass.SERVER_ERROR),
    (reply("half an", finish_reason="length"), ModelReplyRefusedError, FailureClass.CLIENT_ERROR),
    (
        reply(calls=[call("refund", '{"order": 1')], finish_reason="length"),
        ModelReplyRefusedError,
        FailureClass.CLIENT_ERROR,
    ),
    (reply("", finish_reason="content_filter"), ModelReplyRefusedError, FailureClass.CLIENT_ERROR),
    (reply("hm", finish_reason="gave_up"), ModelError, FailureClass.UNKNOWN),
]


@pytest.mark.parametrize(("answer", "kind", "expected"), TROUBLES)
def test_every_trouble_has_its_class(answer: Answer, kind: type[Exception], expected: FailureClass) -> None:
    """A cut reply that is taken for a whole one can end a run with half an answer, or half a refund."""
    error, requests = failure_of(answer)
    assert type(error) is kind
    assert (FailureClassifier().classify(error), requests) == (expected, 1)
    assert "\n" not in str(error)


def test_calls_count_whatever_the_finish_reason_says() -> None:
    """Some servers end a reply with calls as `stop`; dropping the calls would end the run without its work."""
    with ModelServer(reply(calls=[call("look_up", {})], finish_reason="stop")) as server:
        assert len(ask(server).tool_calls) == 1


def test_a_refusal_is_the_models_answer() -> None:
    """It is what the model has to say; an empty answer would be tried again in vain."""
    with ModelServer(reply(None, refusal="I won't.")) as server:
        assert ask(server).text == "I won't."


@pytest.mark.parametrize("answer", [slow(reply("hi"), 60), dripping(reply("hi"), 0.05)])
def test_a_turn_ends_in_time(answer: Answer) -> None:
    """A server that says nothing, or next to nothing, for ever must not hold a worker's thread for ever."""
    error, _ = failure_of(answer, timeout_seconds=0.4)
    assert isinstance(error, ModelTimeoutError)
    assert FailureClassifier().classify(error) is FailureClass.CONNECTION


def test_a_server_that_isnt_there_is_a_connection_failure() -> None:
    """It may be back in a second: the step is tried again."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        model = OpenAIModel(base_url=f"http://127.0.0.1:{unused.getsockname()[1]}/v1")
        with pytest.raises(ModelConnectionError) as caught:
            model.complete(request())
    assert FailureClassifier().classify(caught.value) is FailureClass.CONNECTION


def test_an_unknown_model_is_a_matter_of_configuration() -> None:
    """Trying again won't make it known; the error names what the server said."""
    error, _ = failure_of(failure(404, "The model 'stub' does not exist"))
    assert isinstance(error, ModelNotFoundError)
    assert "does not exist" in str(error)


@pytest.fixture
def crowd() -> Iterator[ModelServer]:
    with ModelServer(Answer(body=reply("hi").body, waits_for_requests=CONCURRENT)) as server:
        yield server


def test_a_hundred_turns_at_once_share_one_client(crowd: ModelServer) -> None:
    """One threads worker runs a hundred model turns; a smaller connection pool would make them queue for each other.

    The server answers nobody before all of them have arrived.
    """
    model = OpenAIModel(base_url=crowd.base_url)
    with ThreadPoolExecutor(CONCURRENT) as threads:
        replies = list(threads.map(lambda _: model.complete(request(timeout_seconds=60)), range(CONCURRENT)))
    assert [answer.text for answer in replies] == ["hi"] * CONCURRENT
    assert crowd.in_flight_max == CONCURRENT


def test_without_a_key_openai_itself_is_a_matter_of_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without its secret should say so, not be refused by a server far away three times."""
    monkeypatch.setenv("OPENAI_API_KEY", " ")
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY is not set") as caught:
        OpenAIModel().complete(request())
    assert FailureClassifier().classify(caught.value) is FailureClass.CONFIGURATION


def test_a_server_of_ones_own_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local model servers ask for none."""
    monkeypatch.delenv("OPENAI_API_KEY")
    with ModelServer(reply("hi")) as server:
        assert ask(server).text == "hi"


def test_the_sdks_own_variable_names_the_server_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """People have it set already."""
    with ModelServer(reply("hi")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        assert OpenAIModel().complete(request()).text == "hi"


def test_a_key_with_a_line_break_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can't be sent; as a connection failure it would be retried and look like the network's fault."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-a\nsk-b")
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY holds characters"):
        OpenAIModel().complete(request())


@pytest.mark.parametrize("url", ["ftp://models", "models.example", "http://", "http://host:port", "http://[::1"])
def test_an_address_that_is_no_http_url_is_refused(url: str) -> None:
    """At once and by name, not at the first turn."""
    with pytest.raises(ConfigurationError, match="give an http"):
        OpenAIModel(base_url=url)
