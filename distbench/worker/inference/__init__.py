"""Forward passes of a parallel model, with a cache of keys and values or without."""

from distbench.worker.inference.forward_step import ForwardStep as ForwardStep
from distbench.worker.inference.forward_step import forward_alone as forward_alone
from distbench.worker.inference.forward_step import step_of as step_of
from distbench.worker.inference.model_output import cache_of as cache_of
from distbench.worker.inference.model_output import output_of as output_of
