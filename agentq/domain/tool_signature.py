"""What a tool takes, read from its function's signature: a JSON schema for the model, and a check of its arguments.

Hints are checked in pydantic's strict mode as JSON: `"5"` is no integer, while a date is a string that holds one.
`Annotated[int, Field(strict=False)]` loosens one parameter; a pydantic model keeps its own rules.
"""

import inspect
import json
import re
import typing
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from agentq.domain.docstrings import Docstring, parse_docstring
from agentq.domain.errors import ConfigurationError

PROBLEMS_SHOWN_MAX = 5
SHOWN_LENGTH_MAX = 60

Problem = str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSignature:
    """What `read_signature` found.

    `check` returns the arguments as the function wants them, or one line that says what is wrong with them.
    """

    docstring: Docstring
    parameters: Mapping[str, Any]
    context_parameter: str | None
    check: Callable[[object], dict[str, Any] | Problem]


def read_signature(function: Callable[..., Any], *, tool: str, context_type: type) -> ToolSignature:
    """Read a function's signature. Raises ConfigurationError that names the tool and the parameter."""
    hints = _hints(function, tool)
    context_parameters = [name for name, (hint, _) in hints.items() if _without_extras(hint) is context_type]
    if len(context_parameters) > 1:
        raise ConfigurationError(f"tool {tool!r} takes two contexts, {' and '.join(context_parameters)}; one is enough")
    for name in context_parameters:
        del hints[name]
    docstring = parse_docstring(inspect.getdoc(inspect.unwrap(function)) or "")
    model, names = _arguments_model(tool, hints, docstring)
    defaulted = {name for name, (_, default) in hints.items() if _is_plain_default(default)}
    return ToolSignature(
        docstring=docstring,
        parameters=_json_schema(model),
        context_parameter=context_parameters[0] if context_parameters else None,
        check=lambda arguments: _check(model, names, defaulted, arguments),
    )


def _hints(function: Callable[..., Any], tool: str) -> dict[str, tuple[Any, Any]]:
    """Each parameter's hint and default (`inspect.Parameter.empty` without one)."""
    plain = inspect.unwrap(function)
    namespace = getattr(plain, "__globals__", {})
    hints: dict[str, tuple[Any, Any]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        where = f"parameter {name!r} of tool {tool!r}"
        match parameter.kind:
            case parameter.VAR_POSITIONAL | parameter.VAR_KEYWORD:
                raise ConfigurationError(f"{where} takes any number of arguments; a model needs to know each by name")
            case parameter.POSITIONAL_ONLY:
                raise ConfigurationError(f"{where} is positional-only; a model calls by name, so remove the '/'")
        if parameter.annotation is parameter.empty:
            raise ConfigurationError(f"{where} has no type hint; add one (or ToolContext, if it is the context)")
        try:
            hint = typing.get_type_hints(
                SimpleNamespace(__annotations__={name: parameter.annotation}), namespace, include_extras=True
            )[name]
        except Exception as error:
            problem = f"{type(error).__name__}: {_one_line(error)}"
            raise ConfigurationError(f"the type hint of {where} can't be read: {problem}") from error
        hints[name] = (hint, parameter.default)
    return hints


def _without_extras(hint: Any) -> Any:
    """The type itself, of an `Annotated` one too."""
    return hint.__origin__ if typing.get_origin(hint) is typing.Annotated else hint


def _arguments_model(tool: str, hints: dict[str, tuple[Any, Any]], docstring: Docstring) -> tuple[Any, dict[str, str]]:
    """A pydantic model of the arguments, with the parameters' names by those of the model's fields.

    The fields have names of their own: a parameter may be called `json` or `_id`, which a model's field may not.
    """
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for index, (name, (hint, default)) in enumerate(hints.items()):
        field = _field(name, hint, default, docstring.parameters.get(name))
        try:
            _json_schema(_create_model(tool, {"argument": field}))
        except Exception as error:
            raise ConfigurationError(
                f"the type hint of parameter {name!r} of tool {tool!r} can't become a JSON schema: "
                f"{_first_sentence(error)}; use JSON-like types, dataclasses or pydantic models"
            ) from error
        fields[f"argument_{index}"] = field
        names[f"argument_{index}"] = name
    return _create_model(tool, fields), names


def _create_model(tool: str, fields: dict[str, Any]) -> Any:
    from pydantic import ConfigDict, create_model  # noqa: PLC0415 - whoever only enqueues has no tools

    return create_model(tool, __config__=ConfigDict(strict=True, extra="forbid"), **fields)


def _field(name: str, hint: Any, default: Any, description: str | None) -> tuple[Any, Any]:
    from pydantic import Field  # noqa: PLC0415 - as above
    from pydantic.fields import FieldInfo  # noqa: PLC0415 - as above

    described = any(isinstance(extra, FieldInfo) and extra.description for extra in getattr(hint, "__metadata__", ()))
    settings: dict[str, Any] = {"alias": name, "validation_alias": name, "serialization_alias": name}
    if description and not described:
        settings["description"] = description
    if _is_plain_default(default):
        settings["default"] = default
    elif isinstance(default, FieldInfo):
        hint = typing.Annotated[hint, default]
    return (hint, Field(**settings))


def _is_plain_default(default: object) -> bool:
    """False for no default at all, and for one that is written as pydantic's `Field(...)`."""
    from pydantic.fields import FieldInfo  # noqa: PLC0415 - as above

    return default is not inspect.Parameter.empty and not isinstance(default, FieldInfo)


def _json_schema(model: Any) -> dict[str, Any]:
    from pydantic.json_schema import GenerateJsonSchema  # noqa: PLC0415 - as above

    class Generator(GenerateJsonSchema):
        """A default that is no JSON is left out, without a warning: the function still has it."""

        ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - it overrides a plain one

    schema: dict[str, Any] = _without_titles(model.model_json_schema(schema_generator=Generator))
    schema.setdefault("properties", {})
    return schema


_KEYS_WITH_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "dependentSchemas"})
_KEYS_WITH_DATA = frozenset({"default", "examples", "enum", "const", "required", "mapping"})


