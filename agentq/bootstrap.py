"""The wiring: the only module that knows every concrete class. Everything is made when it is first asked for."""

from collections.abc import Mapping
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Self

from agentq.config.settings import Settings

if TYPE_CHECKING:  # Each part is imported where it is made, so that listing runs loads no more than the database.
    from celery import Celery

    from agentq.adapters.agent_models import AgentModels
    from agentq.adapters.outcome_files import OutcomeFolder
    from agentq.adapters.process import KernelCallLimit, SystemClock
    from agentq.adapters.redis.leases import RedisLeases
    from agentq.adapters.redis.nudges import RedisNudges
    from agentq.adapters.sql.engine import Database
    from agentq.domain.agents import Registry
    from agentq.domain.failures import FailureClassifier
    from agentq.domain.retry import RetryPolicy
    from agentq.ports.auditing import AuditStore
    from agentq.ports.deciding import DecisionStore, PauseStore
    from agentq.ports.dispatch import Dispatcher
    from agentq.ports.keeping import KeeperStore
    from agentq.ports.notifying import Channel
    from agentq.ports.purging import PurgeStore
    from agentq.ports.runs import RunStore
    from agentq.ports.steps import StepStore
    from agentq.services.execute import StepExecutor
    from agentq.services.heartbeat import Heartbeat
    from agentq.services.interact import Interaction
    from agentq.services.keep import Keeper
    from agentq.services.notify import Notifier


