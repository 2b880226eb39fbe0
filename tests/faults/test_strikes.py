"""An hour of strikes: any command, any process of it, any signal, any limit of the environment.

    MASKFLEET_STRIKE_MINUTES=60 infra/test -m long tests/faults/test_strikes.py -rP --seed 1

No end but 0, 2 with a remedy, and 75 (and the struck process's own signal, where it was the command itself); after that
the same command, given again, completes, and its bytes are those of the command that nobody struck.
"""

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.support.faults.strikes import Bench, Strike, draw
from tests.support.stores.s3 import S3Server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(0)]

MINUTES = float(os.environ.get("MASKFLEET_STRIKE_MINUTES", "60"))


@pytest.mark.long
@pytest.mark.rgw
def test_any_strike_has_one_of_three_ends(request: pytest.FixtureRequest, tmp_path: Path, rgw: S3Server) -> None:
    seed = request.config.getoption("--seed")
    bench = Bench(tmp_path, f"s3://{rgw.new_bucket()}/strikes")
    struck: list[tuple[Strike, str]] = []
    wrong: list[str] = []
    for number in bench.until(60 * MINUTES):
        strike = draw(random.Random(f"{seed} {number}"))
        outcome = bench.strike(strike)
        struck.append((strike, outcome.end))
        print(
            f"seed {seed} strike {number}: {strike} -> {outcome.end}, {outcome.compared:,} bytes equal",
            flush=True,
        )
        wrong += [f"strike {number}: {strike}: {problem}" for problem in outcome.problems]
    for title, counts in (
        ("command, end", Counter((strike.command, end) for strike, end in struck)),
        ("what struck, end", Counter((strike.what, end) for strike, end in struck)),
    ):
        print(f"{title}:")
        for (name, end), count in sorted(counts.items()):
            print(f"  {name:<24} {end:<12} {count:>5}")
    print(f"{len(struck)} strikes, {bench.starts} starts, {bench.compared:,} bytes compared, {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong)
