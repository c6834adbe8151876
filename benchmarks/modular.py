"""A full-batch epoch of the modular tasks: ours, HookedTransformer's own forward, and plain PyTorch.

    python benchmarks/modular.py [--repeats 9] [--threads 2] [--device cuda] [--large] [--clock cpu]
    python benchmarks/modular.py --to-95 [--threads 2]

An epoch is forward, loss in float64, backward and a fused AdamW update on the whole train split. The four run in
turn within one process; a line gives the median milliseconds with the range, the ratio of ours to it, epoch by epoch,
and the GFLOP of its matrix products as torch.utils.flop_counter sees them.

    ours        the trainer's step
    hooked      the same loop around HookedTransformer's own forward
    plain       a model of torch.nn written below, its block at all three positions, as published scripts have it
    plain, last the same, queries and MLP at the last position alone

Beside them two counts by formula (2 FLOP per multiply-add, backward twice forward): naive, with the block at three
positions and each prime's classes padded to those of the largest, and lean, where queries and MLP are at the last
position and what attention takes from a token is looked up.

--to-95 trains (a + b) mod 113 by the preset cpu until 95% of the validation examples are right, logging and
checkpoints included.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from train_step import summary

import tasks
from interp_tasks import train
from interp_tasks.training.config import parse_train_config
from interp_tasks.training.fused_forward import FusedForward, HookedForward, fastest_forward
from interp_tasks.training.parameter_update import Updater

#: Task, its settings, width.
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "addition, d 128": ("modular-addition", {}, 128),
    "5 primes, d 64": ("miiii", {"train_fraction": 0.5, "primes": [2, 3, 5, 7, 11]}, 64),
    "29 primes, d 128": ("miiii", {"train_fraction": 0.5}, 128),
}
LARGE = {"29 primes, d 256": ("miiii", {"train_fraction": 0.5}, 256)}
HEADS = 4
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
RECIPE = {"learning_rate": 1e-3, "weight_decay": 1.0}


class Plain(nn.Module):
    """One layer without biases or LayerNorm; every prime's classes beside each other."""

    def __init__(self, vocabulary: int, classes: int, d_model: int, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.embed = nn.Embedding(vocabulary, d_model)
        self.positions = nn.Parameter(torch.randn(3, d_model))
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key_value = nn.Linear(d_model, 2 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model, bias=False),
            nn.ReLU(),
            nn.Linear(4 * d_model, d_model, bias=False),
        )
        self.unembed = nn.Linear(d_model, classes, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=d_model**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        k, v = self.key_value(x).chunk(2, -1)
        if not self.whole:
            x = x[:, -1:]
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.query(x), k, v))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=self.whole)
        x = x + self.out(z.transpose(1, 2).flatten(2))
        x = x + self.mlp(x)
        return self.unembed(x[:, -1])


def plain_loss(logits: Tensor, targets: Tensor, moduli: list[int]) -> Tensor:
    """Mean over primes of the cross-entropy by ln q, or the cross-entropy of the one modulus there is."""
    logits = logits.double()
    if targets.ndim == 1:
        return F.cross_entropy(logits, targets)
    losses = [
        F.cross_entropy(part, targets[:, column]) for column, part in enumerate(logits.split(moduli, dim=-1))
    ]
    return (torch.stack(losses) / torch.tensor(moduli, device=logits.device).double().log()).mean()


def epochs(task: tasks.Task, d_model: int, device: str) -> dict[str, Callable[[], None]]:
    """The four competitors, each an update of its own model."""
    settings = task.Model(d_model=d_model, n_heads=HEADS)
    config = parse_train_config(RECIPE)
    batch = task.sample(None, split="train").to(device)
    moduli = [answer.modulus for answer in task.modular_answers().values()]

    def of_ours(make: Callable[[Any], FusedForward | HookedForward]) -> Callable[[], None]:
        model = task.build_model(0, settings)
        model.to(device, print_details=False)
        forward, updater = make(model), Updater(model, config)

        def epoch() -> None:
            task.loss(forward(batch.tokens), batch).backward()
            updater.set_learning_rate(0)
            updater.update_parameters()

        return epoch

    def of_plain(whole: bool) -> Callable[[], None]:
        model = Plain(task.d_vocab, task.d_vocab_out, d_model, whole).to(device)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=1.0, fused=True
        )

        def epoch() -> None:
            plain_loss(model(batch.tokens), batch.targets, moduli).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return epoch

    return {
        "ours": of_ours(lambda model: fastest_forward(model, task.read_positions, batch.tokens)[0]),
        "hooked": of_ours(lambda model: HookedForward(model, task.read_positions)),
        "plain": of_plain(whole=True),
        "plain, last": of_plain(whole=False),
    }


