"""What ranks measure, in processes of tests: each leaves plain data."""

from dataclasses import asdict
from typing import Any

from encoder_core.train.exchange import Control
from launcher.measure.steps import take_steps
from launcher.run.record import open_run


def take(rank: int, world: int, uri: str, seconds: float) -> dict[str, Any]:
    """This rank's findings in `seconds` of steps of the run at `uri`."""
    return asdict(take_steps(open_run(uri), Control.join(), seconds))
