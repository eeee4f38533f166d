"""Asking the outside world about a call: what a tool's probe may answer, and the probe itself."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from agentq.domain.errors import ConfigurationError
from agentq.domain.model import Json
from agentq.domain.tool_signature import ToolSignature, read_signature


class ProbeVerdict(StrEnum):
    """What a probe said of a call. `FAILED`: it raised instead of answering."""

    HAPPENED = "happened"
    DID_NOT_HAPPEN = "did_not_happen"
    NOT_YET = "not_yet"
    CANT_TELL = "cant_tell"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What became of a call, by the word of whoever received it. Made by the four methods below."""

    verdict: ProbeVerdict
    result: Any = None

    @classmethod
    def happened(cls, result: Any = None) -> Self:
        """The call took effect. `result` is what the tool would have returned: the run goes on with it."""
        return cls(ProbeVerdict.HAPPENED, result)

    @classmethod
    def did_not_happen(cls) -> Self:
        """Nothing of it is there. Believed only of a look after the deadline plus `settles_within`; asked again until
        then, because the request may still be under way."""
        return cls(ProbeVerdict.DID_NOT_HAPPEN)

    @classmethod
    def not_yet(cls) -> Self:
        """The receiver has the request and still works on it: ask again."""
        return cls(ProbeVerdict.NOT_YET)

    @classmethod
    def cant_tell(cls) -> Self:
        """Nobody can know from there: a person must decide."""
        return cls(ProbeVerdict.CANT_TELL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A tool's function that asks about one call, with what it takes. It is a read: it may run again."""

    function: Callable[..., Any]
    signature: ToolSignature


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What a probe said: `result` (JSON) with HAPPENED; `error` for what can't be used, and whether asking again may
    help."""

    verdict: ProbeVerdict
    result: Json = None
    error: str | None = None
    is_worth_repeating: bool = False

    @property
    def may_change(self) -> bool:
        """Asked again later, it may say something else."""
        if self.verdict is ProbeVerdict.FAILED:
            return self.is_worth_repeating
        return self.verdict is not ProbeVerdict.CANT_TELL


def read_probe(function: Callable[..., Any], *, tool: str, signature: ToolSignature, context_type: type) -> Probe:
    """The function as that tool's probe. Raises ConfigurationError when the tool's arguments don't fit it."""
    if not inspect.isroutine(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{function!r} can't be the probe of {tool!r}; decorate a function")
    its = read_signature(function, tool=f"{tool}.probe", context_type=context_type)
    wanted, given = _shapes(signature.parameters), _shapes(its.parameters)
    missing, unknown = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    if missing or unknown:
        what = f"lacks {', '.join(map(repr, missing))}" if missing else f"takes {', '.join(map(repr, unknown))} besides"
        raise ConfigurationError(f"the probe of {tool!r} {what}; give it the same parameters as the tool")
    for name, shape in wanted.items():
        if given[name] != shape:
            raise ConfigurationError(
                f"the probe of {tool!r} has another type or default for {name!r}; give it the tool's"
            )
    return Probe(function=function, signature=its)


def _shapes(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Each parameter's schema and whether it must be given, without the description that no value depends on."""
    required = parameters.get("required", ())
    return {
        name: ({key: value for key, value in schema.items() if key != "description"}, name in required)
        for name, schema in parameters["properties"].items()
    }
