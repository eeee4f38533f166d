"""Finds the agents that a process serves in the modules that its settings name."""

import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from agentq.domain.agents import Agent, Registry
from agentq.domain.errors import ConfigurationError
from agentq.domain.failures import FailureClassifier

T = TypeVar("T")


def load_registry(modules: Sequence[str]) -> Registry:
    """Import the modules and collect the agents that they hold by name at their top level.

    The current folder is importable too, after everything installed. Raises ConfigurationError, in one line that names
    the module, for one that can't be imported, is being imported already, or holds no agent; and for two agents or two
    tools of one name.
    """
    homes: dict[str, tuple[Agent, str]] = {}
    for name in modules:
        found = list(_objects(_import(name), Agent))
        if not found:
            raise ConfigurationError(
                f"agents module {name!r} defines no Agent at its top level; define one, or remove it"
            )
        for agent in found:
            known, home = homes.setdefault(agent.name, (agent, name))
            if known is not agent:
                where = f"twice in {name!r}" if home == name else f"in {home!r} and in {name!r}"
                raise ConfigurationError(f"agent {agent.name!r} is defined {where}; rename one")
    return Registry(agent for agent, _ in homes.values())


def load_classifier(modules: Sequence[str]) -> FailureClassifier:
    """The table, with what the modules' own FailureClassifier objects register. Raises ConfigurationError."""
    merged = FailureClassifier()
    for name in modules:
        for classifier in _objects(_import(name), FailureClassifier):
            for exception_type, failure_class in classifier.registered.items():
                merged.register(exception_type, failure_class)
    return merged


def _objects(module: ModuleType, kind: type[T]) -> Iterator[T]:
    """Those of that kind which the module's names hold, each once."""
    seen: set[int] = set()
    for value in list(vars(module).values()):
        if isinstance(value, kind) and id(value) not in seen:
            seen.add(id(value))
            yield value


def _import(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")) or name.endswith(".py"):
        raise ConfigurationError(f"agents module {name!r} is not a module's dotted name, such as 'shop.agents'")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # A console script doesn't have it; last, so that no file here hides a library.
    try:
        module = import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"agents module {name!r} can't be imported: {_cause(error)}") from error
    if getattr(module.__spec__, "_initializing", False):
        raise ConfigurationError(
            f"agents module {name!r} is being imported already: it, or what it imports, loads the agents itself; "
            "let it only define them"
        )
    return module


def _cause(error: BaseException) -> str:
    """The error as one line, with the last place in the author's own code that led to it."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_authors(frame.filename)]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text}{where}"


def _is_authors(filename: str) -> bool:
    """Not the import machinery, not a library, not agentq."""
    path = Path(filename)
    return not (
        filename.startswith("<")
        or {"importlib", "site-packages"} & set(path.parts)
        or path.is_relative_to(Path(__file__).parents[1])
    )
