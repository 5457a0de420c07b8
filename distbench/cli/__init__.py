"""The commands of `cli`, one module each. A command turns arguments into calls, and results into text and exit codes.

Heavy imports are inside functions, so that `distbench --help` is fast.
"""

import time

STARTED_AT = time.time()