def _without_titles(schema: Any) -> Any:
    """The schema without its `title`s: they only repeat names, at the cost of tokens in every model turn."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _KEYS_WITH_DATA:
            kept[key] = value
        elif key in _KEYS_WITH_SCHEMAS_BY_NAME:
            kept[key] = {name: _without_titles(inner) for name, inner in value.items()}
        elif key != "title":
            kept[key] = _without_titles(value)
    return kept


def _check(
    model: Any, names: Mapping[str, str], defaulted: Container[str], arguments: object
) -> dict[str, Any] | Problem:
    """The arguments by parameter; one that was not given is left out where the function has a default of its own."""
    from pydantic import ValidationError  # noqa: PLC0415 - as above

    if not isinstance(arguments, dict):
        return f"the arguments must be a JSON object, not {_shown(arguments)}"
    try:
        checked = model.model_validate_json(json.dumps(arguments))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        more = f" (and {len(problems) - PROBLEMS_SHOWN_MAX} more)" if len(problems) > PROBLEMS_SHOWN_MAX else ""
        return "; ".join(_problem(problem) for problem in problems[:PROBLEMS_SHOWN_MAX]) + more
    except Exception as error:  # Of a validator of the tool's author: to the model it is a bad argument all the same.
        return f"the arguments can't be used: {type(error).__name__}: {_one_line(error)}"
    given = checked.model_fields_set
    return {name: getattr(checked, field) for field, name in names.items() if field in given or name not in defaulted}


def _problem(problem: Any) -> str:
    where = _shortened(_one_line(".".join(str(part) for part in problem["loc"])))
    message = _one_line(problem["msg"])
    match problem["type"]:
        case "missing":
            return f"{where}: required"
        case "extra_forbidden":
            return f"{where}: no such parameter"
        case _:
            return f"{where}: {message}, got {_shown(problem['input'])}" if where else message


def _shown(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_LENGTH_MAX else text[:SHOWN_LENGTH_MAX] + "..."


def _one_line(problem: object) -> str:
    return re.sub(r"\s+", " ", str(problem)).strip()


def _first_sentence(problem: object) -> str:
    return re.split(r"\. | For further information", _one_line(problem))[0].rstrip(".")
