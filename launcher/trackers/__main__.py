"""`python -m launcher.trackers`: the process of one tracker (`launcher.trackers.publish`)."""

import os

from launcher.trackers.publish import main

os.nice(10)
os._exit(main())  # without waiting for a client's threads
