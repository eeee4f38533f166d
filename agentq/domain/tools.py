"""A tool: a typed function that a model may call, with the effect on the world that it declares."""

import asyncio
import inspect
import logging
import re
import threading
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf, isfinite
from typing import Any, TypeVar, overload

from agentq.domain.effects import ToolEffect
from agentq.domain.errors import AgentqError, ConfigurationError
from agentq.domain.model import Json
from agentq.domain.probes import Probe, ProbeAnswer, ProbeReport, ProbeVerdict, read_probe
from agentq.domain.tool_signature import ToolSignature, read_signature

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

NAME_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")  # What the Chat Completions API takes.


class ToolError(AgentqError):
    """Raised by a tool that failed in a way the model should hear of.

    For a write it says nothing of what became of it, unless `nothing_happened`: then the receiver refused for certain.
    """

    def __init__(self, message: str, *, nothing_happened: bool = False) -> None:
        super().__init__(message)
        self.nothing_happened = nothing_happened


class ResultNotJsonError(AgentqError):
    """The tool did its work, but what it returned can't be stored as JSON. Of a write: it happened, result not kept."""


def _never_cancelled() -> bool:
    return False


def _unlimited_seconds() -> float:
    return inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """What a tool may know of the attempt that calls it. The defaults are for the unit tests of tools.

    `idempotency_key` is the same for every attempt of a call and never that of another call. `attempts_left` counts
    the tries after this one.
    """

    run_id: str = "run"
    step: int = 1
    attempt: int = 1
    attempts_left: int = 0
    idempotency_key: str = "key"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    seconds_left: Callable[[], float] = _unlimited_seconds
    cancel_requested: Callable[[], bool] = _never_cancelled
    logger: "logging.Logger | logging.LoggerAdapter[logging.Logger]" = field(
        default_factory=lambda: logging.getLogger("agentq.tool")
    )

    @property
    def deadline_seconds(self) -> float:
        """How long the call may still take; 0 when its time is over."""
        return max(0.0, self.seconds_left())

    @property
    def is_cancelled(self) -> bool:
        """True: somebody asked to cancel the run. A long call may look now and then, and stop early."""
        return self.cancel_requested()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tool:
    """A function that models may call. Made by `@tool`; calling it calls the plain function.

    `deadline_seconds` None: the setting's default. `settles_within_seconds` None: nobody can say how long the receiver
    may still act after the deadline, so only a person can rule that a call didn't happen.
    `unknown_is_dead_letter`: an UNKNOWN failure of this read stops the run instead of being told to the model.
    """

    name: str
    description: str
    effect: ToolEffect
    function: Callable[..., Any]
    signature: ToolSignature
    deadline_seconds: float | None = None
    settles_within_seconds: float | None = None
    unknown_is_dead_letter: bool = False
    _probes: list[Probe] = field(default_factory=list, repr=False)  # None or one; declared after the tool is made.

    @property
    def has_probe(self) -> bool:
        """True: the outside world can be asked what became of a call."""
        return bool(self._probes)

    def probe(self, function: Function) -> Function:
        """Decorates the function that asks the outside world what became of one call, sync or async.

        It takes the tool's own arguments and, if it wants one, a ToolContext with the call's idempotency key; it
        returns a ProbeAnswer. It must only read, and may run again. Raises ConfigurationError.
        """
        if not self.effect.is_write:
            raise ConfigurationError(f"tool {self.name!r} only reads, so its calls need no probe; remove it")
        if self._probes:
            raise ConfigurationError(f"tool {self.name!r} has a probe already; one answers for it")
        its = read_probe(function, tool=self.name, signature=self.signature, context_type=ToolContext)
        self._probes.append(its)
        return function

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments."""
        return self.signature.parameters

    @property
    def origin(self) -> str:
        """Where its function is defined, to name it in messages."""
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def schema(self) -> dict[str, Any]:
        """The tool as the Chat Completions API wants it."""
        described = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}

    def problem_with(self, arguments: object) -> str | None:
        """One line for the model that says what is wrong with these arguments; None: nothing is."""
        checked = self.signature.check(arguments)
        return f"invalid arguments for {self.name}: {checked}" if isinstance(checked, str) else None

    def call(self, context: ToolContext, arguments: dict[str, Any]) -> Json:
        """Call the function with these arguments, coerced to its hints, and return its result as JSON.

        An async function gets an event loop of its own; when the context's time is over it is cancelled, which raises
        TimeoutError. Raises whatever the function raises; ToolError with `nothing_happened`, without calling it, for
        arguments that don't fit; ResultNotJsonError after it.
        """
        return _to_json(self.name, _call(self.name, self.function, self.signature, context, arguments))

    def ask(self, context: ToolContext, arguments: dict[str, Any]) -> ProbeReport:
        """Ask the probe what became of the call with these arguments; an answer that is none counts as "can't tell".

        Raises whatever the probe raises, and ResultNotJsonError for a call that happened with such a result.
        """
        (probe,) = self._probes
        answer = _call(f"the probe of {self.name}", probe.function, probe.signature, context, arguments)
        if not isinstance(answer, ProbeAnswer):
            logger.error("the probe of %s returned %s, no ProbeAnswer", self.name, type(answer).__name__)
            return ProbeReport(verdict=ProbeVerdict.CANT_TELL, error=f"it returned {type(answer).__name__}")
        return ProbeReport(verdict=answer.verdict, result=_to_json(f"the probe of {self.name}", answer.result))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The plain function, for unit tests and for other code."""
        return self.function(*args, **kwargs)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *,
    effect: ToolEffect = ...,
    name: str | None = ...,
    description: str | None = ...,
    deadline: float | timedelta | None = ...,
    settles_within: float | timedelta | None = ...,
    unknown_is_dead_letter: bool = ...,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    effect: ToolEffect = ToolEffect.READ_ONLY,
    name: str | None = None,
    description: str | None = None,
    deadline: float | timedelta | None = None,
    settles_within: float | timedelta | None = None,
    unknown_is_dead_letter: bool = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a typed function, sync or async: `@tool` for a read, `@tool(effect=...)` for a write.

    The name defaults to the function's, the description to its docstring's first paragraph. Durations are seconds or
    timedeltas. A parameter annotated `ToolContext` gets the context and is not shown to the model.

    Raises ConfigurationError that names the tool, and the parameter where it is one's fault.
    """

    def make(function: Callable[..., Any]) -> Tool:
        return _make(
            function,
            effect=effect,
            name=name,
            description=description,
            deadline_seconds=_seconds("deadline", deadline),
            settles_within_seconds=_seconds("settles_within", settles_within),
            unknown_is_dead_letter=unknown_is_dead_letter,
        )

    return make if function is None else make(function)


def _make(
    function: Callable[..., Any],
    *,
    effect: ToolEffect,
    name: str | None,
    description: str | None,
    deadline_seconds: float | None,
    settles_within_seconds: float | None,
    unknown_is_dead_letter: bool,
) -> Tool:
    if isinstance(function, Tool):
        raise ConfigurationError(f"{function.origin} is a tool already; decorate it once")
    if not inspect.isroutine(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{function!r} can't be a tool; decorate a function that returns its result")
    name = function.__name__ if name is None else name
    _check_name(name)
    _check_effect(name, effect)
    if deadline_seconds == 0:
        raise ConfigurationError(f"tool {name!r} declares a deadline of 0 seconds; it must be greater than 0")
    if settles_within_seconds is not None and not effect.is_write:
        raise ConfigurationError(f"tool {name!r} declares settles_within, but no write; declare its effect")
    if unknown_is_dead_letter and effect.is_write:
        raise ConfigurationError(f"tool {name!r} writes, so unknown_is_dead_letter goes without saying; remove it")
    if settles_within_seconds is None and effect is ToolEffect.IDEMPOTENT_WRITE:
        settles_within_seconds = 0.0  # Its key makes a repetition harmless, whatever the receiver still does.
    signature = read_signature(function, tool=name, context_type=ToolContext)
    return Tool(
        name=name,
        description=signature.docstring.description if description is None else description,
        effect=effect,
        function=function,
        signature=signature,
        deadline_seconds=deadline_seconds,
        settles_within_seconds=settles_within_seconds,
        unknown_is_dead_letter=unknown_is_dead_letter,
    )


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise ConfigurationError(f"tool name {name!r} is not one that models take; use 1 to 64 of A-Z a-z 0-9 _ -")


def _check_effect(name: str, effect: object) -> None:
    """Not even the right text will do: what writes is found by reading the code."""
    if not isinstance(effect, ToolEffect):
        choices = ", ".join(f"ToolEffect.{choice.name}" for choice in ToolEffect)
        raise ConfigurationError(f"tool {name!r} declares the effect {effect!r}; choose from {choices}")


def _seconds(what: str, duration: object) -> float | None:
    if duration is None:
        return None
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not isfinite(seconds) or seconds < 0:
        raise ConfigurationError(f"{what} is {duration!r}; give seconds or a timedelta, not below 0")
    return float(seconds)


def _call(
    name: str, function: Callable[..., Any], signature: ToolSignature, context: ToolContext, arguments: dict[str, Any]
) -> Any:
    checked = signature.check(arguments)
    if isinstance(checked, str):
        raise ToolError(f"invalid arguments for {name}: {checked}", nothing_happened=True)
    if signature.context_parameter is not None:
        checked[signature.context_parameter] = context
    result = function(**checked)
    return _await(result, context.deadline_seconds) if inspect.isawaitable(result) else result


def _await(awaitable: Any, timeout_seconds: float) -> Any:
    """Wait for it in an event loop of its own; in a thread of its own where this one's loop is running already."""

    async def wait() -> Any:
        async with asyncio.timeout(timeout_seconds if isfinite(timeout_seconds) else None):
            return await awaitable

    def run() -> Any:
        try:
            return asyncio.run(wait())
        except asyncio.CancelledError as error:  # Not an Exception: it would pass through whoever handles failures.
            raise RuntimeError("the tool cancelled itself") from error

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    return _in_thread(run)


def _in_thread(function: Callable[[], Any]) -> Any:
    outcome: dict[str, Any] = {}
    context = copy_context()

    def run() -> None:
        try:
            outcome["result"] = context.run(function)
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, name="agentq-async-tool", daemon=True)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


def _to_json(name: str, result: Any) -> Json:
    from pydantic_core import to_jsonable_python  # noqa: PLC0415 - whoever only enqueues has no tools

    try:
        converted: Json = to_jsonable_python(result)
    except Exception as error:  # Whatever it is, the call was made: it must not look like a failed one.
        problem = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}").strip()
        raise ResultNotJsonError(f"the result of {name} ({type(result).__name__}) is not JSON: {problem}") from error
    return converted
