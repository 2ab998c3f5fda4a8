"""fastagg: adaptive aggregation of federated-learning client models at the price of one or two reads of memory.

new_sd = fastagg.fedawa(global_sd, client_sds)      # a state dict; new_sd.weights are the client weights
"""

from importlib.metadata import version as _version

from fastagg import ops as _ops  # noqa: F401  registers torch.ops.fastagg
from fastagg.backends import set_backend
from fastagg.core import client_vectors, gram, gram_mix, mix
from fastagg.gram import Gram
from fastagg.info import info
from fastagg.methods.fedavg import FedAvg, fedavg
from fastagg.methods.fedawa import FedAWA, fedawa, fedawa_objective
from fastagg.methods.simprox import SimProx, simprox
from fastagg.registry import aggregator, methods
from fastagg.result import Result, Results
from fastagg.table import InputError

__version__ = _version("fastagg")
__all__ = [
    "FedAWA",
    "FedAvg",
    "Gram",
    "InputError",
    "Result",
    "Results",
    "SimProx",
    "aggregator",
    "client_vectors",
    "fedavg",
    "fedawa",
    "fedawa_objective",
    "gram",
    "gram_mix",
    "info",
    "methods",
    "mix",
    "set_backend",
    "simprox",
]
