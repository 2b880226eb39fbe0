"""`python -m launcher.observe.sinks`: the process of a run's sinks (`launcher.observe.sinks.publish`)."""

import os
import sys

from launcher.observe.sinks.publish import main

os.nice(10)
sys.exit(main())  # clients clean up at exit; the driver kills the process if a client hangs
