"""`agentq dead-letters resolve`, `replay` and `discard`: what a person decides, about some runs or about many."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from agentq.cli.enqueue import parse_json
from agentq.cli.exit_codes import ExitCode
from agentq.cli.filters import choose_many, chosen_filters
from agentq.cli.hints import say_paused, suggest_after_probe, suggest_after_replays
from agentq.cli.many import Verb, decide_about_many, many_options
from agentq.cli.output import Format, View, output_options, say, suggest
from agentq.cli.session import actor_option, ask, change_each, connected, given_ids, yes_option
from agentq.domain.model import RunStatus
from agentq.filters import parse_time

if TYPE_CHECKING:
    from agentq.client import AgentQ

_HAPPENED = click.option("--happened", metavar="RESULT", help="The write happened; this is its result, as JSON.")
_DID_NOT_HAPPEN = click.option("--did-not-happen", is_flag=True, help="The write did not happen, and won't any more.")
_LOOKED_AT = click.option(
    "--looked-at",
    metavar="TIME",
    help="When you looked and saw that it hadn't: RFC 3339, an age such as 5m, or now.",
)
_BY_PROBE = click.option("--by-probe", is_flag=True, help="Have the tool's probe asked again, and go on by its answer.")
_REASON = click.option("--reason", default="", metavar="TEXT", help="How you know, for the audit log.")
_SOME_IDS = click.argument("ids", nargs=-1, metavar="[ID...|-]")


@click.command()
@_SOME_IDS
@_HAPPENED
@_DID_NOT_HAPPEN
@_BY_PROBE
@_LOOKED_AT
@_REASON
@choose_many
@many_options
@actor_option
@yes_option
@output_options
def resolve(
    ids: tuple[str, ...],
    happened: str | None,
    did_not_happen: bool,
    by_probe: bool,
    looked_at: str | None,
    reason: str,
    dry_run: bool,
    rate: float | None,
    actor: str,
    yes: bool,
    output: Format,
    **which: Any,
) -> ExitCode:
    """Say whether an unknown write happened. The run stays stopped until it is replayed.

    With --by-probe the tool's probe is asked once more, and the run goes on by its answer: with the result, or by
    making the write again. If the probe can't tell, the run comes back as a dead letter.

    \b
      agentq dead-letters resolve ID --happened '{"refund_id": "re_17"}' --reason "seen at the provider"
      agentq dead-letters resolve ID --did-not-happen --looked-at 5m --reason "the provider has no such refund"
      agentq dead-letters resolve --tool send_refund --since 1h --did-not-happen --looked-at now --dry-run
      agentq dead-letters resolve --tool send_refund --by-probe --rate 50
    """
    decision = _decision(happened, did_not_happen, looked_at)
    if by_probe:
        if decision:
            raise click.UsageError("--by-probe leaves it to the probe: say nothing of the write yourself")
        return _resolve_by_probe(
            ids, which, reason=reason, dry_run=dry_run, rate=rate, actor=actor, yes=yes, output=output
        )
    if not decision:
        raise click.UsageError("say what became of the write: --happened RESULT, or --did-not-happen, or --by-probe")
    filters = _filters_or_ids(ids, which, dry_run=dry_run, rate=rate)
    with connected(actor) as client:
        if filters is not None:
            words = Verb(
                command="resolve", question=f"Record of {{}} that the write {_told(decision)}?", past="resolved"
            )
            return decide_about_many(
                words,
                lambda **options: client.resolve_many(filters, **decision, reason=reason, **options),
                **_counts(client, {**filters, "outcome_unknown": True}),
                dry_run=dry_run,
                rate=rate,
                yes=yes,
                output=output,
            )
        chosen = given_ids(ids)
        ask(f"Record for {_named(chosen)} that the write {_told(decision)}?", yes=yes)
        resolved: list[str] = []

        def change(run_id: str) -> View:
            step = client.resolve(run_id, **decision, reason=reason)
            resolved.append(run_id)
            say(f"{run_id}: recorded that step {step.number} ({step.tool}) {_told(decision)}")
            return {"step": step.number, "tool": step.tool}

        code = change_each(chosen, change, output)
        can_go_on = [run_id for run_id in resolved if client.status(run_id) is RunStatus.FAILED]
    if output.is_for_people and can_go_on:
        suggest(f"agentq dead-letters replay {' '.join(can_go_on)}")
    return code


def _resolve_by_probe(
    ids: tuple[str, ...],
    which: dict[str, Any],
    *,
    reason: str,
    dry_run: bool,
    rate: float | None,
    actor: str,
    yes: bool,
    output: Format,
) -> ExitCode:
    filters = _filters_or_ids(ids, which, dry_run=dry_run, rate=rate)
    with connected(actor) as client:
        if filters is not None:
            code = decide_about_many(
                Verb(command="ask about", question="Have the probe asked about {}?", past="asked about"),
                lambda **options: client.resolve_many_by_probe(filters, reason=reason, **options),
                **_counts(client, {**filters, "outcome_unknown": True}),
                dry_run=dry_run,
                rate=rate,
                yes=yes,
                output=output,
            )
            if output.is_for_people and not dry_run and code is not ExitCode.REFUSED:
                suggest_after_probe(client)
            return code
        chosen = given_ids(ids)
        ask(f"Have the probe asked about {_named(chosen)}?", yes=yes)
        asked: list[str] = []

        def change(run_id: str) -> View:
            step = client.resolve_by_probe(run_id, reason=reason)
            asked.append(run_id)
            say(f"{run_id}: the probe of {step.tool} is being asked about step {step.number}")
            return {"step": step.number, "tool": step.tool}

        code = change_each(chosen, change, output)
    if output.is_for_people and asked:
        suggest(f"agentq runs events {asked[0]} --follow")
    return code


@click.command()
@_SOME_IDS
@_HAPPENED
@_DID_NOT_HAPPEN
@_LOOKED_AT
@click.option("--digest", metavar="DIGEST", help="Do what the plan with this digest says, or nothing.")
@click.option("--from-step", type=int, metavar="STEP", help="As a new run with the results before STEP.")
@click.option(
    "--repeat-write",
    type=int,
    multiple=True,
    metavar="STEP",
    help="With --from-step: this write may happen again; may be repeated.",
)
@_REASON
@choose_many
@many_options
@actor_option
@yes_option
@output_options
def replay(
    ids: tuple[str, ...],
    happened: str | None,
    did_not_happen: bool,
    looked_at: str | None,
    digest: str | None,
    from_step: int | None,
    repeat_write: tuple[int, ...],
    reason: str,
    dry_run: bool,
    rate: float | None,
    actor: str,
    yes: bool,
    output: Format,
    **which: Any,
) -> ExitCode:
    """Run a dead letter again from the step that stopped it; completed steps keep their results.

    With an unknown write, say first whether it happened: here, or by agentq dead-letters resolve. With filters instead
    of ids the safe ones run, and those that need a decision are left.

    \b
      agentq dead-letters replay ID --digest DIGEST
      agentq dead-letters replay --tool send_refund --fingerprint 65badafcee --rate 50 --dry-run
      agentq dead-letters replay ID --from-step 4 --repeat-write 5
    """
    decision = _decision(happened, did_not_happen, looked_at)
    filters = _filters_or_ids(ids, which, dry_run=dry_run, rate=rate)
    bound: dict[str, Any] = {"digest": digest, "from_step": from_step, "repeat_writes": repeat_write}
    if (filters is not None or len(ids) > 1) and any(bound.values()):
        raise click.UsageError("--digest, --from-step and --repeat-write go with one ID")
    if filters is not None and decision:
        raise click.UsageError("--happened and --did-not-happen go with ids; for many: agentq dead-letters resolve")
    with connected(actor) as client:
        if filters is not None:
            code = decide_about_many(
                Verb(command="replay", question="Replay {}?", past="replayed"),
                lambda **options: client.replay_many(filters, reason=reason, **options),
                **_counts(client, filters),
                dry_run=dry_run,
                rate=rate,
                yes=yes,
                output=output,
            )
            if output.is_for_people and not dry_run and code is not ExitCode.REFUSED:
                suggest_after_replays(client)
            return code
        chosen = given_ids(ids)
        ask(_question_of_replay(chosen, decision, from_step, repeat_write), yes=yes)
        goes_on: list[str] = []

        def change(run_id: str) -> View:
            goes_on.append(client.replay(run_id, **decision, **bound, reason=reason))
            say(f"{run_id}: runs again{'' if goes_on[-1] == run_id else f' as {goes_on[-1]}, and stays as it was'}")
            return {} if goes_on[-1] == run_id else {"new_run_id": goes_on[-1]}

        code = change_each(chosen, change, output)
        if output.is_for_people and code is ExitCode.DONE:
            suggest(f"agentq runs events {goes_on[0]} --follow")
            say_paused(client)
    return code


def _question_of_replay(
    chosen: list[str], decision: dict[str, Any], from_step: int | None, repeat_write: tuple[int, ...]
) -> str:
    if from_step is None:
        return f"Replay {_named(chosen)}{f', recording that the write {_told(decision)}' if decision else ''}?"
    again = f", MAKING WRITES AGAIN: step {', '.join(map(str, repeat_write))}" if repeat_write else ""
    return f"Start a copy of {_named(chosen)} from step {from_step}{again}?"


@click.command()
@_SOME_IDS
@click.option("--reason", default="", metavar="TEXT", help="Why, for the audit log.")
@choose_many
@many_options
@actor_option
@yes_option
@output_options
def discard(
    ids: tuple[str, ...],
    reason: str,
    dry_run: bool,
    rate: float | None,
    actor: str,
    yes: bool,
    output: Format,
    **which: Any,
) -> ExitCode:
    """Give dead letters up for good: they leave the list, stay failed, and can't be replayed any more, only copied.

    An unknown write stays unknown, and the audit log says that it was given up as that.
    """
    filters = _filters_or_ids(ids, which, dry_run=dry_run, rate=rate)
    with connected(actor) as client:
        if filters is not None:
            return decide_about_many(
                Verb(command="discard", question="Give up {} for good?", past="given up"),
                lambda **options: client.discard_many(filters, reason=reason, **options),
                **_counts(client, filters),
                dry_run=dry_run,
                rate=rate,
                yes=yes,
                output=output,
            )
        chosen = given_ids(ids)
        ask(f"Give up {_named(chosen)} for good?", yes=yes)

        def change(run_id: str) -> View:
            status = client.discard(run_id, reason=reason)
            say(f"{run_id}: given up, {status}")
            return {"status": status.value}

        return change_each(chosen, change, output)


def _filters_or_ids(
    ids: tuple[str, ...], which: dict[str, Any], *, dry_run: bool, rate: float | None
) -> dict[str, Any] | None:
    """The filters that choose the dead letters; None: they are named by their ids."""
    filters = chosen_filters(which)
    if ids:
        if filters or which["everything"]:
            raise click.UsageError("name dead letters by their ids, or choose them by filters; one of them")
        if dry_run or rate is not None:
            raise click.UsageError("--dry-run and --rate go with filters; for one run: agentq dead-letters plan ID")
        return None
    if not filters.keys() - {"limit"} and not which["everything"]:
        raise click.UsageError("name dead letters by their ids, choose them by filters, or take every one by --all")
    return filters


def _counts(client: "AgentQ", filters: dict[str, Any]) -> dict[str, int]:
    matching = client.count_dead_letters(**filters)
    return {"matching": min(matching, filters.get("limit", matching)), "open_count": client.count_dead_letters()}


def _decision(happened: str | None, did_not_happen: bool, looked_at: str | None) -> dict[str, Any]:
    """The arguments of the client's own methods; empty when nothing was said."""
    if happened is not None and did_not_happen:
        raise click.UsageError("--happened and --did-not-happen contradict each other; say one of them")
    if looked_at is not None and not did_not_happen:
        raise click.UsageError("--looked-at goes with --did-not-happen")
    if did_not_happen and looked_at is None:
        raise click.UsageError(
            "--did-not-happen needs --looked-at: when you looked and found nothing; a time, an age such as 5m, or now"
        )
    if happened is not None:
        return {"happened": parse_json("--happened", happened)}
    if did_not_happen:
        # Here, so that a slip is said once; "now" is left to the database's clock.
        looked = looked_at if looked_at == "now" else parse_time("--looked-at", looked_at, datetime.now(UTC))
        return {"did_not_happen": True, "looked_at": looked}
    return {}


def _told(decision: dict[str, Any]) -> str:
    return "happened" if "happened" in decision else "did not happen"


def _named(ids: list[str]) -> str:
    return f"run {ids[0]}" if len(ids) == 1 else f"{len(ids)} runs"
