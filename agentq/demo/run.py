"""`agentq demo`: real parts, a worker killed in the middle of a refund, and what becomes of everything."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Any, TextIO

import click

from agentq.bootstrap import Wiring
from agentq.client import AgentQ
from agentq.config.settings import PREFIX, Settings, load_settings
from agentq.demo.parts import PartFailedError, Parts, ended_by_signals, started_parts, temporary_home
from agentq.demo.promises import Seen, promises
from agentq.demo.shop import ARCHIVED_ORDERS, HELD_REFUND
from agentq.demo.shop_client import ShopClient, requests_by_order
from agentq.demo.tickets import TICKETS, Ticket
from agentq.demo.view import View, is_for_person, opened_view
from agentq.demo.watch import Sight, Watcher
from agentq.domain.agents import Agent
from agentq.domain.errors import AgentqError, ConfigurationError
from agentq.domain.events import EventKind
from agentq.domain.model import DeadLetter, Step, StepState
from agentq.services.enqueue import EnqueueRequest

LEASE_SECONDS = 3.0
OPERATION_DEADLINE_SECONDS = 5.0
KEEPER_INTERVAL_SECONDS = 0.5
LOOK_SECONDS = 0.1
KILL_SECONDS_MAX = 3.0  # After the refund was committed: well before its call would have ended by itself.
STORY_SECONDS_MAX = 60.0
STORY_WITH_MODEL_SECONDS_MAX = 300.0
DONE, BROKEN = 0, 1
AGENTQ = (sys.executable, "-m", "agentq.cli.main")
BASE_URL = f"{PREFIX}OPENAI_BASE_URL"


class StoryFailedError(AgentqError):
    """What the demo is about did not come to pass; the text says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A worker was killed in the middle of a refund, and everything that it left behind was seen to.

    `refund` and `reads` are its steps as they were then; `payment` is the refund as the payment service holds it.
    """

    ticket: Ticket
    refund: Step
    reads: Sequence[Step]
    payment: Mapping[str, Any]
    dead_letters: Sequence[DeadLetter]
    recovery_seconds: float


def main(*, model: str | None, as_json: bool) -> int:
    """Play the demo; the exit code: 0 when every promise was kept, 1 otherwise.

    `model` such as `openai:gpt-5-mini` takes the place of the built-in function. With `as_json` stdout gets one object
    and nothing else, and a person follows on stderr. Raises ConfigurationError before anything is started. Nothing
    that is started outlives this call.
    """
    base_url = _base_url(model)
    stream = sys.stderr if as_json else sys.stdout
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")  # A terminal without these signs shows others, rather than nothing more.
    began = time.monotonic()
    with ended_by_signals(), temporary_home() as home:
        settings = Settings(
            home=home,
            agents=("agentq.demo.agents",),
            lease_seconds=LEASE_SECONDS,
            operation_deadline_seconds=OPERATION_DEADLINE_SECONDS,
            keeper_interval_seconds=KEEPER_INTERVAL_SECONDS,
            openai_base_url=base_url,
        )
        try:
            seen = _play(settings, model, stream)
        except (PartFailedError, StoryFailedError) as error:
            sys.stderr.write(f"the demo failed: {error}\n")
            return BROKEN
    are_kept = _show_promises(seen, stream, took_seconds=time.monotonic() - began)
    if as_json:
        sys.stdout.write(f"{json.dumps(seen.summary())}\n")
    return DONE if are_kept else BROKEN


def _base_url(model: str | None) -> str:
    """Where the model is, empty for the SDK's default. Raises ConfigurationError when it can't be asked."""
    settings = load_settings({name: value for name, value in os.environ.items() if name == BASE_URL})
    if model is None:
        return settings.openai_base_url
    Agent(name="support", model=model)
    if not (settings.openai_base_url or os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_KEY")):
        raise ConfigurationError(
            f"--model {model} can't be asked: set OPENAI_API_KEY, or {BASE_URL} to a server of your own"
        )
    return settings.openai_base_url


def _play(settings: Settings, model: str | None, stream: TextIO) -> Seen:
    """The story, from the start of the parts to their end."""
    _introduce(settings, stream)
    with ExitStack() as ending:
        with opened_view(stream) as view:
            view.tell("starting Valkey, the shop and two workers")
            parts = ending.enter_context(started_parts(settings, model=model))
            wiring = ending.enter_context(Wiring(settings))
            watcher = Watcher(wiring, _enqueued(wiring))
            pids = {**{f"worker {name}": pid for name, pid in watcher.pids.items()}, "Valkey": parts.valkey.pid}
            running = [f"{name} is pid {pid}" for name, pid in pids.items()]
            view.tell(f"{', '.join(running)}, the shop is {parts.shop.url}")
            look = _Looking(watcher, view, parts, seconds_max=_story_seconds_max(model))
            incident = _incident(look, watcher, parts.shop, view)
        _decide(incident, settings, stream)
        run = look.until(
            lambda sight: sight.runs[incident.ticket].status.is_terminal, "the replayed run came to its end"
        ).runs[incident.ticket]
        _write(stream, f"\nTicket {incident.ticket.number}: {run.status}. {run.output or run.error}\n")
        return Seen(
            runs=list(watcher.look().runs.values()),
            dead_letters=incident.dead_letters,
            interrupted=incident.refund,
            reads_interrupted=incident.reads,
            reads_expected=model is None,
            resolved=sum(event.kind == EventKind.WRITE_RESOLVED for event in AgentQ(wiring=wiring).events(run.id)),
            refund_requests=requests_by_order(parts.shop.refunds()),
            recovery_seconds=incident.recovery_seconds,
        )


def _enqueued(wiring: Wiring) -> dict[Ticket, str]:
    """The run of each ticket."""
    client = AgentQ(wiring=wiring)
    requests = [EnqueueRequest(agent="support", input=ticket.text, idempotency_key=ticket.key) for ticket in TICKETS]
    return dict(zip(TICKETS, client.enqueue_many(requests), strict=True))


class _Looking:
    """Looks again and again, shows it, and gives up after a while."""

    def __init__(self, watcher: Watcher, view: View, parts: Parts, *, seconds_max: float) -> None:
        self._watcher = watcher
        self._view = view
        self._parts = parts
        self._seconds_max = seconds_max

    def until(self, condition: Callable[[Sight], bool], what: str) -> Sight:
        """The first sight for which the condition holds. Raises StoryFailedError when that takes too long."""
        given_up_at = time.monotonic() + self._seconds_max
        while not condition(sight := self._watcher.look()):
            self._view.show(sight)
            if time.monotonic() > given_up_at:
                raise StoryFailedError(
                    f"it was not seen within {self._seconds_max:.0f} s that {what}\n{self._parts.last_words()}"
                )
            time.sleep(LOOK_SECONDS)
        self._view.show(sight)
        return sight


def _incident(look: _Looking, watcher: Watcher, shop: ShopClient, view: View) -> Incident:
    """Kill the worker that has the shop's held refund in flight, and see what becomes of what it leaves behind."""
    look.until(lambda sight: _held_refund(sight) is not None, f"the refund of order {HELD_REFUND} was called")
    look.until(lambda sight: shop.refund_of(HELD_REFUND) is not None, "the payment service committed that refund")
    kill_by = time.monotonic() + KILL_SECONDS_MAX
    sight = look.until(
        lambda sight: _reads_beside_refund(sight, watcher) or time.monotonic() > kill_by, "its worker also reads"
    )
    payment, found = shop.refund_of(HELD_REFUND), _held_refund(sight)
    if payment is None or found is None:
        raise StoryFailedError(f"the refund of order {HELD_REFUND} was over before its worker could be killed")
    ticket, refund, owner = found
    worker = watcher.worker_of(owner)
    if worker is None:
        raise StoryFailedError(
            f"the refund of order {HELD_REFUND} is called by {owner}, which is no worker of the demo"
        )
    reads = [step for step in sight.steps_held_by(worker) if not step.effect.is_write and step.tool]
    watcher.kill(worker)
    killed_at = time.monotonic()
    view.tell(
        f"SIGKILL to worker {worker}, in the middle of the refund of order {HELD_REFUND}: the payment service has it "
        f"({payment['refund_id']}), its reply is not stored. {_cut_off(reads)}",
        "bold red",
    )
    shop.release()
    look.until(lambda sight: _are_seen_to(sight, [refund, *reads]), "what the killed worker left behind was taken up")
    recovery_seconds = time.monotonic() - killed_at
    sight = look.until(lambda sight: all(run.status.is_terminal for run in sight.runs.values()), "the other runs ended")
    return Incident(
        ticket=ticket,
        refund=refund,
        reads=reads,
        payment=payment,
        dead_letters=[run.dead_letter for run in sight.runs.values() if run.dead_letter],
        recovery_seconds=recovery_seconds,
    )


