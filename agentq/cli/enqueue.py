"""`agentq enqueue`: queue a run, or many from a file, and watch one to its end if wanted."""

import json
from pathlib import Path
from typing import Any

import click

from agentq.cli.exit_codes import ExitCode
from agentq.cli.output import Format, emit_list, emit_one, emit_text, output_options, say, suggest
from agentq.cli.session import connected, text_of_stdin
from agentq.cli.watch import conclude, watch
from agentq.domain.errors import InvalidInputError
from agentq.domain.model import Json
from agentq.filters import parse_pair


@click.command()
@click.argument("agent", required=False)
@click.argument("text", required=False, metavar="INPUT")
@click.option("--input-json", metavar="JSON", help="The input as JSON instead of text; - reads it from stdin.")
@click.option("-k", "--idempotency-key", metavar="KEY", help="The same key again returns the same run.")
@click.option("-m", "--metadata", multiple=True, metavar="KEY=VALUE", help="A label to find it by; may be repeated.")
@click.option("--run-id", metavar="ID", help="An id of your own instead of a new one.")
@click.option(
    "--from-jsonl",
    metavar="FILE",
    help="Queue many: one JSON object a line with agent, input, "
    "and if wanted idempotency_key, metadata, run_id; - reads stdin.",
)
@click.option("-w", "--wait", is_flag=True, help="Watch the run to its end, and print its answer.")
@click.option("--timeout", default=600.0, show_default=True, metavar="SECONDS", help="How long to watch.")
@output_options
def enqueue(
    agent: str | None,
    text: str | None,
    input_json: str | None,
    idempotency_key: str | None,
    metadata: tuple[str, ...],
    run_id: str | None,
    from_jsonl: str | None,
    wait: bool,
    timeout: float,
    output: Format,
) -> ExitCode:
    """Queue a run of AGENT on INPUT (- reads it from stdin) and print its id.

    \b
      agentq enqueue support "Refund order 17"
      agentq enqueue support --input-json '{"order": 17}' --wait
      agentq enqueue --from-jsonl runs.jsonl
    """
    if from_jsonl is not None:
        if agent is not None or wait:
            raise click.UsageError("--from-jsonl goes with neither AGENT nor --wait: each line names its own")
        return _enqueue_many(from_jsonl, output)
    if agent is None:
        raise click.UsageError("name the agent and give its input, or use --from-jsonl")

    from agentq.services.enqueue import EnqueueRequest  # noqa: PLC0415 - `--help` doesn't need it

    request = EnqueueRequest(
        agent=agent,
        input=given_input(text, input_json),
        idempotency_key=idempotency_key,
        metadata=dict(parse_pair("metadata", pair) for pair in metadata) or None,
        run_id=run_id,
    )
    with connected() as client:
        enqueued = client.enqueue_one(request)
        if enqueued.warning:
            say(f"warning: {enqueued.warning}", style="yellow")
        if not enqueued.is_new:
            say(f"this idempotency key has run {enqueued.run_id} already")
        if wait:
            say(f"run {enqueued.run_id}")
            run = watch(client, enqueued.run_id, timeout_seconds=timeout, shows_events=output.is_for_people)
            return conclude(run, output)
    view = {"id": enqueued.run_id, "is_new": enqueued.is_new, "warning": enqueued.warning}
    emit_one(view, output, lambda: emit_text(enqueued.run_id))
    if output.is_for_people:
        suggest(f"agentq runs events {enqueued.run_id} --follow")
    return ExitCode.DONE


def given_input(text: str | None, input_json: str | None) -> Json:
    """The input of a run: a text as it is, or parsed JSON; either may come from stdin."""
    if (text is None) == (input_json is None):
        raise click.UsageError("give the INPUT as a text, or as --input-json; one of them")
    if text is not None:
        return text_of_stdin() if text == "-" else text
    return parse_json("--input-json", text_of_stdin() if input_json == "-" else str(input_json))


def parse_json(name: str, text: str) -> Json:
    """Raises InvalidInputError that points at the character where it stops being JSON."""
    try:
        value: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{name} is not JSON ({error}); a text needs its quotes: '\"like this\"'") from None
    return value


def _enqueue_many(source: str, output: Format) -> ExitCode:
    requests = _read_jsonl(source)
    if not requests:
        raise InvalidInputError(f"{source} has no lines; nothing to do")
    with connected() as client:
        ids = client.enqueue_many(requests)
    if output.is_for_people:
        for identifier in ids:
            emit_text(identifier)
        say(f"{len(ids)} runs are queued")
        suggest("agentq runs list")
    else:
        emit_list([{"id": identifier} for identifier in ids], [], output, none="")
    return ExitCode.DONE


def _read_jsonl(source: str) -> list[dict[str, Any]]:
    try:
        text = text_of_stdin() if source == "-" else Path(source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{source!r} can't be read: {error}") from None
    requests = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        request = parse_json(f"line {number} of {source}", line)
        if not isinstance(request, dict):
            raise InvalidInputError(f"line {number} of {source} is no JSON object")
        requests.append(request)
    return requests
