"""One of two ranks that compute with different CPU kernels, as unlike processors do.

    horovodrun -np 2 python -m tests.torch.unlike ROUNDS_BETWEEN_DIGESTS

Rank 0 prints, as JSON, after which rounds the ranks' parameters were bit-identical, and how often they were put right.
"""

from __future__ import annotations

import json
import os
import sys

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["HOROVOD_RANK"])
os.environ["ATEN_CPU_CAPABILITY"] = "default" if RANK else "avx2"  # read when torch is imported

import torch  # noqa: E402

import horovod_abs.torch as hvd  # noqa: E402
from horovod_abs.torch.flat import digest_of  # noqa: E402

ROUNDS = 30


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        digest_every=int(sys.argv[1]),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    digests: dict[int, int] = {}
    optimizer.on_merge(lambda: digests.update({optimizer.last_round.round: digest_of(model.parameters())}))
    data = torch.randn(64, 64)
    for x in optimizer.epoch([data], rounds=ROUNDS):
        model(x).square().mean().backward()
        optimizer.step()
    everyone = hvd.allgather_object(digests)
    if hvd.rank() == 0:
        same = [number for number, digest in digests.items() if all(own[number] == digest for own in everyone)]
        kernels = torch.backends.cpu.get_cpu_capability()
        print(json.dumps({"same": same, "corrections": optimizer._rounds.driver.corrections, "kernels": kernels}))


if __name__ == "__main__":
    main()
