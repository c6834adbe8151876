"""Copies the arguments of users' functions, which may write to them."""

from __future__ import annotations

import copy
import gc
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

# Objects of these types hold no examples, and may refer to anything.
_SHARED = (nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def private(thing: Any) -> Any:
    """Returns a copy with tensors and arrays of its own, as deep as they lie in containers and objects.

    Models and functions are shared; so is what cannot be copied, such as an open file or a lock.
    """
    if isinstance(thing, Tensor):
        return thing.clone()
    if isinstance(thing, np.ndarray) and thing.dtype != object:
        return thing.copy()
    memo: dict[int, Any] = {}
    pending, seen = [thing], {id(thing)}
    kept: list[Any] = []
    while pending:
        one = pending.pop()
        # deepcopy refuses tensors with a gradient history.
        if isinstance(one, Tensor):
            memo[id(one)] = one.clone()
        elif isinstance(one, _SHARED):
            memo[id(one)] = one
        else:
            unseen = [part for part in gc.get_referents(one) if id(part) not in seen]
            seen.update(map(id, unseen))
            pending += unseen
            kept.append(one)
    try:
        return copy.deepcopy(thing, dict(memo))
    except Exception:
        memo |= {id(one): one for one in kept if not _can_be_copied(one)}
    try:
        return copy.deepcopy(thing, memo)
    except Exception:
        return thing


def _can_be_copied(thing: Any) -> bool:
    """Tells whether an object can be taken apart, whatever its parts are."""
    try:
        return hasattr(thing, "__deepcopy__") or bool(thing.__reduce_ex__(4))
    except Exception:
        return False
