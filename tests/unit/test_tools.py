"""Tools: what a model is told of a function, what it may pass, and what becomes of the result."""

import asyncio
import json
import threading
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import wraps
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agentq.domain.docstrings import parse_docstring
from agentq.domain.effects import ToolEffect
from agentq.domain.errors import ConfigurationError
from agentq.domain.tools import ResultNotJsonError, Tool, ToolContext, ToolError, tool

CONTEXT = ToolContext()


class Colour(Enum):
    RED = "red"


@dataclass
class Line:
    sku: str
    count: int


class Address(BaseModel):
    city: str


class Opaque:
    """What no model can write down."""


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE, deadline=timedelta(seconds=20), settles_within=90)
def send_refund(context: ToolContext, order_id: str, amount_cents: Annotated[int, Field(ge=1)], note: str = "") -> Any:
    """Send a refund to the customer
    of an order.

    More for the people who maintain it.

    Args:
        order_id: the number of the order,
            digits only
        amount_cents (int): how much
    """
    return {"order": order_id, "amount": amount_cents, "note": note, "key": context.idempotency_key}


def test_a_function_becomes_a_schema() -> None:
    """It is all that a model knows of the tool; the context is none of its business."""
    assert send_refund.schema() == {
        "type": "function",
        "function": {
            "name": "send_refund",
            "description": "Send a refund to the customer of an order.",
            "parameters": {
                "type": "object",
                "properties": {
                    "order_id": {"type": "string", "description": "the number of the order, digits only"},
                    "amount_cents": {"type": "integer", "minimum": 1, "description": "how much"},
                    "note": {"type": "string", "default": ""},
                },
                "required": ["order_id", "amount_cents"],
                "additionalProperties": False,
            },
        },
    }


def test_a_tool_keeps_what_its_author_declared() -> None:
    """Deadlines and effects decide what may be repeated; they come from the code alone."""
    assert (send_refund.effect, send_refund.deadline_seconds, send_refund.settles_within_seconds) == (
        ToolEffect.NON_IDEMPOTENT_WRITE,
        20,
        90,
    )
    with pytest.raises(AttributeError):
        send_refund.effect = ToolEffect.READ_ONLY  # type: ignore[misc]


def test_defaults_are_those_of_a_read_and_fail_closed_for_writes() -> None:
    """A keyed write may be repeated at once; of a plain one only a person can say that it didn't happen."""

    def touch() -> None: ...

    read = tool(touch)
    keyed = tool(effect=ToolEffect.IDEMPOTENT_WRITE)(touch)
    plain = tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE)(touch)
    assert (read.effect, read.deadline_seconds, read.settles_within_seconds) == (ToolEffect.READ_ONLY, None, None)
    assert (keyed.settles_within_seconds, plain.settles_within_seconds) == (0, None)
    assert not read.unknown_is_dead_letter
    assert read.description == ""


def test_the_context_is_known_by_its_hint_whatever_its_name() -> None:
    """And it may stand anywhere among the parameters."""

    @tool
    def look(order_id: str, me: Annotated[ToolContext, "mine"]) -> str:
        return order_id + me.run_id

    assert list(look.parameters["properties"]) == ["order_id"]
    assert look.call(CONTEXT, {"order_id": "1"}) == "1run"


def test_a_tool_is_called_like_its_function_in_unit_tests() -> None:
    """Authors test their functions, not agentq."""
    assert send_refund(ToolContext(idempotency_key="k"), "17", 5, note="x")["key"] == "k"


def test_a_call_passes_context_and_coerced_arguments() -> None:
    """A tool works with dates and enums, a model with JSON."""
    seen: list[Any] = []

    @tool
    def look(
        when: datetime, colour: Colour, lines: list[Line], address: Address, key: uuid.UUID, price: Decimal = Decimal(1)
    ) -> int:
        seen.extend([when, colour, lines, address, key, price])
        return 1

    arguments = {
        "when": "2030-01-01T00:00:00Z",
        "colour": "red",
        "lines": [{"sku": "a", "count": 2}],
        "address": {"city": "Bern"},
        "key": "12345678-1234-5678-1234-567812345678",
    }
    assert look.problem_with(arguments) is None
    assert look.call(CONTEXT, arguments) == 1
    assert seen == [
        datetime(2030, 1, 1, tzinfo=UTC),
        Colour.RED,
        [Line("a", 2)],
        Address(city="Bern"),
        uuid.UUID("12345678-1234-5678-1234-567812345678"),
        Decimal(1),
    ]


