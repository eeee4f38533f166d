"""The agent loop: what a model reads, and what its reply becomes."""

import json

import pytest

from agentq.domain.agents import Agent
from agentq.domain.effects import ToolEffect
from agentq.domain.function_model import FunctionModel
from agentq.domain.loop import as_text, assistant_message, conversation, steps_for
from agentq.domain.model import Json, ModelReply, StepKind, ToolCall
from agentq.domain.tools import tool
from tests.support.stage import KEYED, PLAIN, READ


@tool
def look(order: int) -> str:
    """Look an order up."""
    return f"order {order}"


@tool(effect=ToolEffect.IDEMPOTENT_WRITE)
def tag(order: int) -> None: ...


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE, deadline=9)
def pay(order: int) -> None: ...


MODEL = FunctionModel(lambda messages, tools: "done")
AGENT = Agent(name="support", model=MODEL, instructions="Be brief.", tools=[look, tag, pay])


def call(name: str, number: int = 1, **arguments: Json) -> ToolCall:
    return ToolCall(id=f"call-{number}", name=name, arguments=arguments or {"order": 17})


class TestConversation:
    def test_a_first_turn_reads_instructions_and_input(self) -> None:
        """Nothing else has happened."""
        assert conversation(AGENT, "Refund order 17", []) == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Refund order 17"},
        ]

    def test_without_instructions_there_is_no_system_message(self) -> None:
        """Some servers refuse an empty one."""
        assert conversation(Agent(name="a", model=MODEL), "hi", []) == [{"role": "user", "content": "hi"}]

    def test_later_turns_read_every_step_in_order(self) -> None:
        """A model step stored its own message; a call's result answers the call by its id."""
        reply = assistant_message(ModelReply(text=None, tool_calls=(call("look", 1), call("look", 2))))
        history = [
            (StepKind.MODEL, None, json.dumps(reply)),
            (StepKind.TOOL, "call-1", '"a text"'),
            (StepKind.TOOL, "call-2", '{"cents": 12}'),
        ]
        assert conversation(AGENT, {"order": 17}, history)[1:] == [
            {"role": "user", "content": '{"order": 17}'},
            reply,
            {"role": "tool", "tool_call_id": "call-1", "content": "a text"},
            {"role": "tool", "tool_call_id": "call-2", "content": '{"cents": 12}'},
        ]

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("as it is", "as it is"),
            ("", ""),
            (None, "null"),
            ({"name": "Zoë"}, '{"name": "Zoë"}'),
            ([1, 2.5], "[1, 2.5]"),
        ],
    )
    def test_what_is_no_text_becomes_json(self, value: Json, text: str) -> None:
        """Readable: tokens are money, and escapes are many."""
        assert as_text(value) == text


class TestReply:
    def test_an_answer_has_no_calls(self) -> None:
        """The shape that the API itself gives."""
        assert assistant_message(ModelReply(text="done")) == {"role": "assistant", "content": "done"}

    def test_calls_carry_their_arguments_as_text(self) -> None:
        """The API takes nothing else back."""
        message = assistant_message(ModelReply(text="so", tool_calls=(call("look", who="Zoë"),)))
        assert message["content"] == "so"
        assert message["tool_calls"] == [
            {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"who": "Zoë"}'}}
        ]


class TestSteps:
    def test_a_call_becomes_a_step_with_its_effect_pinned(self) -> None:
        """If the code says something else later, the stricter one counts: so it must be known what it said."""
        (step,) = steps_for(AGENT, (call("pay"),))
        assert (step.kind, step.tool, step.call_id, step.arguments) == (StepKind.TOOL, "pay", "call-1", {"order": 17})
        assert (step.effect, step.deadline_seconds, step.error) == (PLAIN, 9, None)

    @pytest.mark.parametrize(
        ("wanted", "error"),
        [
            (call("fly"), "there is no tool 'fly'"),
            (call("look", order="seventeen"), "invalid arguments for look: order: "),
            (call("look", wrong=1), "invalid arguments for look: "),
            (ToolCall(id="c", name="look", arguments={}, arguments_error="no JSON object"), "no JSON object"),
        ],
    )
    def test_a_call_that_can_not_be_made_says_why(self, wanted: ToolCall, error: str) -> None:
        """An error result for the model, not a failed run."""
        (step,) = steps_for(AGENT, (wanted,))
        assert step.error is not None and step.error.startswith(error)

    def test_an_unknown_tool_is_a_plain_write(self) -> None:
        """Fail closed, whatever becomes of the step."""
        assert steps_for(AGENT, (call("fly"),))[0].effect is PLAIN

    @pytest.mark.parametrize(
        ("names", "batches"),
        [
            (["look"], [1]),
            (["look", "look", "look"], [1, 1, 1]),
            (["pay", "pay"], [1, 2]),
            (["look", "look", "tag", "look", "pay", "look", "look"], [1, 1, 2, 3, 4, 5, 5]),
            (["look", "fly", "look"], [1, 1, 1]),
            (["pay", "fly", "pay"], [1, 2, 3]),
        ],
    )
    def test_reads_run_together_and_writes_alone(self, names: list[str], batches: list[int]) -> None:
        """In the order in which the model asked; a call that isn't made parts nothing."""
        steps = steps_for(AGENT, tuple(call(name, number) for number, name in enumerate(names)))
        assert [step.batch for step in steps] == batches

    def test_no_calls_are_no_steps(self) -> None:
        """The reply is the answer."""
        assert steps_for(AGENT, ()) == ()

    def test_effects_are_those_of_the_code(self) -> None:
        """No model, no setting and no row can weaken them."""
        steps = steps_for(AGENT, (call("look"), call("tag"), call("pay")))
        assert [step.effect for step in steps] == [READ, KEYED, PLAIN]
