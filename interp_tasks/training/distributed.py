"""One run on several processes: each computes its share of every batch, gradients are summed, the first one writes.

A loss need not be a mean over examples, nor a sum of shares: the outputs of all processes are put together before it
is taken, so that every process has the loss of the whole batch. Its gradient by the process's own outputs goes back
through the process's own share, and DistributedDataParallel's reducer sums what arrives at the parameters.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from safetensors.torch import load, save
from torch import Tensor, nn

from interp_tasks.checkpoints.dtypes import as_dense_tensor, tensors_metadata
from interp_tasks.checkpoints.run_folder import ResumePoint, RunFolder
from interp_tasks.checkpoints.training_state import TrainingState
from interp_tasks.errors import ProcessLost, UserError
from interp_tasks.training.dropout import Dropout
from interp_tasks.training.forward import Forward
from interp_tasks.training.launch import Launch, launched

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer

    from tasks.base import Task

Result = TypeVar("Result")
#: What gloo and NCCL say, each in many words, when another process has gone.
LOST = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket|timed? ?out", re.IGNORECASE
)


class Processes:
    """The processes of a run, as one of them sees them; of one process alone everything is as if it were not there."""

    def __init__(self, launch: Launch | None = None, backend: str = "gloo") -> None:
        self.launch = launch or Launch()
        self.backend = backend
        self.several = self.launch.count > 1

    @property
    def leads(self) -> bool:
        """Tells whether this is the process that prints, locks and writes."""
        return self.launch.rank == 0

    def described(self) -> dict[str, Any] | None:
        """Returns the record of the processes in ``run.json``."""
        return {"count": self.launch.count, "backend": self.backend} if self.several else None

    def lead(self, work: Callable[[], Result]) -> Result | None:
        """Lets the first process do work for all; if it fails there, it fails for all.

        Raises:
            UserError: on the others, if it failed.
        """
        if not self.several:
            return work()
        failure: BaseException | None = None
        result = None
        if self.leads:
            try:
                result = work()
            except BaseException as error:
                failure = error
        done = self.number(int(failure is None))
        if failure is not None:
            raise failure
        if not done:
            raise UserError("the first process of this run could not go on; it says why")
        return result

    def number(self, value: int) -> int:
        """Returns the first process's value, on all."""
        if not self.several:
            return value
        message = torch.tensor(value)
        with losses_named():
            dist.broadcast(message, 0)
        return int(message)

    def any(self, value: bool) -> bool:
        """Returns on all processes whether it is so on any."""
        if not self.several:
            return value
        message = torch.tensor(int(value))
        with losses_named():
            dist.all_reduce(message, dist.ReduceOp.MAX)
        return bool(message)

    def point(self, point: ResumePoint | None) -> ResumePoint | None:
        """Returns on all processes the point that the first one goes on from."""
        if not self.several:
            return point
        content = b"" if point is None else packed(point)
        size = self.number(len(content))
        message = torch.frombuffer(bytearray(content or bytes(max(size, 1))), dtype=torch.uint8)
        with losses_named():
            dist.broadcast(message, 0)
        if self.leads or not size:
            return point
        return unpacked(message.numpy().tobytes())

    def folder(self, opening: Callable[[], RunFolder]) -> RunFolder | Follower:
        """Returns the run folder, opened by the first process."""
        return self.lead(opening) or Follower()

    def losses(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which errors name the loss of another process, where gradients are summed."""
        return losses_named() if self.several else contextlib.nullcontext()

    def forward(self, forward: Forward, model: HookedTransformer) -> Forward:
        """Returns a forward pass that this process has its share of."""
        return SharedForward(forward, model, self) if self.several else forward

    def share(self, examples: int) -> tuple[int, int]:
        """Returns the examples of this process, first and one past the last; shares differ by one at most."""
        rank, count = self.launch.rank, self.launch.count
        return rank * examples // count, (rank + 1) * examples // count


class SharedForward:
    """Each process computes its share of the examples, and all of them have the whole output.

    Only a process's own share of it has a gradient.
    """

    def __init__(self, forward: Forward, model: HookedTransformer, processes: Processes) -> None:
        self.kind = forward.kind
        self.own = forward
        self.processes = processes
        self.reduced = nn.parallel.DistributedDataParallel(Share(forward, model))
        self.reduced.register_comm_hook(None, lambda state, bucket: summed(bucket))

    def __call__(
        self, tokens: Int[Tensor, "batch pos"], dropout: Dropout | None = None
    ) -> Float[Tensor, "batch read d_out"]:
        first, last = self.processes.share(len(tokens))
        if dropout is not None:
            dropout = dataclasses.replace(dropout, share=(first, last, len(tokens)))
        forward = self.reduced if torch.is_grad_enabled() else self.own
        return self._together(forward(tokens[first:last], dropout), len(tokens))

    def _together(self, local: Tensor, examples: int) -> Tensor:
        # What is sent must have one size: the largest share's.
        launch = self.processes.launch
        largest = -(-examples // launch.count)
        sent = local.new_zeros(largest, *local.shape[1:])
        sent[: len(local)] = local.detach()
        received = [torch.empty_like(sent) for _ in range(launch.count)]
        with losses_named():
            dist.all_gather(received, sent)
        gathered = []
        for rank, part in enumerate(received):
            first, last = Processes(dataclasses.replace(launch, rank=rank)).share(examples)
            gathered.append(local if rank == launch.rank else part[: last - first])
        return torch.cat(gathered)


class Share(nn.Module):
    """A forward pass as DistributedDataParallel wants it: a module that holds the parameters."""

    def __init__(self, function: Forward, model: HookedTransformer) -> None:
        super().__init__()
        # Alone: what else a model holds is built from its config, and need not be sent at every step.
        self.weights = nn.ParameterList(model.parameters())
        self.function = function

    def forward(self, tokens: Tensor, dropout: Dropout | None) -> Tensor:
        return self.function(tokens, dropout)


def summed(bucket: dist.GradBucket) -> Any:
    """Returns the sum of the gradients, not the mean: every process took the loss of the whole batch."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Follower:
    """A run folder for a process that does not write."""

    path = Path()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing, as nothing is open."""

    def resume(self, at: int | None = None) -> None:
        """Returns nothing: the first process says where training goes on."""

    def log(self, line: Mapping[str, Any]) -> None: ...

    def log_time(self, step: int, seconds: float) -> None: ...

    def time_at(self, step: int) -> None: ...

    def finish(self, peaks: Mapping[str, int]) -> None: ...

    def save(
        self,
        step: int,
        model: HookedTransformer,
        task: Task | None,
        training_state: TrainingState,
        metrics: Mapping[str, Any] | None = None,
    ) -> None: ...

    def save_stop(
        self, step: int, model: HookedTransformer, task: Task | None, training_state: TrainingState
    ) -> None: ...


def join(launch: Launch, device: str) -> Processes:
    """Joins the processes that torchrun started, once; without torchrun this is the only one.

    Raises:
        ProcessLost: if they do not meet.
    """
    if launch.count == 1:
        return Processes()
    on_gpu = device.startswith("cuda")
    if not dist.is_initialized():
        if on_gpu:
            torch.cuda.set_device(device)
        # What is said beside the training is on the CPU.
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        # Python answers no signal while torch waits for the others: the default ends the process.
        with losses_named(), default_signals():
            dist.init_process_group(backend, rank=launch.rank, world_size=launch.count)
        atexit.register(leave)
    return Processes(launch, "nccl" if on_gpu else "gloo")


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM end the process at once, without Python."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
    python_handlers = {
        number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)
    }
    for number in python_handlers:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in python_handlers.items():
            signal.signal(number, handler)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def losses_named() -> Iterator[None]:
    """Turns the loss of another process into an error of one line.

    Raises:
        ProcessLost: in place of what gloo or NCCL say.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not LOST.search(str(error)):
            raise
        raise ProcessLost(
            f"process {launched().rank} of {launched().count} stops: another process of this run has gone; "
            "the same command goes on from the last checkpoint"
        ) from error


def packed(point: ResumePoint) -> bytes:
    tensors = {f"parameter/{name}": as_dense_tensor(tensor) for name, tensor in point.parameters.items()}
    tensors |= {f"state/{name}": as_dense_tensor(tensor) for name, tensor in point.tensors.items()}
    rest = {"step": point.step, "path": str(point.path), "data": dict(point.data)}
    return save(tensors, {"rest": json.dumps(rest)})


def unpacked(content: bytes) -> ResumePoint:
    tensors = load(content)
    rest = json.loads(tensors_metadata(content)["rest"])

    def under(prefix: str) -> dict[str, Tensor]:
        return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    return ResumePoint(rest["step"], Path(rest["path"]), under("state/"), rest["data"], under("parameter/"))
