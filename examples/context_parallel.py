"""Context parallelism: train one layer on a sequence that is spread over several processes.

    torchrun --nproc-per-node 2 examples/context_parallel.py --tokens 200000

Every process holds its share of the tokens. The processes exchange sums of a fixed size (printed at
the start), not tokens, so a share can be as long as memory allows. The target of every token is the
largest first coordinate of the whole sequence, which only one of the processes has. With --causal
it is the largest one so far, and a token sees the tokens before it, in all processes.
"""

from __future__ import annotations

import argparse

import boltzattn
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def largest(x: torch.Tensor) -> torch.Tensor:
    """Over the tokens of all processes."""
    found = x.amax()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found


def largest_so_far(x: torch.Tensor) -> torch.Tensor:
    """Over all tokens up to each, here and in earlier processes."""
    ends = [torch.empty_like(x[:, :1]) for _ in range(dist.get_world_size())]
    dist.all_gather(ends, x.amax(1, keepdim=True))
    earlier = ends[: dist.get_rank()]
    return torch.cat([*earlier, x], 1).cummax(1).values[:, len(earlier) :]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=200_000, help="total of all processes")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--causal", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights in all processes
    layer = boltzattn.nn.LowRankAttention(
        8, 1, batch_first=True, process_group=dist.group.WORLD, dtype=torch.float64
    )
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    share = arguments.tokens // world
    probe = torch.rand(1, share, 1)
    values = probe.expand(1, share, 8).clone().requires_grad_()
    volume = boltzattn.distributed.explain(probe, probe, values, is_causal=arguments.causal)
    if rank == 0:
        print(volume)
    for step in range(arguments.steps):
        torch.manual_seed(step * world + rank)  # different tokens in each process
        x = torch.randn(1, share, 8, dtype=torch.float64)
        target = largest_so_far(x[..., 0]) if arguments.causal else largest(x[..., 0])
        out, _ = model(x, x, x, is_causal=arguments.causal)
        loss = (out[..., 0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
