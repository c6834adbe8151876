"""Makes the logit difference of given answers: a metric with an answer and a position for every example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.arguments import is_whole
from circuits.errors import CircuitsError, format_value
from circuits.frozen_tensors_and_positions import to_tensor_if_array
from circuits.model.hooked_model import HookedModel
from circuits.model.prompt_parsing import continuation_ids, parse_tokens_or_texts
from circuits.model.prompts_with_mask import Prompts, UntokenisedTexts, positions_from_mask
from circuits.model.types import AnswersLike

CALLER = "logit_difference"
Answer = tuple[int | str, ...]  # the tokens of an answer, as ids or texts


@dataclass(frozen=True)
class LogitDifference:
    """The logit of a right answer minus that of a wrong one, at one position of every example: see `logit_difference`.

    Attributes:
        right: by example, the tokens of its right answer; one entry serves all examples.
        wrong: the same for the wrong answer.
        positions: by example, or one for all, counted in the example's own tokens.
    """

    right: tuple[Answer, ...]
    wrong: tuple[Answer, ...]
    positions: tuple[int, ...]

    __name__ = CALLER

    def __repr__(self) -> str:
        """Returns one line: for how many examples, and the answers of the first."""
        if not self.right:
            return f"{CALLER}: no examples"
        number = max(map(len, (self.right, self.wrong, self.positions)))
        of = "all examples," if number == 1 else f"{number} examples, the first"
        right, wrong = (", ".join(map(repr, given[0])) for given in (self.right, self.wrong))
        return f"{CALLER}: {of} {right} - {wrong} at position {self.positions[0]}"

    def __call__(self, output: Tensor, prompts: Any = None, model: Any = None) -> Tensor:
        """Returns the difference [n] for an output [n pos vocabulary], differentiable.

        Args:
            prompts: the inputs of the run, where they have padding or answers are texts; without it positions count in
                the whole output.
            model: the model, where answers are texts.
        """
        _check_output(output)
        hooked = None if model is None else HookedModel(model)
        prompts = None if prompts is None else parse_tokens_or_texts(prompts, CALLER, "prompts")
        if isinstance(prompts, UntokenisedTexts):
            raise CircuitsError(f"{CALLER}: give the prompts that were run, circuits.prompts(model, texts)")
        real = torch.ones(output.shape[:2], dtype=torch.bool) if prompts is None else prompts.real
        if tuple(real.shape) != tuple(output.shape[:2]):
            raise CircuitsError(f"{CALLER}: prompts are {list(real.shape)}, the output {list(output.shape)}")
        return self.resolve_answers(real, hooked, prompts)(output)

    def resolve_answers(
        self, real: Tensor, hooked: HookedModel | None, prompts: Prompts | None
    ) -> ResolvedAnswers:
        """Returns the answers of a batch whose tokens the mask [n pos] tells; texts need its prompts, too."""
        batch = len(real)
        self.check_count(batch)
        positions = torch.tensor(self.positions).expand(batch)
        counts = real.sum(1).cpu()
        outside = (positions >= counts) | (positions < -counts)
        if bool(outside.any()):
            row = int(outside.nonzero()[0])
            raise CircuitsError(
                f"{CALLER}: no position {int(positions[row])} in example {row}, which has {int(counts[row])} tokens"
            )
        there = (positions_from_mask(real.cpu()) == (positions % counts)[:, None]) & real.cpu()
        columns = there.int().argmax(1)
        sides = (side * batch if len(side) == 1 else side for side in (self.right, self.wrong))
        pairs = list(zip(*sides, strict=True))
        if any(isinstance(token, str) for pair in pairs for answer in pair for token in answer):
            if hooked is None or prompts is None:
                raise CircuitsError(
                    f"{CALLER}: answers that are texts need the prompts and the model; give token ids"
                )
            pairs = _answer_first_token_ids(pairs, hooked, prompts, (positions % counts + 1).tolist())
        rows = [
            [*((one, 1 / len(right)) for one in right), *((one, -1 / len(wrong)) for one in wrong)]
            for right, wrong in pairs
        ]
        widest = max(map(len, rows))
        table = torch.tensor([row + [(0, 0)] * (widest - len(row)) for row in rows], dtype=torch.float64)
        return ResolvedAnswers(columns, table[..., 0].long(), table[..., 1])

    def check_count(self, batch: int) -> None:
        """Refuses answers or positions of another number of examples."""
        for name, given in (("right", self.right), ("wrong", self.wrong), ("position", self.positions)):
            if len(given) not in (1, batch):
                raise CircuitsError(f"{CALLER}: {name} is given for {len(given)} examples, there are {batch}")

    def __getitem__(self, rows: slice) -> LogitDifference:
        """Returns the metric of some of the examples."""

        def take_rows(given: tuple[Any, ...]) -> tuple[Any, ...]:
            return given if len(given) == 1 else given[rows]

        return replace(
            self,
            right=take_rows(self.right),
            wrong=take_rows(self.wrong),
            positions=take_rows(self.positions),
        )


@dataclass(frozen=True)
class ResolvedAnswers:
    """The answers of some examples: columns [n], ids [n k] of right and wrong ones, and their weights in the difference
    [n k], negative for wrong ones.
    """

    columns: Tensor
    ids: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, rows: slice) -> ResolvedAnswers:
        return ResolvedAnswers(*(part[rows] for part in vars(self).values()))

    def __call__(self, output: Tensor) -> Tensor:
        """Returns the difference of each example."""
        _check_output(output)
        largest = int(self.ids.max())
        if largest >= output.shape[2]:
            raise CircuitsError(f"{CALLER}: answers are ids of 0-{output.shape[2] - 1}, got {largest}")
        logits = output[torch.arange(len(output), device=output.device), self.columns.to(output.device)]
        return (logits.gather(1, self.ids.to(output.device)) * self.weights.to(output)).sum(1)

    def for_kept_columns(self, columns: Tensor) -> ResolvedAnswers:
        """Returns the answers in an output that has only these of its columns."""
        return replace(self, columns=torch.searchsorted(columns, self.columns))


def logit_difference(
    right: AnswersLike, wrong: AnswersLike, position: int | Sequence[int] | Tensor = -1
) -> LogitDifference:
    """Makes a metric: the logit of a right answer minus that of a wrong one, at one position of every example.

        metric = logit_difference([" Mary", " Tom"], [" John", " Ann"])
        sweep(model, prompts, variants, metric=metric)
        patch.edges(model, base, source, metric)
        metric(run(model, prompts), prompts, model)          # [n], by example

    Args:
        right: the answer, one for all examples or a list with one for each: a token id; a text that
            continues the prompt (with the space before a word), of which the first token is read; or a list of several
            of these, of whose logits the mean is taken, as auto-circuit does (Miller, Chughtai, Saunders 2024,
            arXiv:2407.08734). A flat list has one answer for each example: [5, 7] for two of them, [[5, 6], [7]] where
            the first has two tokens; [[5, 6]] for all.
        wrong: the same for the wrong answer.
        position: where the logits are read, one for all examples or a list; counted in each prompt's own tokens, −1 is
            its last.

    The metric has its answers with it: it takes no `batch=`, and chunks of examples get theirs. Where both answers are
    the same it is 0, whatever the model does; the same for all examples is refused.
    """
    answers = _parse_answers(right, "right"), _parse_answers(wrong, "wrong")
    if answers[0] == answers[1]:
        raise CircuitsError(
            f"{CALLER}: right and wrong are the same, {format_value(right)}; give two that differ"
        )
    return LogitDifference(*answers, _parse_positions(position))


def bind_answers(
    metric: Any, batch: Any, inputs: tuple[HookedModel, Prompts] | None, caller: str
) -> tuple[Callable[..., Tensor], Any, tuple[int, ...] | None]:
    """Returns a logit difference as a function, its batch (the answers of these prompts) and the positions it reads.

    Without prompts, answers are those of the outputs that the function gets.
    """
    if metric is logit_difference:
        raise CircuitsError(
            f"{caller}: logit_difference(right, wrong) makes the metric; give metric=logit_difference(right, wrong)"
        )
    if batch is not None:
        raise CircuitsError(f"{caller}: logit_difference has its answers with it; leave out batch=")
    if inputs is None:
        return answer_logit_difference, metric, None
    hooked, prompts = inputs
    several = prompts.padded and len(set(metric.positions)) > 1
    read = None if several else tuple(dict.fromkeys(metric.positions))
    return answer_logit_difference, metric.resolve_answers(prompts.real, hooked, prompts), read


def answer_logit_difference(output: Tensor, answers: ResolvedAnswers | LogitDifference) -> Tensor:
    """Returns the logit difference of each example."""
    return answers(output)


answer_logit_difference.__name__ = CALLER


def _check_output(output: Any) -> None:
    if not isinstance(output, Tensor) or output.ndim != 3 or not output.is_floating_point():
        got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise CircuitsError(f"{CALLER}: it is of an output [n pos vocabulary], got {got}")


def _parse_answers(given: Any, name: str) -> tuple[Answer, ...]:
    """Returns the answers of each example as ids or texts; one may have several."""
    given = to_tensor_if_array(given, f"{CALLER}: {name}")
    if isinstance(given, Tensor):
        numbers = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
        given = given.tolist() if numbers and given.ndim < 3 else [given]
    listed = given if isinstance(given, list | tuple) else [given]
    answers = tuple(tuple(one) if isinstance(one, list | tuple) else (one,) for one in listed)
    tokens = [token for answer in answers for token in answer]
    wrong = [token for token in tokens if not (isinstance(token, str) and token) and not is_whole(token, 0)]
    if wrong or not tokens or not all(answers):
        raise CircuitsError(
            f"{CALLER}: {name} is an id or text, or a list with one for each example; got "
            f"{format_value(wrong[0] if wrong else given)}"
        )
    return tuple(tuple(t if isinstance(t, str) else int(t) for t in answer) for answer in answers)


def _parse_positions(given: Any) -> tuple[int, ...]:
    given = to_tensor_if_array(given, f"{CALLER}: position")
    given = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
    given = given if isinstance(given, list | tuple) else [given]
    if not given or not all(is_whole(position) for position in given):
        raise CircuitsError(
            f"{CALLER}: position is a whole number, or a list with one for each example; got {given!r}"
        )
    return tuple(map(int, given))


def _answer_first_token_ids(
    pairs: list[tuple[Answer, ...]], hooked: HookedModel, prompts: Prompts, lengths: list[int]
) -> list[tuple[Answer, ...]]:
    """Returns the answers of each example as ids: of a text, its first token after so many of the prompt's."""
    if getattr(hooked.model, "tokenizer", None) is None:
        raise CircuitsError(f"{CALLER}: answers that are texts need the model's tokenizer; give token ids")
    found: list[tuple[Answer, ...]] = []
    for row, (pair, length) in enumerate(zip(pairs, lengths, strict=True)):
        tokens: dict[str, list[int]] = {}
        for text in dict.fromkeys(one for answer in pair for one in answer if isinstance(one, str)):
            tokens[text] = _tokenize_continuation(text, hooked, prompts, row, length)
            for other in tokens:
                if other != text and tokens[other][0] == tokens[text][0]:
                    raise CircuitsError(
                        f"{CALLER}: example {row}: the answers {other!r} and {text!r} begin with the same token, "
                        f"{tokens[text][0]}; put what they share into the prompt"
                    )
        firsts: dict[int | str, int | str] = {text: ids[0] for text, ids in tokens.items()}
        found.append(tuple(tuple(firsts.get(one, one) for one in answer) for answer in pair))
    return found


def _tokenize_continuation(
    text: str, hooked: HookedModel, prompts: Prompts, row: int, length: int
) -> list[int]:
    """Returns the tokens of an answer after a prompt's; in bidirectional attention, where it is not read after its
    prompt but in its place, the one token that it is by itself.
    """
    tokens = continuation_ids(hooked, prompts, row, length if hooked.causal else 0, text)
    if not tokens:
        raise CircuitsError(
            f"{CALLER}: example {row}: the tokens of prompt and answer {text!r} together do not begin with the "
            "prompt's; begin the answer, and not end the prompt, with the space between them, or give token ids"
        )
    if len(tokens) > 1 and not hooked.causal:
        raise CircuitsError(f"{CALLER}: the answer {text!r} is {len(tokens)} tokens, {tokens}; give one")
    return tokens
