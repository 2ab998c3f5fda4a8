"""What the CUDA kernels should take on a GPU, on paper. `python -m benchmarks.gpu_model` prints it.

A kernel is a list of what it needs of each part of the GPU. Parts work side by side, so the longest of their times is
the least the kernel can take; launches and the small kernels around it come on top.

devices     the GPUs, and what each part of them does per clock
jobs        the kernels' calls whose time is predicted
counts      registers and instructions of the compiled kernels; nvcc reads the registers again
cuts        groups, pairs and tiles that the Gram is cut into
costs       the time of a job on a GPU
tables      its tables, and in arithmetic a row of each kernel step by step; page puts them into docs/gpu.md
"""

from benchmarks.gpu_model.costs import predict
from benchmarks.gpu_model.devices import GPUS
from benchmarks.gpu_model.jobs import MODELS, Job

__all__ = ["GPUS", "MODELS", "Job", "predict"]
