"""One decision about many dead letters from a terminal: rehearsed, asked for, at a rate, and with a result for each."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click

from agentq.cli.exit_codes import ExitCode
from agentq.cli.hints import same_command
from agentq.cli.output import Format, ReaderGoneError, View, emit_list, emit_text, is_terminal, say, suggest
from agentq.cli.progress import Progress
from agentq.cli.session import ask
from agentq.domain.decisions import RUNS_PER_SECOND_MIN
from agentq.domain.errors import AgentqError, InvalidInputError
from agentq.domain.fingerprint import masked
from agentq.ports.deciding import Decided

_Function = TypeVar("_Function", bound=Callable[..., Any])

REASONS_SHOWN_MAX = 10
_UNITS = {"": 1, "/s": 1, "/m": 60, "/h": 3600}


def many_options(function: _Function) -> _Function:
    """Adds `--dry-run` and `--rate`."""
    function = click.option(
        "--rate",
        metavar="RATE",
        callback=lambda _ctx, _option, value: None if value is None else parse_rate(value),
        help="With filters: how many runs at most, such as 50 (a second) or 600/m.",
    )(function)
    return click.option(
        "--dry-run", is_flag=True, help="Do all of it and take it back: what would be done, and what would be left."
    )(function)


def parse_rate(text: str) -> float:
    """Runs a second. Raises InvalidInputError."""
    number, slash, unit = text.partition("/")
    try:
        rate = float(number) / _UNITS[slash + unit]
    except (KeyError, ValueError):
        rate = 0
    if not RUNS_PER_SECOND_MIN <= rate <= 1_000_000:  # noqa: PLR2004 - also turns down what isn't finite
        raise InvalidInputError(f"rate is {text!r}; it takes so many runs a second, or as 600/m or 1000/h")
    return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A decision in words."""

    command: str
    question: str
    past: str


@dataclass(slots=True)
class Tally:
    """What has become of the runs so far. `why` counts refusals of a kind, `first` has the first of each as it was."""

    done: int = 0
    left: int = 0
    why: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, decided: Sequence[Decided]) -> None:
        for one in decided:
            if one.refusal is None:
                self.done += 1
            else:
                self.left += 1
                kind = masked(str(one.refusal))
                self.why[kind] += 1
                self.first.setdefault(kind, str(one.refusal))

    @property
    def exit_code(self) -> ExitCode:
        if self.left == 0:
            return ExitCode.DONE
        return ExitCode.PARTLY_DONE if self.done else ExitCode.REFUSED


def decide_about_many(
    verb: Verb,
    decide: Callable[..., Iterator[list[Decided]]],
    *,
    matching: int,
    open_count: int,
    dry_run: bool,
    rate: float | None,
    yes: bool,
    output: Format,
) -> ExitCode:
    """Rehearse, ask, and do it. `decide` takes `dry_run` and `runs_per_second`; `matching` of the `open_count` dead
    letters match."""
    if matching == 0:
        raise InvalidInputError(f"none of the {open_count} open dead letters matches; nothing to {verb.command}")
    scope = f"{matching:,} dead letters" if matching != 1 else "1 dead letter"
    every = " (every one that is open)" if matching == open_count > 1 else f" of {open_count:,}"
    question = verb.question.format(scope + every)
    if dry_run:
        tally = Tally()
        _carry_out(decide(dry_run=True), tally, f"would be {verb.past}", matching, output)
        if output.is_for_people and tally.done:
            suggest(same_command(without="--dry-run"))
        return tally.exit_code
    if not yes and is_terminal(sys.stdin) and is_terminal(sys.stderr):
        say("rehearsing ...")
        tally = Tally()
        _carry_out(decide(dry_run=True), tally, f"would be {verb.past}", matching, Format.TABLE)
        if not tally.done:
            return tally.exit_code
    ask(question, yes=yes)
    tally = Tally()
    try:
        _carry_out(decide(runs_per_second=rate), tally, verb.past, matching, output)
    except (AgentqError, ReaderGoneError) as error:
        if not tally.done:
            raise
        if isinstance(error, AgentqError):
            say(f"error: {error}", style="red")
        return ExitCode.PARTLY_DONE
    return tally.exit_code


def _carry_out(batches: Iterator[list[Decided]], tally: Tally, past: str, matching: int, output: Format) -> None:
    progress, views = Progress(), []
    try:
        for decided in batches:
            tally.add(decided)
            for view in map(_view, decided):
                if output is Format.JSONL:
                    emit_list([view], [], output, none="")
                elif output is Format.IDS and view["done"]:
                    emit_text(view["id"])
                elif output is Format.JSON:
                    views.append(view)
            told = f"{tally.done:,} {past}, {tally.left:,} left"
            progress.show(f"{tally.done + tally.left:,} of {matching:,}: {told}")
    except BaseException:
        progress.end()
        say(f"{tally.done:,} {past}, {tally.left:,} left; the same command again goes on with the rest", style="yellow")
        if output is Format.JSON:
            emit_list(views, [], output, none="")
        raise
    progress.end()
    if output is Format.JSON:
        emit_list(views, [], output, none="")
    _conclude(tally, past)


def _conclude(tally: Tally, past: str) -> None:
    say(f"{tally.done:,} {past}{f', {tally.left:,} left:' if tally.left else ''}")
    for kind, count in tally.why.most_common(REASONS_SHOWN_MAX):
        say(f"  {count:,}{', such as' if count > 1 else ''}: {tally.first[kind]}", style="yellow")
    if len(tally.why) > REASONS_SHOWN_MAX:
        say(f"  and {len(tally.why) - REASONS_SHOWN_MAX} more reasons; -o jsonl has each")


def _view(one: Decided) -> View:
    if one.refusal is None:
        return {"id": one.run_id, "done": True}
    return {"id": one.run_id, "done": False, "error": str(one.refusal)}
