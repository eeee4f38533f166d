"""A replay's plan as a person reads it: each step with what becomes of it, what is in doubt, and what can be done."""

import shlex
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from agentq.cli.cards import arguments_text
from agentq.cli.hints import suggest_probe
from agentq.cli.output import (
    EFFECT_STYLES,
    Cell,
    Column,
    View,
    ago,
    emit_card,
    emit_heading,
    emit_table,
    emit_text,
    full,
    moment_cell,
    short,
    suggest,
)
from agentq.cli.timeline import words_of
from agentq.cli.watch import worker_text
from agentq.domain.replay import Fate

if TYPE_CHECKING:
    from agentq.client import AgentQ

FOLDED_STEPS_MIN = 4  # So many recorded steps in a row are one line: what happens again mustn't drown in them.

_STYLES = {
    Fate.RECORDED: "bright_black",
    Fate.READ: "green",
    Fate.NOT_CALLED: "",
    Fate.SAME_KEY: "yellow",
    Fate.DID_NOT_HAPPEN: "yellow",
    Fate.BLOCKED: "bold red",
    Fate.NEW_KEY: "bold red",
    Fate.DECIDED_ANEW: "bright_black",
}


def show_plan(view: View) -> None:
    """The plan: the verdict first, the steps, and all that is known of what may have happened."""
    emit_card(Cell(_title(view), "red" if view["refusal"] else "green"), _facts(view))
    emit_heading("What happens")
    emit_table(list(_folded(view["steps"])), _COLUMNS)
    emit_text(f"   {view['then']}")
    for step in view["steps"]:
        if step["fence"] or step["may_have_happened"] or Fate(step["fate"]).is_dangerous:
            is_in_doubt = step["fence"] or step["may_have_happened"]
            emit_heading(f"{'In doubt' if is_in_doubt else 'Made before'}: step {step['number']}, {step['tool']}")
            for line in _doubts(step):
                emit_text(f"  {line}")


def suggest_next(client: "AgentQ", view: View) -> None:
    """The commands that a plan leads to."""
    run_id = shlex.quote(view["run_id"])
    blocked = [step for step in view["steps"] if step["fate"] == Fate.BLOCKED]
    if not view["refusal"]:
        suggest(f"agentq dead-letters replay {run_id}{_copy_options(view)} --digest {view['digest']}")
    elif view["from_step"] is not None:
        unnamed = [step["number"] for step in view["steps"] if step["fate"] == Fate.NEW_KEY and not step["is_accepted"]]
        accept = "".join(f" --repeat-write {number}" for number in unnamed)
        if accept:
            suggest(f"agentq dead-letters plan {run_id}{_copy_options(view)}{accept}")
    elif blocked and blocked[0]["fence"]:
        fence = blocked[0]["fence"]
        if fence["has_probe"]:
            suggest_probe(client, view["run_id"], fence["tool"])
        suggest(
            f"agentq dead-letters resolve {run_id} --happened '{{...}}' --reason '...'",
            f"agentq dead-letters resolve {run_id} --did-not-happen --looked-at TIME --reason '...'",
        )
    else:
        suggest(f"agentq runs show {run_id}")


def _title(view: View) -> str:
    if view["from_step"] is None:
        return f"replay of run {view['run_id']}"
    return f"copy of run {view['run_id']} from step {view['from_step']}"


def _facts(view: View) -> list[tuple[str, Cell]]:
    letter, refusal = view["dead_letter"], view["refusal"]
    facts = [
        ("verdict", Cell(f"REFUSED: {refusal}", "bold red") if refusal else Cell(_verdict(view), "green")),
        ("agent", Cell(view["agent"])),
    ]
    if view["has_contradiction"]:
        contradiction = "two answers about one write don't agree: see agentq runs show"
        facts.append(("CONTRADICTION", Cell(contradiction, "bold red")))
    if letter:
        facts += [
            ("stopped", Cell(f"{ago(letter['created_at'])}, {letter['reason']}, {letter['failure_class']}")),
            ("error", Cell(short(letter["error"], 300), "red")),
        ]
    for copy in view["copies"]:
        made = f"{copy['data']['to']}, from step {copy['data']['from_step']} by {copy['actor']}, {ago(copy['at'])}"
        facts.append(("copied", Cell(made, "yellow")))
    again = view["tokens_again"]
    tokens = f"about {again:,} are spent again" if again else "none is known to be spent again"
    return [*facts, ("tokens", Cell(tokens)), ("digest", Cell(view["digest"]))]


