"""Prepares a spare process before it has a seat: does all slow work of a start that does not depend on the seat.

It imports the libraries, reads recipe and tokenizer, and collects the versions that nodes compare. On a CPU it also
runs a small engine as a group of one rank, because the first step of DeepSpeed and torch loads much code, and loads the
run's compiled layers. On a GPU it only loads torch's compiler: CUDA must not be called before the seat is known.
"""

import os

import torch
import torch.distributed as dist

from encoder_core.train.engine import leave_groups
from encoder_core.train.rehearsal import verify_gradient_sums
from encoder_core.train.settings import EngineConfig
from launcher.runtime.preflight.collective import loaded_versions
from launcher.runtime.rank.build import engine_config
from launcher.runtime.rank.kernels import load_compiled_code
from launcher.runtime.rank.main import threads_per_rank
from launcher.runtime.run.kept_tokenizer import cached_tokenizer
from launcher.runtime.run.record import open_run

_SINGLE_RANK_VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # environment of a group of one rank


def prepare_process(run_uri: str, *, gpus: bool, ranks: int) -> None:
    """Prepare this process for a rank of the run. `ranks`: number of ranks on this node, which share its cores."""
    loaded_versions()  # cached, for the preflight of the rank
    run = open_run(run_uri)
    tokenizer = cached_tokenizer(run.store, run.record.inputs.tokenizer, run.recipe)
    if gpus:
        # Nothing is compiled: this only imports torch's compiler, which takes seconds, without a call to CUDA.
        torch.compiler.disable(_warm_up_engine)  # type: ignore[no-untyped-call]
    else:
        torch.set_num_threads(threads_per_rank(ranks))
        _warm_up_engine(engine_config(run.recipe))
        load_compiled_code(run, tokenizer)


def _warm_up_engine(config: EngineConfig) -> None:
    os.environ.update(_SINGLE_RANK_VARIABLES)
    alone = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
    verify_gradient_sums(config)
    leave_groups()
