"""A model that is a Python function."""

from typing import Any

import pytest

from agentq.domain.errors import ConfigurationError
from agentq.domain.function_model import FunctionModel
from agentq.domain.model import ModelReply, ToolCall, Usage

A = ToolCall(id="a", name="look_up", arguments={})
B = ToolCall(id="b", name="look_up", arguments={"n": 1})

REPLIES: list[tuple[Any, ModelReply]] = [
    ("hi", ModelReply(text="hi")),
    ("", ModelReply(text="")),
    (A, ModelReply(tool_calls=(A,))),
    ([A, B], ModelReply(tool_calls=(A, B))),
    ((A,), ModelReply(tool_calls=(A,))),
    (ModelReply(text="hm", tool_calls=(A,), usage=Usage(input_tokens=3)),) * 2,
]


@pytest.mark.parametrize(("returned", "expected"), REPLIES)
def test_whatever_a_function_may_return_becomes_a_reply(returned: Any, expected: ModelReply) -> None:
    """Tests and demos should say what they mean in the shortest way."""
    assert FunctionModel(lambda messages, tools: returned).complete([], []) == expected


def test_the_function_sees_messages_and_tools() -> None:
    """It decides by them, like any model."""
    seen: list[Any] = []

    def function(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        seen.append((messages, tools))
        return "done"

    FunctionModel(function).complete([{"role": "user", "content": "hi"}], [{"type": "function"}])
    assert seen == [([{"role": "user", "content": "hi"}], [{"type": "function"}])]


@pytest.mark.parametrize("returned", [None, 5, [], ["text"], [A, "text"], {"text": "hi"}])
def test_anything_else_is_the_authors_mistake(returned: Any) -> None:
    """Named by the model's name and by what came back; trying again would not help."""
    with pytest.raises(ConfigurationError, match=r"model 'odd' returned .*; return a str"):
        FunctionModel(lambda messages, tools: returned, name="odd").complete([], [])


def test_what_the_function_raises_passes_through() -> None:
    """Tests script failures with it."""

    def function(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        FunctionModel(function).complete([], [])


def test_calls_without_ids_of_their_own_get_them() -> None:
    """Results find their call by its id; the same reply gets the same ids each time, so that a redone turn agrees."""
    calls = [ToolCall(id=given, name="look_up", arguments={}) for given in ("", "x", "x", "call_1", "x_2", "")]
    model = FunctionModel(lambda messages, tools: calls)
    own = [call.id for call in model.complete([], []).tool_calls]
    assert len(set(own)) == len(own)
    assert own[1] == "x"
    assert own == [call.id for call in model.complete([], []).tool_calls]


def test_a_model_must_be_callable() -> None:
    """Said where it is written, not at the first turn."""
    with pytest.raises(ConfigurationError, match="needs a function"):
        FunctionModel("openai:gpt")  # type: ignore[arg-type]
