"""`python -m benchmarks.recordings_in_parts FOLDER`: `distbench.worker.child recordings` on a device that has RMSNorm
in parts, as a CPU has it, and no kernel of its own for it."""

import sys

from distbench.torch_private import shapes_only
from distbench.worker.child import main

if __name__ == "__main__":
    shapes_only.OWN_KERNELS = ()
    main("recordings", *sys.argv[1:])