class Wiring:
    """What one process works with. Not to be used across a fork: its child makes its own."""

    def __init__(
        self,
        settings: Settings,
        *,
        app: "Celery | None" = None,
        deployment: str | None = None,
        registry: "Registry | None" = None,
    ) -> None:
        """`deployment` spares asking the database for it; `registry` spares importing the agents again."""
        self.settings = settings
        self._app = app
        self._deployment = deployment
        if registry is not None:
            self.__dict__["registry"] = registry
        self._can_end_calls = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give connections back."""
        if "database" in self.__dict__:
            self.database.dispose()

    # --- SQL

    @cached_property
    def database(self) -> "Database":
        from agentq.adapters.sql.engine import Database

        return Database(self.settings.effective_database_url)

    @cached_property
    def steps(self) -> "StepStore":
        from agentq.adapters.sql.steps import SqlStepStore

        return SqlStepStore(self.database)

    @cached_property
    def runs(self) -> "RunStore":
        from agentq.adapters.sql.runs import SqlRunStore

        return SqlRunStore(self.database)

    @cached_property
    def keeping(self) -> "KeeperStore":
        from agentq.adapters.sql.keeping import SqlKeeperStore

        return SqlKeeperStore(self.database)

    @cached_property
    def decisions(self) -> "DecisionStore":
        from agentq.adapters.sql.deciding import SqlDecisionStore

        return SqlDecisionStore(self.database)

    @cached_property
    def purging(self) -> "PurgeStore":
        from agentq.adapters.sql.purging import SqlPurgeStore

        return SqlPurgeStore(self.database)

    @cached_property
    def pausing(self) -> "PauseStore":
        from agentq.adapters.sql.pausing import SqlPauseStore

        return SqlPauseStore(self.database)

    @cached_property
    def auditing(self) -> "AuditStore":
        from agentq.adapters.sql.auditing import SqlAuditStore

        return SqlAuditStore(self.database)

    @property
    def deployment(self) -> str:
        """The id of the deployment that this database is. Raises SchemaError."""
        if self._deployment is None:
            from agentq.adapters.sql.migration import deployment_id

            self._deployment = deployment_id(self.database)
        return self._deployment

    def check_schema(self) -> None:
        """Raises SchemaError that says what to run when this code can't work on the database."""
        from agentq.adapters.sql.migration import deployment_id

        self._deployment = deployment_id(self.database)

    # --- Redis and the broker

    @cached_property
    def leases(self) -> "RedisLeases":
        from agentq.adapters.redis.client import TIMEOUT_SECONDS

        return self._leases(TIMEOUT_SECONDS)

    @cached_property
    def glanced_leases(self) -> "RedisLeases":
        """For who can do without them: a Redis that doesn't answer at once counts as away."""
        return self._leases(0.25)

    def _leases(self, timeout_seconds: float) -> "RedisLeases":
        from agentq.adapters.redis.client import redis_client
        from agentq.adapters.redis.leases import RedisLeases

        return RedisLeases(
            redis_client(self.settings.effective_lease_url, timeout_seconds=timeout_seconds),
            prefix=self.settings.key_prefix,
            deployment=self.deployment,
            lease_seconds=self.settings.lease_seconds,
        )

    @cached_property
    def nudges(self) -> "RedisNudges":
        from agentq.adapters.redis.client import redis_client
        from agentq.adapters.redis.nudges import RedisNudges

        return RedisNudges(
            redis_client(self.settings.effective_lease_url), prefix=self.settings.key_prefix, deployment=self.deployment
        )

    @cached_property
    def dispatcher(self) -> "Dispatcher":
        from agentq.adapters.celery_dispatcher import CeleryDispatcher
        from agentq.config.celery import step_limit_seconds

        return CeleryDispatcher(
            self.app,
            self.settings.effective_broker_url,
            key_prefix=self.settings.key_prefix,
            step_limit_seconds=lambda deadline_seconds: step_limit_seconds(self.settings, deadline_seconds),
        )

    @property
    def app(self) -> "Celery":
        """The Celery app: the worker's own, or a plain one that only publishes."""
        if self._app is None:
            from agentq.config.celery import celery_app

            self._app = celery_app(self.settings, set_as_current=False)
        return self._app

    def claim_redis(self) -> None:
        """Mark this Redis as ours. Raises ConfigurationError when another deployment's mark is on it."""
        self.leases.claim_deployment()

    # --- Executing

    @cached_property
    def registry(self) -> "Registry":
        """The agents of AGENTQ_AGENTS: imports user code. Raises ConfigurationError."""
        from agentq.adapters.agent_modules import load_registry

        return load_registry(self.settings.agents)

    @property
    def serves(self) -> dict[str, int]:
        """Each agent's name with the largest input that it takes, in bytes."""
        agents = (self.registry.agent(name) for name in self.registry.names())
        return {agent.name: agent.input_bytes_max or self.settings.input_bytes_max for agent in agents if agent}

    @cached_property
    def clock(self) -> "SystemClock":
        from agentq.adapters.process import SystemClock

        return SystemClock()

    @cached_property
    def call_limit(self) -> "KernelCallLimit":
        from agentq.adapters.process import KernelCallLimit

        return KernelCallLimit(can_end_calls=self._can_end_calls)

    @cached_property
    def outcome_files(self) -> "OutcomeFolder":
        from agentq.adapters.outcome_files import OutcomeFolder

        return OutcomeFolder(self.settings.home, self.deployment)

    @cached_property
    def heartbeat(self) -> "Heartbeat":
        from agentq.services.heartbeat import Heartbeat

        return Heartbeat(self.leases, self.steps, self.clock, self.settings.lease_seconds)

    @cached_property
    def models(self) -> "AgentModels":
        from agentq.adapters.agent_models import AgentModels

        return AgentModels(
            timeout_seconds=self.settings.model_timeout_seconds, openai_base_url=self.settings.openai_base_url
        )

    @cached_property
    def executor(self) -> "StepExecutor":
        """The spine of a worker."""
        return self._executor(self.dispatcher)

    def begin_pool_child(self) -> None:
        """This process is a prefork child: a call in it can be ended by ending it."""
        self._can_end_calls = True

    @cached_property
    def interaction(self) -> "Interaction":
        """Drives runs in this process. Its writes end this process if they outlive their deadline."""
        from agentq.services.interact import Interaction

        self._can_end_calls = True
        return Interaction(
            executor=self._executor(None),
            runs=self.runs,
            heartbeat=self.heartbeat,
            clock=self.clock,
            new_owner=_new_owner,
            patience_seconds=self.settings.settle_patience_seconds,
        )

    def keeper(self, serves: Mapping[str, int]) -> "Keeper":
        from agentq.domain.failures import FailureClassifier
        from agentq.services.heal import Healer
        from agentq.services.keep import Keeper
        from agentq.services.reap import Reaper

        return Keeper(
            reaper=Reaper(
                keeping=self.keeping,
                steps=self.steps,
                leases=self.leases,
                dispatcher=self.dispatcher,
                policy=self._policy(FailureClassifier()),  # It judges deaths, and imports no user code.
                probes_max=self.settings.probes_max,
            ),
            keeping=self.keeping,
            runs=self.runs,
            dispatcher=self.dispatcher,
            nudges=self.nudges,
            owner=_new_owner(),
            interval_seconds=self.settings.keeper_interval_seconds,
            backlog_max=self.settings.backlog_max,
            elapsed_seconds=self.clock.elapsed_seconds,
            serves=serves,
            healer=Healer(
                files=self.outcome_files,
                steps=self.steps,
                runs=self.runs,
                dispatcher=self.dispatcher,
                clock=self.clock,
            ),
            notifier=self._notifier(),
        )

    def _notifier(self) -> "Notifier | None":
        """None: nobody is to be told, and nobody looks for what there were to tell."""
        channels: list[Channel] = []
        if self.settings.notify_task:
            from agentq.adapters.notify_task import NotifyTask

            task, queue = self.settings.notify_task, self.settings.notify_queue
            channels.append(NotifyTask(self.app, self.settings.effective_broker_url, task=task, queue=queue))
        if self.settings.notify_argv:
            from agentq.adapters.notify_command import NotifyCommand

            channels.append(NotifyCommand(self.settings.notify_argv, timeout_seconds=self.settings.notify_seconds))
        if not channels:
            return None
        from agentq.adapters.sql.notifying import SqlNotificationStore
        from agentq.services.notify import Notifier

        return Notifier(
            store=SqlNotificationStore(self.database),
            channels=channels,
            elapsed_seconds=self.clock.elapsed_seconds,
        )

    def _executor(self, dispatcher: "Dispatcher | None") -> "StepExecutor":
        from agentq.adapters.agent_modules import load_classifier
        from agentq.services.execute import Limits, StepExecutor

        return StepExecutor(
            store=self.steps,
            heartbeat=self.heartbeat,
            registry=self.registry,
            models=self.models,
            policy=self._policy(load_classifier(self.settings.agents)),
            clock=self.clock,
            call_limit=self.call_limit,
            limits=Limits(
                operation_deadline_seconds=self.settings.operation_deadline_seconds,
                settle_patience_seconds=self.settings.settle_patience_seconds,
                hand_back_seconds=self.settings.hand_back_seconds,
                result_bytes_max=self.settings.result_bytes_max,
                turns_max=self.settings.turns_max,
                probe_deadline_seconds=self.settings.probe_deadline_seconds,
                probes_max=self.settings.probes_max,
            ),
            new_owner=_new_owner,
            dispatcher=dispatcher,
            outcome_files=self.outcome_files,
        )

    def _policy(self, classifier: "FailureClassifier") -> "RetryPolicy":
        from agentq.domain.retry import Budgets, RetryPolicy

        return RetryPolicy(
            classifier,
            Budgets(
                tries_max=self.settings.tries_max,
                crashes_max=self.settings.crashes_max,
                backoff_seconds=self.settings.backoff_seconds,
                patience_seconds=self.settings.patience_seconds,
            ),
        )


def _new_owner() -> str:
    from agentq.adapters.process import new_owner

    return new_owner()
