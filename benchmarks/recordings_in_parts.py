"""`python -m benchmarks.recordings_in_parts FOLDER`: `distbench.worker.child recordings` on a device that has RMSNorm
in parts, as a CPU has it, and no kernel of its own for it."""

import sys

from distbench.torch_private import fake_tensors
from distbench.worker.child import main

if __name__ == "__main__":
    fake_tensors.OWN_KERNELS = ()
    main("recordings", *sys.argv[1:])
