"""Gates: threads that run one at a time, and stop before every call of a port until they are told how it ends."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, cast


class Order(StrEnum):
    """What becomes of the call that a thread stopped before."""

    GO = "goes on"
    HOLD = "goes on, the answer takes its time"  # The thread stops once more, with the answer in its hands.
    DIE = "dies before it"
    DIE_AFTER = "dies after it"
    CUT = "finds it away"  # The call isn't made, and raises.
    LOSE = "loses the answer"  # The call is made, and raises.
    LATER = "loses the connection, the statement waits"  # It raises, and is made later or never.
    RAISE = "raises"  # For calls of the world: refused, reset, timed out.


class Killed(BaseException):
    """Raised at a gate in a thread that died: it does nothing more, in no `finally` either."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a thread waits: before that call, or (`is_answer`) with its answer."""

    port: str
    method: str
    is_answer: bool = False

    def __str__(self) -> str:
        return f"{self.port}.{self.method}{' (answered)' if self.is_answer else ''}"


class Actor:
    """A thread that moves only when it is ordered to, from one gate to the next."""

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self.name = name
        self.at: Stop | None = None
        self.passed: list[str] = []  # Methods of the gates that it went through.
        self.error: BaseException | None = None
        self.is_over = False
        self.is_dead = False
        self._run = run
        self._order = Order.GO
        self._mine, self._controllers = threading.Lock(), threading.Lock()
        self._mine.acquire()
        self._controllers.acquire()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        self._hand_over()

    def obey(self, order: Order) -> None:
        """Let it end the call that it stopped before, and run until the next gate, or its end."""
        assert not self.is_over, self.name
        self._order = order
        self._hand_over()

    def kill(self) -> None:
        """It does nothing more."""
        if not self.is_over:
            self.obey(Order.DIE)
        assert self.is_over, f"{self.name} survived at {self.at}"

    # --- in its own thread

    def stop_at(self, stop: Stop) -> Order:
        """Wait for an order. Raises Killed when it is to die, now or since an earlier gate."""
        if self.is_dead:
            raise Killed
        self.at = stop
        self._controllers.release()
        self._mine.acquire()
        self.at = None
        if self._order is Order.DIE:
            self.die()
        self.passed.append(stop.method)
        return self._order

    def die(self) -> None:
        self.is_dead = True
        raise Killed

    def _main(self) -> None:
        _here.actor = self
        self._mine.acquire()
        try:
            self._run()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.is_over = True
        self._controllers.release()

    def _hand_over(self) -> None:
        self._mine.release()
        self._controllers.acquire()


class _Here(threading.local):
    actor: Actor | None = None


_here = _Here()


def this_actor() -> Actor | None:
    """The actor whose thread this is; None in any other thread, which passes gates as if there were none."""
    return _here.actor


class Observer(Protocol):
    """Told of calls that were really made, and handed those that are made later or never."""

    def made(self, port: str, method: str) -> None: ...

    def waits(self, actor: Actor, stop: Stop, call: Callable[[], object]) -> None: ...


def gated(protocol: Any, real: Any, unavailable: type[Exception] | None, observer: Observer) -> Any:
    """`real` behind a gate at each method of the protocol. It has no other methods, so none can be forgotten.

    `unavailable` is what a call raises that is cut, or whose answer is lost.
    """
    port = protocol.__name__
    methods = {name: _gate(port, name, getattr(real, name), unavailable, observer) for name in methods_of(protocol)}
    return type(f"Gated{port}", (), {name: staticmethod(method) for name, method in methods.items()})()


def methods_of(protocol: Any) -> Iterator[str]:
    return (name for name, member in vars(protocol).items() if callable(member) and not name.startswith("_"))


def _gate(
    port: str, name: str, call: Callable[..., Any], unavailable: type[Exception] | None, observer: Observer
) -> Callable[..., Any]:
    def pass_gate(*arguments: Any, **named: Any) -> Any:
        actor = this_actor()
        if actor is None:
            return call(*arguments, **named)
        stop = Stop(port, name)
        order = actor.stop_at(stop)
        if order is Order.CUT:
            raise cast(type[Exception], unavailable)(f"{stop} is away")
        if order is Order.LATER:
            observer.waits(actor, stop, lambda: call(*arguments, **named))
            raise cast(type[Exception], unavailable)(f"the connection of {stop} is lost")
        try:
            answer = call(*arguments, **named)
        finally:
            observer.made(port, name)
            if order is Order.DIE_AFTER:
                actor.die()
        if order is Order.LOSE:
            raise cast(type[Exception], unavailable)(f"the answer of {stop} is lost")
        if order is Order.HOLD:
            actor.stop_at(Stop(port, name, is_answer=True))
        return answer

    return pass_gate
