"""Copies of what is handed to functions of the user's, which may write to it."""

from __future__ import annotations

import copy
import gc
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

# What holds no examples, and may lead anywhere.
_SHARED = (nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def private(thing: Any) -> Any:
    """The same with tensors and arrays of its own, as deep as they lie in containers and objects.

    Models and functions are shared; so is what cannot be copied, such as an open file.
    """
    if isinstance(thing, Tensor):
        return thing.clone()
    if isinstance(thing, np.ndarray) and thing.dtype != object:
        return thing.copy()
    memo: dict[int, Any] = {}
    todo, met = [thing], {id(thing)}
    while todo:
        one = todo.pop()
        # A deep copy refuses tensors that have a gradient to hand on.
        if isinstance(one, Tensor):
            memo[id(one)] = one.clone()
        elif isinstance(one, _SHARED):
            memo[id(one)] = one
        else:
            more = [part for part in gc.get_referents(one) if id(part) not in met]
            met.update(map(id, more))
            todo += more
    try:
        return copy.deepcopy(thing, memo)
    except Exception:
        return thing