PROBLEMS: list[tuple[Any, str]] = [
    ({"order_id": "1"}, "amount_cents: required"),
    ({"order_id": "1", "amount_cents": "5"}, 'amount_cents: Input should be a valid integer, got "5"'),
    ({"order_id": "1", "amount_cents": True}, "amount_cents: Input should be a valid integer, got true"),
    ({"order_id": 1, "amount_cents": 5}, "order_id: Input should be a valid string, got 1"),
    ({"order_id": "1", "amount_cents": 0}, "amount_cents: Input should be greater than or equal to 1, got 0"),
    ({"order_id": "1", "amount_cents": 5, "context": {}}, "context: no such parameter"),
    ({"order_id": "\ud800", "amount_cents": 5}, "Invalid JSON"),
    ({"order_id": "1\n2", "amount_cents": None}, "got null"),
    ({"order_id": object(), "amount_cents": 5}, "the arguments can't be used"),
    ([], "the arguments must be a JSON object, not []"),
    (None, "the arguments must be a JSON object, not null"),
    ("{}", 'the arguments must be a JSON object, not "{}"'),
]


@pytest.mark.parametrize(("arguments", "problem"), PROBLEMS)
def test_wrong_arguments_are_explained_in_one_line_and_nothing_is_called(arguments: Any, problem: str) -> None:
    """The model reads the line and corrects itself; guessing what it meant could refund the wrong amount."""
    told = send_refund.problem_with(arguments)
    assert told is not None
    assert told.startswith("invalid arguments for send_refund: ")
    assert problem in told
    assert "\n" not in told
    with pytest.raises(ToolError) as caught:
        send_refund.call(CONTEXT, arguments)
    assert caught.value.nothing_happened


def test_a_flood_of_problems_is_cut_short() -> None:
    """A model's context is not the place for a hundred errors, nor for a megabyte of its own argument."""
    told = send_refund.problem_with({f"wrong_{number}" * 1000: "x" * 10_000 for number in range(100)})
    assert told is not None
    assert told.endswith("(and 97 more)")
    assert len(told) < 1000


def test_strictness_can_be_loosened_for_one_parameter() -> None:
    """Some models write numbers as texts, and some tools don't mind."""

    @tool
    def add(first: Annotated[int, Field(strict=False)], second: int) -> int:
        return first + second

    assert add.call(CONTEXT, {"first": "2", "second": 1}) == 3
    assert add.problem_with({"first": "2", "second": "1"}) is not None


def test_a_default_of_field_counts() -> None:
    """It is the other way of writing one."""

    @tool
    def page(
        size: Annotated[int, Field(default=10, description="how many")], after: str = Field("", max_length=3)
    ) -> str:
        return f"{size}{after}"

    assert page.parameters["properties"] == {
        "size": {"type": "integer", "default": 10, "description": "how many"},
        "after": {"type": "string", "default": "", "maxLength": 3},
    }
    assert page.call(CONTEXT, {}) == "10"
    assert page.problem_with({"after": "long"}) is not None


def test_names_that_pydantic_keeps_for_itself_are_free() -> None:
    """`json`, `schema` and `_id` are names that real APIs use."""

    @tool
    def put(json: str, schema: int, _id: str, model_config: bool, copy: Literal["a"], title: str = "t") -> list[Any]:
        return [json, schema, _id, model_config, copy, title]

    arguments = {"json": "j", "schema": 1, "_id": "i", "model_config": True, "copy": "a"}
    assert put.call(CONTEXT, arguments) == ["j", 1, "i", True, "a", "t"]
    assert list(put.parameters["properties"]) == ["json", "schema", "_id", "model_config", "copy", "title"]
    told = put.problem_with({**arguments, "_id": 5})
    assert told is not None
    assert "_id: " in told


def test_a_default_that_is_no_json_stays_the_functions_own() -> None:
    """The model needn't know it."""
    sentinel = Opaque()

    @tool
    def look(where: Any = sentinel) -> bool:
        return where is sentinel

    assert look.call(CONTEXT, {}) is True
    assert look.parameters["properties"] == {"where": {}}


def bad_hint(a: Opaque) -> None: ...
def bad_forward(a: "Missing") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def bad_callable(a: "Annotated[type(len), 1]") -> None: ...  # type: ignore[valid-type]
def no_hint(a, b: int) -> None: ...  # type: ignore[no-untyped-def]
def many(*orders: str) -> None: ...
def named(**orders: str) -> None: ...
def positional(a: str, /) -> None: ...
def contexts(a: ToolContext, b: ToolContext) -> None: ...
def generator() -> Any:
    yield 1


