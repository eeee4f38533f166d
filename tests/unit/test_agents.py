"""Agents, the registry, and the modules that define them: every mistake is one clear line."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentq.adapters.agent_modules import load_classifier, load_registry
from agentq.domain.agents import Agent, Registry
from agentq.domain.effects import ToolEffect
from agentq.domain.errors import ConfigurationError
from agentq.domain.failures import FailureClass
from agentq.domain.function_model import FunctionModel
from agentq.domain.tools import Tool, tool

MODEL = FunctionModel(lambda messages, tools: "hi")


@tool
def look_up(order_id: str) -> str:
    """Look an order up."""
    return order_id


@tool(effect=ToolEffect.NON_IDEMPOTENT_WRITE)
def refund(order_id: str) -> str:
    """Refund an order."""
    return order_id


def namesake(name: str) -> Tool:
    @tool(name=name)
    def other(order_id: str) -> str:
        return order_id

    return other


def test_an_agent_holds_what_it_was_given() -> None:
    """Tools become a tuple, so that nobody adds one to an agent that serves."""
    agent = Agent("support", "openai:gpt-5-mini", tools=[look_up, refund])
    assert agent.tools == (look_up, refund)
    assert agent.tool("refund") is refund
    assert agent.tool("pay") is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "agent name ''"),
    ({"name": "with space"}, "agent name 'with space'"),
    ({"name": "a" * 65}, "1 to 64"),
    ({"name": None}, "agent name None"),
    ({"model": "gpt-5"}, "write it as 'openai:gpt-5'"),
    ({"model": "openai:"}, "write it as 'openai:MODEL'"),
    ({"model": ""}, "write it as 'openai:MODEL'"),
    ({"model": "anthropic:claude"}, "no provider 'anthropic'.*openai:claude.*AGENTQ_OPENAI_BASE_URL"),
    ({"model": None}, "give 'provider:model' or a FunctionModel"),
    ({"model": lambda messages, tools: "hi"}, "give 'provider:model' or a FunctionModel"),
    ({"instructions": None}, "instructions"),
    ({"tools": look_up}, "give a list of tools"),
    ({"tools": "look_up"}, "give a list of tools"),
    ({"tools": None}, "give a list of tools"),
    ({"tools": [lambda: 1]}, "is not a tool; decorate it with @tool"),
    ({"tools": [look_up, look_up]}, "two tools named 'look_up'"),
    ({"tools": [look_up, namesake("look_up")]}, "two tools named 'look_up'"),
    ({"turns_max": 0}, "turns_max is 0"),
    ({"turns_max": True}, "turns_max is True"),
    ({"input_bytes_max": 1.5}, "input_bytes_max is 1.5"),
]


@pytest.mark.parametrize(("wrong", "why"), WRONG)
def test_a_wrong_agent_is_refused_where_it_is_written(wrong: dict[str, Any], why: str) -> None:
    """The alternative is a worker that starts, takes runs, and fails every one of them."""
    with pytest.raises(ConfigurationError, match=why) as caught:
        Agent(**{"name": "support", "model": MODEL, **wrong})
    assert "\n" not in str(caught.value)


def test_a_registry_finds_agents_tools_and_effects_by_name() -> None:
    """Steps hold names only; the registry is what a worker knows of them."""
    registry = Registry([Agent("b", MODEL, tools=[look_up, refund]), Agent("a", MODEL, tools=[look_up])])
    assert registry.names() == ["a", "b"]
    assert [agent.name for agent in registry.agents()] == ["a", "b"]
    assert registry.agent("c") is None
    assert registry.tools() == [look_up, refund]
    assert registry.tool("b", "refund") is refund
    assert registry.tool("a", "refund") is None
    assert registry.tool("c", "look_up") is None
    assert registry.effects.effect_for("look_up") is ToolEffect.READ_ONLY
    assert registry.effects.effect_for("refund") is ToolEffect.NON_IDEMPOTENT_WRITE


def test_an_unknown_tool_is_taken_for_a_plain_write() -> None:
    """Nobody knows what it does to the world, so nothing may repeat it."""
    assert Registry([]).effects.effect_for("renamed") is ToolEffect.NON_IDEMPOTENT_WRITE


def test_two_agents_of_one_name_are_refused() -> None:
    """A queued run would go to whichever was imported last."""
    with pytest.raises(ConfigurationError, match="two agents are named 'support'"):
        Registry([Agent("support", MODEL), Agent("support", MODEL)])


def test_two_tools_of_one_name_are_refused_across_agents() -> None:
    """A fence keeps the tool's name; it must say what was called."""
    agents = [Agent("a", MODEL, tools=[look_up]), Agent("b", MODEL, tools=[namesake("look_up")])]
    with pytest.raises(ConfigurationError, match=r"test_agents\.look_up of agent 'a' and .*other of agent 'b'"):
        Registry(agents)


Module = Callable[..., str]
HEADER = """from agentq import Agent, FunctionModel, FailureClassifier, FailureClass
model = FunctionModel(lambda messages, tools: "hi")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """Writes a module that can be imported under a name of its own, and forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(name: str, text: str) -> str:
        own = f"agents_of_a_test_{name}"
        (tmp_path / f"{own}.py").write_text(HEADER + text)
        return own

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("agents_of_a_test_"):
            del sys.modules[name]


