"""Our training step against HookedTransformer's own forward and a plain PyTorch model of the same shape.

    python benchmarks/train_step.py [--repeats 9] [--threads 1] [--presets matrix-completion:cpu]

A step is forward, loss, backward and a fused AdamW update on one fixed batch. The three run in turn within one
process; a line gives the median milliseconds with the range, and the ratio of ours to each, step by step.
The plain model has one packed QKV parameter, scaled_dot_product_attention and no hooks, and computes the last
layer at the positions that the task reads, as ours does. For the modular tasks: benchmarks/modular.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tasks
from interp_tasks.training.config import parse_train_config, read_task_presets
from interp_tasks.training.fused_forward import FusedForward, HookedForward
from interp_tasks.training.parameter_update import Updater

CASES = ["matrix-completion:cpu", "matrix-completion:reference"]


class PlainBlock(nn.Module):
    def __init__(self, d_model: int, n_heads: int, norm: bool, act: nn.Module, bias: bool) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1 = nn.LayerNorm(d_model) if norm else nn.Identity()
        self.norm2 = nn.LayerNorm(d_model) if norm else nn.Identity()
        self.qkv = nn.Linear(d_model, 3 * d_model, bias)
        self.out = nn.Linear(d_model, d_model, bias)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, 4 * d_model, bias), act, nn.Linear(4 * d_model, d_model, bias)
        )

    def forward(self, x: Tensor, read: Sequence[int] | None, causal: bool) -> Tensor:
        n, _, d_model = x.shape
        normed = self.norm1(x)
        if read is None:
            q, k, v = self.qkv(normed).chunk(3, -1)
        else:
            weight_q, weight_kv = self.qkv.weight.split([d_model, 2 * d_model])
            bias_q, bias_kv = (
                (None, None) if self.qkv.bias is None else self.qkv.bias.split([d_model, 2 * d_model])
            )
            q = F.linear(normed[:, read], weight_q, bias_q)
            k, v = F.linear(normed, weight_kv, bias_kv).chunk(2, -1)
            x = x[:, read]
        q, k, v = (t.view(n, t.shape[1], self.n_heads, -1).transpose(1, 2) for t in (q, k, v))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=causal and read is None)
        x = x + self.out(z.transpose(1, 2).reshape(n, -1, d_model))
        return x + self.mlp(self.norm2(x))


class PlainModel(nn.Module):
    """The same shape, written without TransformerLens. Reads either every position or the last."""

    def __init__(self, task: tasks.Task, settings: tasks.ModelSettings) -> None:
        super().__init__()
        d_model, norm = settings.d_model, settings.normalization is not None
        bias = settings.biases == "trained"
        self.causal = settings.attention == "causal"
        self.read = list(task.read_positions)
        self.every_position = len(self.read) == task.sequence_length
        self.embed = nn.Embedding(task.d_vocab, d_model)
        self.positions = nn.Parameter(torch.randn(task.sequence_length, d_model))
        acts = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
        self.blocks = nn.ModuleList(
            PlainBlock(d_model, settings.n_heads, norm, acts[settings.act_fn](), bias)
            for _ in range(settings.n_layers)
        )
        self.norm = nn.LayerNorm(d_model) if norm else nn.Identity()
        self.unembed = nn.Linear(d_model, task.d_vocab_out, bias)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        for i, block in enumerate(self.blocks):
            last = i == len(self.blocks) - 1
            x = block(x, self.read if last and not self.every_position else None, self.causal)
        return self.unembed(self.norm(x))


def steps(case: str) -> dict[str, Callable[[], None]]:
    name, preset = case.split(":")
    sections = read_task_presets(name)[preset]
    task = tasks.get(name, **sections.get("task", {}))
    settings = task.Model(**sections.get("model", {}))
    config = parse_train_config({**sections.get("train", {}), "optimizer": "adamw"})
    batch = task.sample(config.batch_size, split="train")

    def hooked_step(make: type[FusedForward] | type[HookedForward]) -> Callable[[], None]:
        model = task.build_model(0, settings)
        forward, updater = make(model, task.read_positions), Updater(model, config)

        def step() -> None:
            task.loss(forward(batch.tokens), batch).backward()
            updater.set_learning_rate(0)
            updater.update_parameters()

        return step

    plain = PlainModel(task, settings)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=config.learning_rate, fused=True)

    def plain_step() -> None:
        task.loss(plain(batch.tokens), batch).backward()
        if config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {"ours": hooked_step(FusedForward), "hooked": hooked_step(HookedForward), "plain": plain_step}


def milliseconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - start)


def summary(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--presets", default=",".join(CASES))
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.repeats} interleaved repeats")
    print(f"{'case':28} {'ours ms':>22} {'hooked ms':>22} {'plain ms':>22}  ours/hooked        ours/plain")
    for case in options.presets.split(","):
        competitors = steps(case)
        for step in competitors.values():
            step()
        times: dict[str, list[float]] = {name: [] for name in competitors}
        for _ in range(options.repeats):
            for name, step in competitors.items():
                times[name].append(milliseconds(step))
        ratios = [
            summary([a / b for a, b in zip(times["ours"], times[other], strict=True)], 2)
            for other in ("hooked", "plain")
        ]
        print(
            f"{case:28} " + " ".join(f"{summary(times[n], 1):>22}" for n in times) + "  " + "   ".join(ratios)
        )


if __name__ == "__main__":
    main()