async def async_generator() -> Any:
    yield 1


MISTAKES: list[tuple[Any, str]] = [
    (bad_hint, "parameter 'a' of tool 'bad_hint' can't become a JSON schema"),
    (bad_forward, "type hint of parameter 'a' of tool 'bad_forward' can't be read: NameError"),
    (bad_callable, "parameter 'a' of tool 'bad_callable'"),
    (no_hint, "parameter 'a' of tool 'no_hint' has no type hint"),
    (many, "parameter 'orders' of tool 'many' takes any number"),
    (named, "parameter 'orders' of tool 'named' takes any number"),
    (positional, "parameter 'a' of tool 'positional' is positional-only"),
    (contexts, "tool 'contexts' takes two contexts, a and b"),
    (generator, "can't be a tool"),
    (async_generator, "can't be a tool"),
    (lambda: 1, "tool name '<lambda>'"),
    (Opaque, "can't be a tool"),
    (5, "can't be a tool"),
    (send_refund, "is a tool already"),
]


@pytest.mark.parametrize(("function", "why"), MISTAKES)
def test_a_function_that_cant_be_a_tool_is_refused_where_it_is_written(function: Any, why: str) -> None:
    """With the tool's and the parameter's name, in one line."""
    with pytest.raises(ConfigurationError, match=why) as caught:
        tool(function)
    assert "\n" not in str(caught.value)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"name": "send refund"}, "tool name 'send refund'"),
    ({"name": "a" * 65}, "1 to 64"),
    ({"name": ""}, "tool name ''"),
    ({"effect": "read_only"}, "choose from ToolEffect.READ_ONLY"),
    ({"effect": None}, "choose from"),
    ({"deadline": 0}, "deadline of 0 seconds"),
    ({"deadline": -1}, "deadline is -1"),
    ({"deadline": float("inf")}, "deadline is inf"),
    ({"deadline": "10s"}, "deadline is '10s'"),
    ({"deadline": True}, "deadline is True"),
    ({"settles_within": 5}, "declares settles_within, but no write"),
    ({"settles_within": -5, "effect": ToolEffect.IDEMPOTENT_WRITE}, "settles_within is -5"),
    ({"unknown_is_dead_letter": True, "effect": ToolEffect.IDEMPOTENT_WRITE}, "goes without saying"),
]


@pytest.mark.parametrize(("options", "why"), OPTIONS)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], why: str) -> None:
    """Silently ignored, it would be believed to protect something."""

    def touch() -> None: ...

    with pytest.raises(ConfigurationError, match=why):
        tool(**options)(touch)


RESULTS: list[tuple[Any, Any]] = [
    (None, None),
    ({"a": [1, 2.5, "x", None, True]}, {"a": [1, 2.5, "x", None, True]}),
    (Line("a", 1), {"sku": "a", "count": 1}),
    (Address(city="Bern"), {"city": "Bern"}),
    (Colour.RED, "red"),
    (datetime(2030, 1, 1, tzinfo=UTC), "2030-01-01T00:00:00Z"),
    ({"at": (Line("a", 1),), 5: {Decimal("1.50")}}, {"at": [{"sku": "a", "count": 1}], "5": ["1.50"]}),
    (2**80, 2**80),
]


@pytest.mark.parametrize(("returned", "stored"), RESULTS)
def test_a_result_becomes_json(returned: Any, stored: Any) -> None:
    """It is stored as text, and read by the model."""

    @tool
    def give() -> Any:
        return returned

    result = give.call(CONTEXT, {})
    assert result == stored
    json.dumps(result)


def endless() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


@pytest.mark.parametrize("returned", [Opaque(), {"a": Opaque()}, endless(), b"\xff", Opaque])
def test_a_result_that_is_no_json_is_an_error_of_its_own(returned: Any) -> None:
    """The call was made: of a write that must never look like a failure that may be tried again."""

    @tool
    def give() -> Any:
        return returned

    with pytest.raises(ResultNotJsonError, match=r"the result of give .* is not JSON") as caught:
        give.call(CONTEXT, {})
    assert "\n" not in str(caught.value)