def _held_refund(sight: Sight) -> tuple[Ticket, Step, str] | None:
    """The refund whose reply the shop holds back, while it is in flight: its ticket, step and owner."""
    for ticket, run in sight.runs.items():
        fence = run.pending_effect
        for step in run.steps:
            is_fenced = fence is not None and fence.number == step.number and step.tool == "refund_order"
            if fence is not None and is_fenced and _order_of(step) == HELD_REFUND:
                return ticket, step, fence.owner
    return None


def _reads_beside_refund(sight: Sight, watcher: Watcher) -> bool:
    """True: the worker of the held refund executes a read at the same moment, whose reply the shop holds back too."""
    found = _held_refund(sight)
    worker = watcher.worker_of(found[2]) if found else None
    return worker is not None and bool(_held_reads(sight, worker))


def _held_reads(sight: Sight, worker: str) -> list[Step]:
    steps = sight.steps_held_by(worker)
    return [step for step in steps if step.tool == "look_up_order" and _order_of(step) in ARCHIVED_ORDERS]


def _cut_off(reads: Sequence[Step]) -> str:
    if not reads:
        return "It was reading nothing."
    return f"It was also looking up order {', '.join(str(_order_of(step)) for step in reads)}."


def _are_seen_to(sight: Sight, left_behind: Sequence[Step]) -> bool:
    now = {(step.run_id, step.number): step for run in sight.runs.values() for step in run.steps}
    over = (StepState.COMPLETED, StepState.DEAD_LETTERED)
    return all(now[step.run_id, step.number].state in over for step in left_behind)


