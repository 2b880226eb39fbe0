"""`python -m launcher.trackers`: the process of one tracker (`launcher.trackers.publish`)."""

import os
import sys

from launcher.trackers.publish import main

os.nice(10)
sys.exit(main())  # clients tidy up at exit; the driver ends one that does not come to it