def test_an_async_tool_gets_a_loop_of_its_own() -> None:
    """Workers have none; nothing may be left over from one call to the next."""
    loops: list[Any] = []

    @tool
    async def look(context: ToolContext, order_id: str) -> str:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return order_id + context.run_id

    assert look.call(CONTEXT, {"order_id": "1"}) == "1run"
    assert look.call(CONTEXT, {"order_id": "1"}) == "1run"
    assert loops[0] is not loops[1]
    assert all(loop.is_closed() for loop in loops)


def test_an_async_tool_is_cancelled_when_its_time_is_over() -> None:
    """Its cleanup runs; a tool that never answers must not hold its worker for ever."""
    cleaned = threading.Event()

    @tool
    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    with pytest.raises(TimeoutError):
        hang.call(ToolContext(seconds_left=lambda: 0.02), {})
    assert cleaned.is_set()


def test_an_async_tool_works_where_a_loop_is_running_already() -> None:
    """An interactive run in a notebook is driven from inside a loop."""

    @tool
    async def look() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    async def notebook() -> Any:
        return look.call(CONTEXT, {})

    assert asyncio.run(notebook()) != threading.current_thread().name


def test_a_tool_that_cancels_itself_fails_like_any_other() -> None:
    """CancelledError is no Exception: it would run through everything that handles a tool's failures."""

    @tool
    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled itself"):
        give_up.call(CONTEXT, {})


def test_a_decorated_async_function_is_awaited_too() -> None:
    """To a worker it makes no difference how many decorators stand above it."""

    def logged(function: Any) -> Any:
        @wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return inner

    @tool
    @logged
    async def look(order_id: str) -> str:
        """Look it up."""
        return order_id

    assert look.call(CONTEXT, {"order_id": "1"}) == "1"
    assert look.description == "Look it up."


def test_what_a_tool_raises_passes_through() -> None:
    """The classifier judges the tool's own exception, not one of ours."""

    @tool
    def fail(kind: str) -> None:
        raise {"tool": ToolError("no", nothing_happened=True), "key": KeyError("x")}[kind]

    with pytest.raises(KeyError):
        fail.call(CONTEXT, {"kind": "key"})
    with pytest.raises(ToolError) as caught:
        fail.call(CONTEXT, {"kind": "tool"})
    assert caught.value.nothing_happened
    assert not ToolError("no").nothing_happened


def test_a_context_tells_the_time_left_and_whether_to_stop() -> None:
    """A long call may look now and then, and stop early."""
    asked = threading.Event()
    context = ToolContext(seconds_left=lambda: -3, cancel_requested=asked.is_set)
    assert (context.deadline_seconds, context.is_cancelled) == (0, False)
    asked.set()
    assert context.is_cancelled


STYLES = [
    "Do it.\n\nArgs:\n    first: one\n        more\n    second (int): two: half\n\nReturns:\n    x: no",
    "Do it.\n\nParameters\n----------\nfirst : str\n    one\n    more\nsecond\n    two: half\n\nReturns\n---\nx\n",
    "Do it.\n\n:param first: one\n    more\n:param int second: two: half\n:returns: x",
]


@pytest.mark.parametrize("text", STYLES)
def test_parameters_are_described_in_every_common_style(text: str) -> None:
    """Authors needn't change how they write."""
    docstring = parse_docstring(text)
    assert docstring.description == "Do it."
    described = {name: docstring.parameters[name] for name in ("first", "second")}
    assert described == {"first": "one more", "second": "two: half"}
    assert "x" not in docstring.parameters


def test_a_docstring_that_begins_with_its_parameters_has_no_description() -> None:
    """A model should not be told that the tool is called `Args:`."""
    assert parse_docstring("Args:\n    first: one").description == ""
    assert parse_docstring(":param first: one").description == ""
    assert parse_docstring("").description == ""


@given(st.text(alphabet="Args:\n -pParameters()*:x", max_size=80))
def test_no_docstring_is_too_odd(text: str) -> None:
    """Reading it happens at import: an error there would stop a worker over a comment."""
    parse_docstring(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_whatever_a_model_sends_is_judged_without_raising(arguments: Any) -> None:
    """A model can send anything; none of it may fail the run."""
    told = send_refund.problem_with(arguments)
    assert told is None or "\n" not in told


def test_tools_are_told_apart_by_identity() -> None:
    """Two tools made of one function may have different effects; they are two."""

    def touch() -> None: ...

    first, second = tool(touch), tool(touch)
    assert isinstance(first, Tool)
    assert first != second
    assert first.origin == second.origin