def formula(task: tasks.Task, d_model: int) -> dict[str, float]:
    """GFLOP of an epoch's products, naive and lean."""
    moduli = [answer.modulus for answer in task.modular_answers().values()]
    naive = 3 * 12 * d_model**2 + 2 * 9 * d_model + d_model * len(moduli) * max(moduli)
    lean = 8 * d_model**2 + 3 * HEADS * d_model + d_model * sum(moduli)
    n = len(task.sample(None, split="train"))
    return {name: 3 * 2 * n * count / 1e9 for name, count in {"naive": naive, "lean": lean}.items()}


def gigaflops(epoch: Callable[[], None]) -> float:
    with FlopCounterMode(display=False) as counter:
        epoch()
    return float(counter.get_total_flops()) / 1e9


def milliseconds(epoch: Callable[[], None], device: str, clock: Callable[[], float]) -> float:
    start = clock()
    epoch()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return 1000 * (clock() - start)


def compare(
    case: str, name: str, values: dict[str, Any], d_model: int, device: str, repeats: int, clock: str
) -> None:
    task = tasks.get(name, **values)
    competitors = epochs(task, d_model, device)
    flops = {who: gigaflops(epoch) for who, epoch in competitors.items()}

    def timed(epoch: Callable[[], None]) -> float:
        return milliseconds(epoch, device, CLOCKS[clock])

    for epoch in competitors.values():
        timed(epoch)
    times: dict[str, list[float]] = {who: [] for who in competitors}
    for _ in range(repeats):
        for who, epoch in competitors.items():
            times[who].append(timed(epoch))
    counted = ", ".join(f"{kind} {count:.1f}" for kind, count in formula(task, d_model).items())
    print(f"{case} ({len(task.sample(None, split='train'))} examples; by formula {counted} GFLOP)")
    for who in competitors:
        ratio = summary([a / b for a, b in zip(times["ours"], times[who], strict=True)], 2)
        print(f"  {who:12} {summary(times[who], 1):>24} ms   {flops[who]:6.1f} GFLOP   ours/it {ratio}")


class Reached(Exception):
    """Ends a run early."""


def to_95(device: str, threads: int) -> None:
    """Train the preset cpu of modular addition until 95% of the validation examples are right."""

    def watch(step: int, steps: int, line: Mapping[str, Any]) -> None:
        if line.get("validation", {}).get("accuracy", 0.0) >= 0.95:
            raise Reached(step)

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        try:
            train(
                "modular-addition",
                out=Path(folder) / "run",
                preset="cpu",
                config={"threads": threads},
                device=device,
                progress=watch,
            )
        except Reached as reached:
            print(f"95% of the validation examples at step {reached}, {time.perf_counter() - start:.0f} s")
        else:
            print(f"not reached in {time.perf_counter() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: of this process, on a busy machine"
    )
    parser.add_argument("--large", action="store_true", help="29 primes at width 256 too")
    parser.add_argument("--to-95", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.set_num_threads(options.threads)
    where = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    print(
        f"torch {torch.__version__}, {where}, {options.threads} thread(s), {options.clock} time", flush=True
    )
    if options.to_95:
        to_95(options.device, options.threads)
        return
    for case, (name, values, d_model) in {**CASES, **(LARGE if options.large else {})}.items():
        compare(case, name, values, d_model, options.device, options.repeats, options.clock)


if __name__ == "__main__":
    main()
