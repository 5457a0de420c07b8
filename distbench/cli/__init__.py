"""The commands of `cli`, one module each. Arguments go to calls, results to text and exit codes; nothing else happens.

Imports stand inside functions: `distbench --help` must not pay for what it does not use.
"""

import time

STARTED_AT = time.time()