def _verdict(view: View) -> str:
    fates = Counter(step["fate"] for step in view["steps"])
    again = fates.total() - fates[Fate.RECORDED] - fates[Fate.DECIDED_ANEW]
    told = [f"{fates[Fate.RECORDED]} recorded results used, {again} steps to run"]
    if fates[Fate.SAME_KEY]:
        told.append(f"{fates[Fate.SAME_KEY]} writes again with the same key")
    if fates[Fate.NEW_KEY]:
        told.append(f"{fates[Fate.NEW_KEY]} WRITES HAPPEN AGAIN")
    return "; ".join(told if len(told) > 1 else [*told, "no write is made again"])


def _folded(steps: list[View]) -> Iterator[View]:
    """The steps, rows of recorded ones as one."""
    for is_recorded, group in groupby(steps, key=lambda step: bool(step["fate"] == Fate.RECORDED)):
        row = list(group)
        if is_recorded and len(row) >= FOLDED_STEPS_MIN:
            first, last = row[0]["number"], row[-1]["number"]
            yield {**row[0], "tool": None, "name": f"{first}-{last}", "told": f"{len(row)} steps", "effect": None}
        else:
            yield from row


def _step(step: View) -> Cell:
    if "told" in step:
        return Cell(step["told"], "bright_black")
    if step["tool"] is None:
        return Cell("model turn", "bright_black")
    return Cell(f"{step['tool']}({arguments_text(step['arguments'])})")


def _note(step: View) -> Cell:
    if step["is_accepted"]:
        return Cell("accepted", "yellow")
    if step["fate"] != Fate.RECORDED and step["may_have_happened"]:
        return Cell("may have happened", "bold red")
    if step["ruling"]:
        return Cell(f"{step['ruled_by']}: {step['ruling'].replace('_', ' ')}")
    return Cell(f"about {step['tokens_again']:,} tokens" if step["tokens_again"] else "")


_COLUMNS = (
    Column("#", lambda step: Cell(step.get("name") or str(step["number"]))),
    Column("STEP", _step, may_shrink=True),
    Column("EFFECT", lambda step: Cell(step["effect"] or "", EFFECT_STYLES.get(step["effect"] or "", ""))),
    Column("WHAT BECOMES OF IT", lambda step: Cell(step["fate"], _STYLES[Fate(step["fate"])])),
    Column("NOTE", _note, may_shrink=True),
)


def _doubts(step: View) -> Iterator[str]:
    yield f"arguments  {full(step['arguments'])[:2000]}"
    fence = step["fence"]
    if fence:
        yield f"fence      stamped {moment_cell(fence['stamped_at']).text} by {worker_text(fence['owner'])}"
        yield f"deadline   its call ended by {moment_cell(fence['operation_deadline']).text}"
    for probe in step["probes"]:
        told = "; ".join(words_of({name: value for name, value in probe["data"].items() if name != "fence"}))
        yield f"probe      {moment_cell(probe['at']).text}: {told}"
    if fence and not step["probes"]:
        yield "probe      none has answered"
    if step["fate"] == Fate.SAME_KEY:
        yield "the key    is the same as before: its receiver does it once"


def _copy_options(view: View) -> str:
    if view["from_step"] is None:
        return ""
    accepted = "".join(f" --repeat-write {number}" for number in view["repeat_writes"])
    return f" --from-step {view['from_step']}{accepted}"
