"""`python -m launcher.observe.trackers`: the process of one tracker (`launcher.observe.trackers.publish`)."""

import os
import sys

from launcher.observe.trackers.publish import main

os.nice(10)
sys.exit(main())  # clients tidy up at exit; the driver ends one that does not come to it
