"""fastagg: adaptive aggregation of federated-learning client models at the price of a few reads of memory.

new_sd = fastagg.fedawa(global_sd, client_sds)      # a state dict; new_sd.weights are the client weights
"""

from importlib.metadata import version as _version

from fastagg import ops as _ops  # noqa: F401  registers torch.ops.fastagg
from fastagg.backends import set_backend
from fastagg.core import client_vectors, gram, gram_mix, mix
from fastagg.diagnostics import diagnostics
from fastagg.disk.job import aggregate_files
from fastagg.finite import NonFiniteError
from fastagg.gram import Gram
from fastagg.info import info
from fastagg.methods.centred_clipping import CentredClipping, centred_clipping
from fastagg.methods.cfl import CFL, cfl
from fastagg.methods.cwfedavg import CwFedAvg, cwfedavg, cwfedavg_class_models, wdr_penalty
from fastagg.methods.fedadp import FedAdp, fedadp
from fastagg.methods.fedamp import FedAMP, fedamp
from fastagg.methods.fedavg import FedAvg, fedavg
from fastagg.methods.fedawa import FedAWA, fedawa, fedawa_objective
from fastagg.methods.feddisco import FedDisco, feddisco
from fastagg.methods.fedlaw import FedLAW, fedlaw
from fastagg.methods.fednova import FedNova, fednova
from fastagg.methods.fedopt import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    fedadagrad,
    fedadam,
    fedavgm,
    fedyogi,
)
from fastagg.methods.geometric_median import GeometricMedian, geometric_median
from fastagg.methods.krum import Krum, MultiKrum, krum, multi_krum
from fastagg.methods.ldawa import LDAWA, ldawa
from fastagg.methods.simagg import SimAgg, simagg
from fastagg.methods.simprox import SimProx, simprox
from fastagg.methods.weiavg import WeiAvg, weiavg
from fastagg.registry import aggregator, methods
from fastagg.result import Result, Results
from fastagg.shards.redistribute import distribute
from fastagg.table import InputError

__version__ = _version("fastagg")
__all__ = [
    "CFL",
    "LDAWA",
    "CentredClipping",
    "CwFedAvg",
    "FedAMP",
    "FedAWA",
    "FedAdagrad",
    "FedAdam",
    "FedAdp",
    "FedAvg",
    "FedAvgM",
    "FedDisco",
    "FedLAW",
    "FedNova",
    "FedYogi",
    "GeometricMedian",
    "Gram",
    "InputError",
    "Krum",
    "MultiKrum",
    "NonFiniteError",
    "Result",
    "Results",
    "SimAgg",
    "SimProx",
    "WeiAvg",
    "aggregate_files",
    "aggregator",
    "centred_clipping",
    "cfl",
    "client_vectors",
    "cwfedavg",
    "cwfedavg_class_models",
    "diagnostics",
    "distribute",
    "fedadagrad",
    "fedadam",
    "fedadp",
    "fedamp",
    "fedavg",
    "fedavgm",
    "fedawa",
    "fedawa_objective",
    "feddisco",
    "fedlaw",
    "fednova",
    "fedyogi",
    "geometric_median",
    "gram",
    "gram_mix",
    "info",
    "krum",
    "ldawa",
    "methods",
    "mix",
    "multi_krum",
    "set_backend",
    "simagg",
    "simprox",
    "wdr_penalty",
    "weiavg",
]