def test_agents_are_collected_from_modules(module: Module) -> None:
    """An agent that one module imports from the other is the same agent, not a second one."""
    shop = module("shop", "support = Agent('support', model)\nalias = support\n")
    desk = module("desk", f"from {shop} import support\nsales = Agent('sales', model)\n")
    assert load_registry([shop, desk]).names() == ["sales", "support"]


def test_no_modules_make_an_empty_registry() -> None:
    """Whoever needs agents says so; a client doesn't."""
    assert load_registry([]).names() == []


def test_two_agents_of_one_name_name_both_modules(module: Module) -> None:
    """One has to be renamed; the message says where both are."""
    shop = module("shop", "support = Agent('support', model)\n")
    desk = module("desk", "support = Agent('support', model)\n")
    with pytest.raises(ConfigurationError, match=f"'support' is defined in {shop!r} and in {desk!r}"):
        load_registry([shop, desk])
    twice = module("twice", "a = Agent('support', model)\nb = Agent('support', model)\n")
    with pytest.raises(ConfigurationError, match=f"'support' is defined twice in {twice!r}"):
        load_registry([twice])


TROUBLES = [
    ("import a_library_that_is_missing\n", "ModuleNotFoundError: No module named 'a_library_that_is_missing'"),
    ("def broken(:\n", "SyntaxError"),
    ("1 / 0\n", r"ZeroDivisionError: division by zero \(agents_of_a_test_trouble\.py:3\)"),
    ("raise SystemExit(3)\n", "SystemExit: 3"),
    ("raise ValueError('two\\nlines')\n", "ValueError: two lines"),
    ("Agent('support', 'gpt-5')\n", r"write it as 'openai:gpt-5' \(agents_of_a_test_trouble\.py:3\)"),
    ("agents = []\n", "defines no Agent at its top level"),
]


@pytest.mark.parametrize(("text", "why"), TROUBLES)
def test_a_module_in_trouble_is_named_with_its_trouble(module: Module, text: str, why: str) -> None:
    """It stops a worker at start: one line must be enough to mend it."""
    name = module("trouble", text)
    with pytest.raises(ConfigurationError, match=why) as caught:
        load_registry([name])
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_modules_that_import_each_other_are_told_so(module: Module) -> None:
    """Python's own message is hidden deep in a traceback."""
    first = module("first", "from agents_of_a_test_second import helper\nsupport = Agent('support', model)\n")
    module("second", "from agents_of_a_test_first import support\nhelper = 1\n")
    with pytest.raises(ConfigurationError, match=f"{first!r} can't be imported: ImportError: .*circular import"):
        load_registry([first])


def test_a_module_that_loads_the_agents_itself_is_told_so(module: Module) -> None:
    """It would look as if it defined none: its agents come after the line that looks for them."""
    name = module(
        "looped",
        "from agentq.adapters.agent_modules import load_registry\n"
        "load_registry(['agents_of_a_test_looped'])\n"
        "support = Agent('support', model)\n",
    )
    with pytest.raises(ConfigurationError, match=f"{name!r} is being imported already"):
        load_registry([name])


@pytest.mark.parametrize("name", ["shop/agents.py", "shop.agents.py", "shop:support", "", "shop..agents", "my-agents"])
def test_a_name_that_is_no_modules_is_refused(name: str) -> None:
    """People write paths; the message shows what to write instead."""
    with pytest.raises(ConfigurationError, match="is not a module's dotted name"):
        load_registry([name])


def test_a_module_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A console script doesn't look there by itself, and a newcomer's agents are just there."""
    (tmp_path / "agents_of_a_test_here.py").write_text(HEADER + "support = Agent('support', model)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert load_registry(["agents_of_a_test_here"]).names() == ["support"]
    assert sys.path[-1] == str(tmp_path)
    del sys.modules["agents_of_a_test_here"]


def test_what_modules_register_is_classified_so(module: Module) -> None:
    """A classifier beside the agents is how authors class their own exceptions."""
    shop = module(
        "shop",
        "class OutOfStock(Exception): ...\n"
        "failures = FailureClassifier({OutOfStock: FailureClass.SERVER_ERROR})\n"
        "support = Agent('support', model)\n",
    )
    classifier = load_classifier([shop])
    assert classifier.classify(sys.modules[shop].OutOfStock()) is FailureClass.SERVER_ERROR


def test_modules_that_disagree_about_an_exception_are_refused(module: Module) -> None:
    """Which one counts must not depend on the order of a setting."""
    shop = module("shop", "failures = FailureClassifier({KeyError: FailureClass.SERVER_ERROR})\n")
    desk = module("desk", "failures = FailureClassifier({KeyError: FailureClass.CLIENT_ERROR})\n")
    with pytest.raises(ConfigurationError, match=r"builtins\.KeyError is classified as SERVER_ERROR already"):
        load_classifier([shop, desk])
