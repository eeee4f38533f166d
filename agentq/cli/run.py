"""`agentq run`: execute a run in this terminal and see its steps happen."""

import click

from agentq.cli.cards import arguments_text, result_text
from agentq.cli.enqueue import given_input
from agentq.cli.exit_codes import ExitCode
from agentq.cli.output import Format, between, output_options, say, suggest
from agentq.cli.session import connected
from agentq.cli.watch import conclude
from agentq.domain.model import Run, StepState
from agentq.filters import parse_pair
from agentq.views import step_view


@click.command()
@click.argument("agent")
@click.argument("text", required=False, metavar="INPUT")
@click.option("--input-json", metavar="JSON", help="The input as JSON instead of text; - reads it from stdin.")
@click.option("-m", "--metadata", multiple=True, metavar="KEY=VALUE", help="A label; may be repeated.")
@output_options
def run(agent: str, text: str | None, input_json: str | None, metadata: tuple[str, ...], output: Format) -> ExitCode:
    """Execute a run of AGENT (from AGENTQ_AGENTS) on INPUT here, and print its answer.

    It takes the same steps as in a worker, with the same promises; no worker takes them over. Ctrl-C cancels.
    """
    given = given_input(text, input_json)
    labels = dict(parse_pair("metadata", pair) for pair in metadata) or None
    with connected() as client:
        watcher = _Watcher()
        try:
            ended = client.run(agent, given, metadata=labels, see=watcher.see)
        except KeyboardInterrupt:
            if watcher.run_id is not None:
                status = client.cancel(watcher.run_id, reason="interrupted at the terminal")
                say(f"run {watcher.run_id}: {status}")
                suggest(f"agentq runs show {watcher.run_id}")
            raise
        return conclude(ended, output)


class _Watcher:
    """Says on stderr what is new about a run: which step begins, and what became of it."""

    def __init__(self) -> None:
        self.run_id: str | None = None
        self._begun: set[tuple[int, int]] = set()
        self._ended: set[int] = set()

    def see(self, run: Run) -> None:
        if self.run_id is None:
            self.run_id = run.id
            say(f"run {run.id}")
        for step in run.steps:
            view = step_view(step)
            what = (
                f"step {step.number}  {step.tool}({arguments_text(step.arguments)})"
                if step.tool
                else (f"step {step.number}  model turn")
            )
            if step.state is StepState.AVAILABLE and (step.number, step.attempt) not in self._begun:
                self._begun.add((step.number, step.attempt))
                say(f"\u2192 {what}" + (f"  attempt {step.attempt}" if step.attempt > 1 else ""))
            if step.state in (StepState.COMPLETED, StepState.DEAD_LETTERED) and step.number not in self._ended:
                self._ended.add(step.number)
                took = between(view["dispatched_at"], view["finished_at"])
                is_good = step.state is StepState.COMPLETED and not step.is_error
                sign = "\u2713" if is_good else "\u2717"
                say(f"{sign} {what}  {took}  {result_text(view).text}", style="green" if is_good else "red")