def _order_of(step: Step) -> object:
    return step.arguments.get("order_id") if isinstance(step.arguments, dict) else None


def _decide(incident: Incident, settings: Settings, stream: TextIO) -> None:
    """What a person does about the dead letter, by the very commands."""
    run_id = incident.refund.run_id
    _write(stream, "\nThe dead letter, as a person finds it:\n")
    _write(stream, f"$ export {PREFIX}HOME={settings.home}", style="bold")
    _command(settings, stream, "dead-letters", "show", run_id)
    payment = json.dumps(incident.payment)
    _write(stream, f"\nDid it happen? The payment service says so: {payment}\n")
    reason = f"the payment service has {incident.payment['refund_id']}"
    _command(settings, stream, "dead-letters", "resolve", run_id, "--happened", payment, "--reason", reason, "--yes")
    _command(settings, stream, "dead-letters", "replay", run_id, "--yes")


def _command(settings: Settings, stream: TextIO, *words: str) -> None:
    """Print the command as a person would type it, and execute it. Raises StoryFailedError when it fails."""
    _write(stream, f"$ agentq {shlex.join(words)}", style="bold")
    stream.flush()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    done = subprocess.run(
        (*AGENTQ, *words),
        env={**inherited, f"{PREFIX}HOME": str(settings.home)},
        stdin=subprocess.DEVNULL,
        stdout=stream.fileno(),
        stderr=stream.fileno(),
        check=False,
    )
    if done.returncode:
        raise StoryFailedError(f"agentq {words[0]} {words[1]} ended with exit code {done.returncode}")


def _introduce(settings: Settings, stream: TextIO) -> None:
    shortened = [
        f"{PREFIX}{name.upper()} {getattr(settings, name):g} (default {getattr(Settings(), name):g})"
        for name in ("lease_seconds", "operation_deadline_seconds", "keeper_interval_seconds")
    ]
    _write(
        stream, "agentq demo: six support tickets, two workers, and a SIGKILL in the middle of a refund.", style="bold"
    )
    _write(stream, f"Shortened to fit into half a minute: {', '.join(shortened)}.\n")


def _show_promises(seen: Seen, stream: TextIO, *, took_seconds: float) -> bool:
    """Whether all were kept."""
    checked = promises(seen)
    for promise in checked:
        mark, style = ("✓", "green") if promise.is_kept else ("✗ BROKEN:", "red")
        _write(stream, f"{mark} {promise.text}", style=style)
    _write(
        stream,
        f"\nRecovered {seen.recovery_seconds:.1f} s after the SIGKILL; the demo took {took_seconds:.0f} s. "
        "All its processes have ended, its folder is removed.",
    )
    return all(promise.is_kept for promise in checked)


def _story_seconds_max(model: str | None) -> float:
    return STORY_SECONDS_MAX if model is None else STORY_WITH_MODEL_SECONDS_MAX


def _write(stream: TextIO, text: str, *, style: str = "") -> None:
    codes = {"bold": {"bold": True}, "green": {"fg": "green"}, "red": {"fg": "red", "bold": True}}
    styled = click.style(text, **codes[style]) if style and is_for_person(stream) else text  # type: ignore[arg-type]
    stream.write(f"{styled}\n")
    stream.flush()
