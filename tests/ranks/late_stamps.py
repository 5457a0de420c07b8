"""A watched loop of DDP on gloo, whose threads get the GIL late; the model outlives `destroy_process_group`."""

import faulthandler
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distbench
from distbench.torch_private import collectives


class LateClock:
    """`time`, whose clock takes 0.2 s longer in gloo's threads."""

    sleep = staticmethod(time.sleep)

    @staticmethod
    def monotonic() -> float:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)
        return time.monotonic()


faulthandler.dump_traceback_later(30, exit=True)  # a deadlock
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(1, 1))
collectives.time = LateClock
with distbench.watch(every=1) as watch:
    for _ in range(3):
        model(torch.ones(1, 1)).sum().backward()
        watch.step()
dist.destroy_process_group()
del model
print("ended")
