"""One forward pass under some interventions, and the activations it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.apply import intervene
from circuits.interventions.arguments import read_run_tokens
from circuits.interventions.base import Intervention
from circuits.model.modes import evaluating
from circuits.model.record import recording
from circuits.model.sites import Site
from circuits.model.surface import Surface

# Entries of an output, from which a second one beside it for a moment is much memory.
_LARGE = 2**22


class Activations(Mapping[str, Tensor]):
    """Activations by full hook name; `activations["z.2"]` and `activations[Site("z", 2)]` find them as
    well.
    """

    def __init__(self, found: Mapping[str, Tensor]) -> None:
        self._found = dict(found)

    def __getitem__(self, key: Any) -> Tensor:
        hook = key if isinstance(key, str) and key in self._found else Site.parse(key).hook()
        if hook not in self._found:
            raise KeyError(f"{key}: not cached; cached: {', '.join(self._found)}")
        return self._found[hook]

    def __contains__(self, key: object) -> bool:
        try:
            self[key]
        except (KeyError, CircuitsError):
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"Activations({', '.join(f'{hook}: {list(x.shape)}' for hook, x in self._found.items())})"


def run(
    model: Any, tokens: Any, *interventions: Intervention, cache: Iterable[Any] | str | None = None
) -> Any:
    """The model's output on `tokens` under the interventions, in eval mode and without gradients.

    `cache` lists sites whose activations are wanted as well, as they are after the edits; then the result is
    (output, `Activations`). Mode, hooks and gradients are as before when it returns or raises.
    """
    surface = Surface.of(model)
    tokens = read_run_tokens(tokens, "run")
    surface.check_inputs(tokens, "run: tokens")
    if cache is not None and (not isinstance(cache, str | Site | Iterable) or isinstance(cache, Tensor)):
        raise CircuitsError(f'cache: give sites such as "z" or a list of them, got {cache!r}')
    sites = [] if cache is None else [cache] if isinstance(cache, str | Site) else list(cache)
    hooks = list(dict.fromkeys(hook for site in sites for _, hook in surface.at(Site.parse(site))))
    with (
        evaluating(model),
        torch.no_grad(),
        intervene(model, *interventions),
        recording(surface, hooks) as seen,
    ):
        output = _apart(model, model(tokens.clone()))
    for hook in hooks:
        if hook not in seen:
            raise CircuitsError(f"cache: {hook} never fired; this model has it switched off")
    return output if cache is None else (output, Activations({hook: seen[hook] for hook in hooks}))


def _apart(model: Any, output: Any) -> Any:
    """The output, which the model does not overwrite in its next run. A large one is copied only if it might."""
    if not isinstance(output, Tensor):
        return output
    if output.numel() < _LARGE:
        return output.clone()
    held = {
        one.untyped_storage().data_ptr()
        for module in model.modules()
        for own in (module._parameters, module._buffers, vars(module))
        for one in own.values()
        if isinstance(one, Tensor)
    }
    return output.clone() if output.untyped_storage().data_ptr() in held else output


def cache(model: Any, tokens: Any, sites: Iterable[Any] | str) -> Activations:
    """The activations at `sites` ("z", "resid_post.1", full hook names) on `tokens`, in eval mode, no
    gradients.
    """
    if sites is None:
        raise CircuitsError('cache: give sites such as "z" or a list of them, got None')
    _, activations = run(model, tokens, cache=sites)
    return activations
