"""The process of one rank: it joins the others, takes the steps, and writes its measurements to a file."""

import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from encoder_core.train.exchange import Control
from launcher.plan.measure.requests import MeasureRequest
from launcher.plan.measure.steps import take_steps
from launcher.runtime.run.log import encode
from launcher.runtime.run.record import open_run

_COLLECTIVE = timedelta(minutes=10)


def carry_out(order: MeasureRequest) -> None:
    """Take the steps of `order` and write the result. It creates and destroys the process group of torch, so it runs
    in a process of its own.
    """
    torch.set_num_threads(order.threads)
    if order.device == "cuda":
        torch.cuda.set_device(order.rank)
    dist.init_process_group(
        "nccl" if order.device == "cuda" else "gloo",
        init_method=f"file://{order.meeting}",
        rank=order.rank,
        world_size=order.world,
        timeout=_COLLECTIVE,
    )
    try:
        taken = take_steps(open_run(order.run), Control.join())
        Path(order.result).write_text(encode(asdict(taken)), "utf-8")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    carry_out(MeasureRequest.model_validate_json(sys.argv[1]))
