"""A rank on a machine that Ray knows by an address: it joins the others as `launcher.runtime.cluster.worker` does,
without Ray.

`python -m tests.support.ranks.meeting '{"rank": ...}'` prints, as JSON, what the nodes' first sums found.
"""

import json
import os
import sys
from typing import Any

from launcher.runtime.policies.watchdog import Watchdog


def meet(rank: int, addresses: list[str], port: int) -> dict[str, Any]:
    """`addresses`: of each rank's node."""
    import ray
    import torch.distributed as dist

    from checkpoints.gloo_peers import GlooPeers
    from launcher.runtime.cluster import worker
    from launcher.runtime.cluster.rank_placement import Seat
    from launcher.runtime.preflight.collective import first_sums
    from launcher.runtime.preflight.findings import judge_sums

    ray.util.get_node_ip_address = lambda: addresses[rank]
    seat = Seat(rank, len(addresses), 0, 1, rank, (addresses[0], port), ())
    os.environ |= seat.environment()
    worker._join_network(seat, Watchdog(step=10, other=10))
    told = judge_sums(first_sums(GlooPeers(dist.new_group(backend="gloo"))), addresses)
    found = {at: [[f.what, f.verdict, f.found] for f in all_of] for at, all_of in told.items()}
    dist.destroy_process_group()
    names = [name for name in os.environ if name.startswith(("GLOO_", "NCCL_"))]
    return {"found": found, "variables": {name: os.environ[name] for name in names}}


if __name__ == "__main__":
    print(json.dumps(meet(**json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # as in `run_ranks`
