"""Locks that let one thread at a time use a model; it may lock it again, others wait."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.model.interrupts import contextmanager

#: Seconds that a thread waits for another that holds a model and runs nothing.
PATIENCE = 120.0


class User:
    """A thread as a user of models. Thread ids do not serve, as the operating system reuses them."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        #: Time at which it last ran a model, or asked for one.
        self.active = time.monotonic()

    @property
    def name(self) -> str:
        return f"thread {self.thread.name!r}"


_local = threading.local()


def this_user() -> User:
    """Returns the `User` of the current thread."""
    try:
        user: User = _local.user
    except AttributeError:
        user = _local.user = User()
    return user


@dataclass(eq=False)
class _Hold:
    """A model that a thread holds, or waits for. It keeps the modules alive, so that their ids are not reused."""

    user: User
    model: nn.Module
    parts: frozenset[int]


# Re-entrant, as the garbage collector may end a block, and so release its model, in any thread at any point.
_changed = threading.Condition(threading.RLock())
_held: list[_Hold] = []
_waiting: list[_Hold] = []


@contextmanager
def exclusive(model: nn.Module) -> Iterator[None]:
    """Holds a model, and all that shares a module or the memory of a parameter with it, for this thread alone.

    Raises `CircuitsError` where waiting would be in vain: two threads each wait for what the other holds, the thread
    that has the model has ended, or has run no model for `PATIENCE` seconds.
    """
    user = this_user()
    with _changed:
        again = next((hold for hold in _held if hold.user is user and hold.model is model), None)
    hold = _Hold(user, model, _parts(model) if again is None else again.parts)
    try:
        _take(hold)
        yield
    finally:
        _give_back(hold)


def _parts(model: nn.Module) -> frozenset[int]:
    """Returns the ids of a model's modules and the addresses of its parameters: a model that shares one is edited with
    it.
    """
    inner = model.__dict__.get("original_model")  # a bridge does not register the model it wraps
    ids: set[int] = set()
    for root in (model, inner):
        for module in root.modules() if isinstance(root, nn.Module) else ():
            ids.add(id(module))
            for parameter in module._parameters.values():
                if parameter is not None:
                    ids.update((id(parameter), _address(parameter)))
    return frozenset(ids - {0})


def _address(parameter: Tensor) -> int:
    """Returns the address of a parameter; 0 while another thread traces it (its module's id identifies it then)."""
    try:
        return parameter.data_ptr()
    except RuntimeError:
        return 0


def _take(hold: _Hold) -> None:
    start = hold.user.active = time.monotonic()
    with _changed:
        _waiting.append(hold)
        try:
            while others := _before(hold):
                _refuse_in_vain(hold, others, start)
                # Wakes up again every second, as a thread may end without notifying.
                _changed.wait(1.0)
            _held.append(hold)
        finally:
            _waiting.remove(hold)
            _changed.notify_all()


def _give_back(hold: _Hold) -> None:
    """Releases a model, from whatever thread: a generator may be ended in another than it was begun in."""
    with _changed:
        if hold in _held:
            _held.remove(hold)
            _changed.notify_all()


def _before(hold: _Hold) -> list[_Hold]:
    """Returns the holds that other threads must release first.

    Threads that have waited longer go first, unless they may wait for this one.
    """
    holds_some = any(other.user is hold.user for other in _held)
    earlier = [] if holds_some else _waiting[: _waiting.index(hold)]
    return [
        other
        for other in (*_held, *earlier)
        if other.user is not hold.user and not other.parts.isdisjoint(hold.parts)
    ]


def _refuse_in_vain(hold: _Hold, others: list[_Hold], start: float) -> None:
    """Refuses to wait for a model that is held in a circle, by an ended thread, or idle for too long."""
    other = others[0].user
    if _waits_for(others, hold.user):
        raise CircuitsError(
            f"the model is held by {other.name}, which waits for one that {hold.user.name} holds; take several "
            "models in the same order in all threads"
        )
    holders = [one.user for one in others if one in _held]
    for user in holders:
        if not user.thread.is_alive():
            raise CircuitsError(
                f"the model is held by {user.name}, which has ended inside a block of intervene; blocks are left in "
                "the thread that enters them"
            )
    active = max([start, *(user.active for user in holders)])
    if holders and time.monotonic() - active > PATIENCE:
        raise CircuitsError(
            f"the model is held by {other.name}, which has run nothing for {PATIENCE:.0f} s; leave the block of "
            "intervene there, or run the model in that thread"
        )


def _waits_for(holds: list[_Hold], user: User) -> bool:
    """Tells whether a thread among the holders waits, directly or through others, for `user`."""
    seen: list[User] = []
    users = [other.user for other in holds]
    while users:
        other = users.pop()
        if other is user:
            return True
        if other not in seen:
            seen.append(other)
            users += [
                blocking.user
                for waiting in _waiting
                if waiting.user is other
                for blocking in _before(waiting)
            ]
    return False


def refuse_other_thread(owner: User) -> None:
    """Refuses a run in one thread of a model that another has edited: the edits are not meant for it."""
    user = this_user()
    if user is not owner:
        raise CircuitsError(
            f"the model is in use by {owner.name}, and {user.name} runs it; threads take turns with circuits.run "
            "(cache, sweep, ...) and blocks of intervene, or have a copy each"
        )
    owner.active = time.monotonic()


def _in_child() -> None:
    """Clears the locks in a forked process, which has no other threads: models that one of them held, half edited, stay
    refused.
    """
    _waiting.clear()
    _changed.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_changed.acquire, after_in_parent=_changed.release, after_in_child=_in_child)
