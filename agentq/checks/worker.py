"""Judge a worker by what its Celery really does: its own at its start, live ones when the doctor asks them."""

from collections.abc import Callable, Iterator

from agentq.adapters.worker_facts import WorkerFacts
from agentq.checks.finding import Finding, broken_promise, ok, warning
from agentq.config.settings import Settings


def judge_worker(worker: WorkerFacts, settings: Settings) -> Iterator[Finding]:
    """What is wrong with it, one finding each; one that says what it does when nothing is."""
    subject = f"worker {worker.name}"
    if not worker.is_told:
        yield warning(
            subject,
            "it doesn't say how it works",
            why="it is of another version, or another program on the same broker",
            fix="finish the deploy; if it is none of yours, give one of the two another AGENTQ_KEY_PREFIX",
        )
        return
    judges: tuple[Callable[[str, WorkerFacts, Settings], Iterator[Finding]], ...] = (
        _judge_pool,
        _judge_isolation,
        _judge_acknowledgements,
        _judge_limits,
        _judge_broker_options,
        _judge_rest,
    )
    findings = [finding for judge in judges for finding in judge(subject, worker, settings)]
    queues = ", ".join(worker.queues) or "no queue"
    yield from findings or [ok(subject, f"{worker.pool} x {worker.concurrency}, serves {queues}")]


def _judge_pool(subject: str, worker: WorkerFacts, settings: Settings) -> Iterator[Finding]:
    unsafe = sorted({settings.queue("tools"), settings.queue("isolated")} & set(worker.queues))
    if unsafe and worker.writers and not worker.can_end_calls:
        yield broken_promise(
            subject,
            f"this pool can't end a call that outlives its deadline, but {worker.writers[0]!r} writes",
            fix=f"serve {', '.join(unsafe)} with --pool prefork",
        )


def _judge_isolation(subject: str, worker: WorkerFacts, settings: Settings) -> Iterator[Finding]:
    isolated = settings.queue("isolated")
    if isolated in worker.queues and (worker.concurrency > 1 or len(worker.queues) > 1):
        yield warning(
            subject,
            f"it serves {isolated}, {worker.concurrency} at a time, beside {len(worker.queues) - 1} other queues",
            why="a step that kills its process is charged only where it runs alone",
            fix="serve it with a worker of its own: agentq worker isolated",
        )


def _judge_acknowledgements(subject: str, worker: WorkerFacts, settings: Settings) -> Iterator[Finding]:
    if not worker.acks_late:
        yield broken_promise(
            subject,
            "messages are acknowledged before they are worked on",
            why="one that asks for a new run is lost with the process that took it",
            fix="leave task_acks_late on",
        )
    if not worker.acks_failures:
        yield warning(
            subject,
            "a task that failed, or was ended for its time, isn't acknowledged",
            why="the broker delivers it again and again; the keeper brings back what has to run again",
            fix="leave task_acks_on_failure and task_acks_on_timeout on",
        )
    if worker.repeats_lost_tasks:
        yield warning(
            subject,
            "a task whose process died is delivered again by the broker",
            why="without end, for a message that kills its process; the keeper does it, and counts",
            fix="leave task_reject_on_worker_lost and task_retry_on_worker_lost off",
        )
    if worker.ends_tasks_on_connection_loss:
        yield broken_promise(
            subject,
            "running tasks are ended when the broker's connection breaks",
            why="each write among them becomes an unknown one, and its run a dead letter",
            fix="leave worker_cancel_long_running_tasks_on_connection_loss off",
        )


def _judge_limits(subject: str, worker: WorkerFacts, settings: Settings) -> Iterator[Finding]:
    if worker.soft_time_limit_seconds is not None:
        yield broken_promise(
            subject,
            f"there is a soft time limit of {worker.soft_time_limit_seconds:g} s",
            why="it raises anywhere, also while the outcome of a write is recorded, which is lost then",
            fix="set none: each call has a hard limit that its message carries",
        )
    needed = settings.model_timeout_seconds + settings.settle_patience_seconds
    if worker.time_limit_seconds is not None and worker.time_limit_seconds < needed:
        yield warning(
            subject,
            f"there is a time limit of {worker.time_limit_seconds:g} s, and a model turn may take {needed:g} s",
            why="a turn that is only slow is killed, which counts as a crash, and its run ends as a dead letter",
            fix=f"set task_time_limit to none, or to more than {needed:g}",
        )
    if worker.soft_shutdown_seconds:
        yield warning(
            subject,
            f"there is a soft shutdown of {worker.soft_shutdown_seconds:g} s",
            why="while it lasts nothing is acknowledged, and no time limit is kept",
            fix="set worker_soft_shutdown_timeout to 0: what runs goes on to its end without it",
        )


def _judge_broker_options(subject: str, worker: WorkerFacts, settings: Settings) -> Iterator[Finding]:
    if worker.prefetch_multiplier != 1 or not worker.has_prefetch_disabled:
        yield warning(
            subject,
            f"it takes messages that it has no slot for (prefetch multiplier {worker.prefetch_multiplier})",
            why="they wait behind a long call while another worker is idle",
            fix="leave worker_prefetch_multiplier at 1 and worker_disable_prefetch on",
        )
    own = settings.visibility_timeout_seconds
    if worker.visibility_timeout_seconds != own:
        actual = worker.visibility_timeout_seconds
        yield warning(
            subject,
            f"its visibility timeout is {'the default' if actual is None else f'{actual:g} s'}, not {own:g} s",
            why="the shortest of any worker counts for all",
            fix="set AGENTQ_VISIBILITY_TIMEOUT_SECONDS alike everywhere, and broker_transport_options nowhere",
        )
    if worker.unacked_key != f"{settings.key_prefix}.unacked":
        yield warning(
            subject,
            f"it keeps what it took under {worker.unacked_key or 'the default key'!r}",
            why="another program's visibility timeout counts for those messages, and the keeper doesn't see them",
            fix="leave unacked_key of broker_transport_options alone",
        )


def _judge_rest(subject: str, worker: WorkerFacts, settings: Settings) -> Iterator[Finding]:
    if worker.has_result_backend:
        yield warning(
            subject,
            "it has a result backend",
            why="a second copy of the state can only disagree, and tasks block while that server is away",
            fix="set result_backend to none, and look for CELERY_RESULT_BACKEND in the environment",
        )
    if not worker.reads_only_json:
        yield warning(
            subject,
            "it reads more than JSON",
            why="whoever can publish a pickle can run code in it",
            fix="leave accept_content at json",
        )
