"""The evidence page: small models of every family, pretrained and measured; started again, it goes on.

    python tests/bench/evidence WORKDIR --text PATH... --sst2 FOLDER --sts FILE... [--published FOLDER]

Everything is kept below WORKDIR; what a former start has done is not done again. `comparison.yaml` beside this file
says what is compared; --comparison names another. The page is written to --page (WORKDIR/RESULTS.md) when all is done
or a stop is asked for, and by --only-page at any time, of what is there by then. What it says is
kept in --figures, with what former folders found for the same text: it outlives the machines.

Stop it with SIGINT or SIGTERM: runs commit a checkpoint first. It may be killed, too.
"""

import sys
from pathlib import Path

sys.path[0] = str(
    Path(__file__).resolve().parents[1]
)  # in place of this folder, whose modules are a package's

from evidence.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
