"""An estimate's figures as JSON, for programs: bytes, seconds, shares."""

import json
from dataclasses import asdict

from encoder_core.cost.memory import STAGES
from launcher.estimate.estimate import Estimate


def as_text(e: Estimate) -> str:
    return json.dumps(figures(e), indent=2)


def figures(e: Estimate) -> dict[str, object]:
    """Every figure; `largest_microbatch` is null at a stage where not even one row fits, or that is not supported."""
    return {
        "recipe": e.recipe.name,
        "nodes": e.cluster.nodes,
        "gpus_per_node": e.cluster.gpus_per_node,
        "gpu": asdict(e.cluster.gpu),
        "parameters": e.parameters,
        "phases": [
            asdict(phase) | {"step": phase.step, "tokens_per_second": phase.tokens_per_second}
            for phase in e.phases
        ],
        "memory": [
            {"zero": fit.stage, "microbatch": fit.rows, "bytes": fit.bytes, "fits": fit.fits}
            for fit in e.fits
        ],
        "largest_microbatch": {
            str(stage): fit.rows if (fit := e.largest(stage)) is not None else None for stage in STAGES
        },
        "data": asdict(e.data),
        "shuffle": None if e.radius is None else asdict(e.radius),
        "checkpoints": asdict(e.checkpoints),
        "seconds": e.seconds if e.seconds != float("inf") else None,
        "gpu_hours": e.gpu_hours if e.seconds != float("inf") else None,
    }
