"""fastagg: aggregation of federated-learning client models in a few reads of memory.

A round takes the global model and the clients' models, as state dicts, and returns the new global model:

    import fastagg

    new_sd = fastagg.fedawa(global_sd, client_sds, sizes=[600, 250, 410])
    model.load_state_dict(new_sd)       # a dict of tensors, like those that came in
    new_sd.weights                      # what each client counted for: [K]
    new_sd.gram                         # inner products of the updates: norms, cosines and distances of clients

Every method is a function of that form. Its options are keyword arguments; help(fastagg.fedawa) explains all of them.

    fastagg.methods()                   # all methods: name, one line, paper, options. Also: `fastagg methods`
    fastagg.krum(global_sd, client_sds, f=2)
    fastagg.feddisco(global_sd, client_sds, sizes, label_dist=counts)       # some want more about the round

A server keeps an aggregator, which remembers from round to round what its method needs (momentum, logits, clusters) by
client id, and can be saved:

    server = fastagg.aggregator("fedadam", lr=0.01, on_nonfinite="drop")
    for round in range(100):
        global_sd = server.aggregate(global_sd, client_sds, sizes, client_ids)
        global_sd.dropped               # ids of clients with NaN, which were left out
    server.save("fedadam.state")        # server.load("fedadam.state") resumes

Models stay where they are: on a GPU, in NumPy arrays, in files (aggregate_files), or spread over processes (group=,
distribute). Nothing is flattened or stacked, and inputs are never modified. InputError says which client and key is
wrong.

To write a method of your own, or to look at a round:

    gram = fastagg.gram(global_sd, client_sds)              # one read of the clients; layerwise=True for each layer
    gram.norms(), gram.cosine(), gram.distances()           # of updates, as float64
    new_sd = fastagg.mix(client_sds, weights)               # sum_k weights_k w_k; differentiable in weights
    fastagg.diagnostics(gram, weights).coherence            # how far the clients agree

Other names: gram_mix (both in one read), client_vectors, set_backend, info (what this installation can do), Result
(what methods return), and each method's class (fastagg.FedAWA). The command `fastagg` aggregates files and simulates
federated training: `fastagg --help`.
"""

import sys
from importlib import import_module
from importlib.metadata import version as _version
from types import ModuleType
from typing import Any

# Loaded together when the first of them is used: importing torch takes seconds, and `fastagg --help` needs none of it.
# After a change here, `python tests/test_exports.py` writes __init__.pyi anew, which tells type checkers the same.
_EXPORTS = {
    "fastagg._engine.backends": "set_backend",
    "fastagg._engine.checks": "InputError",
    "fastagg._engine.core": "client_vectors gram gram_mix mix",
    "fastagg._engine.diagnostics": "diagnostics",
    "fastagg._engine.files.job": "aggregate_files",
    "fastagg._engine.finite": "NonFiniteError",
    "fastagg._engine.gram": "Gram",
    "fastagg._engine.info": "info",
    "fastagg.methods.centred_clipping": "CentredClipping centred_clipping",
    "fastagg.methods.cfl": "CFL cfl",
    "fastagg.methods.cwfedavg": "CwFedAvg cwfedavg cwfedavg_class_models wdr_penalty",
    "fastagg.methods.fedadp": "FedAdp fedadp",
    "fastagg.methods.fedamp": "FedAMP fedamp",
    "fastagg.methods.fedavg": "FedAvg fedavg",
    "fastagg.methods.fedawa": "FedAWA fedawa fedawa_objective",
    "fastagg.methods.feddisco": "FedDisco feddisco",
    "fastagg.methods.fedlaw": "FedLAW fedlaw",
    "fastagg.methods.fednova": "FedNova fednova",
    "fastagg.methods.fedopt": "FedAdagrad FedAdam FedAvgM FedYogi fedadagrad fedadam fedavgm fedyogi",
    "fastagg.methods.geometric_median": "GeometricMedian geometric_median",
    "fastagg.methods.krum": "Krum MultiKrum krum multi_krum",
    "fastagg.methods.ldawa": "LDAWA ldawa",
    "fastagg.methods.simagg": "SimAgg simagg",
    "fastagg.methods.simprox": "SimProx simprox",
    "fastagg.methods.weiavg": "WeiAvg weiavg",
    "fastagg._engine.registry": "aggregator methods",
    "fastagg._engine.result": "Result Results",
    "fastagg._engine.distributed.redistribute": "distribute",
}
__all__ = sorted(name for names in _EXPORTS.values() for name in names.split())
__version__ = _version("fastagg")


def _load() -> None:
    import_module("fastagg.ops")  # registers torch.ops.fastagg
    for module, names in _EXPORTS.items():
        part = import_module(module)
        globals().update((name, getattr(part, name)) for name in names.split())


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fastagg' has no attribute {name!r}")
    _load()
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # gram, info, diagnostics and methods are functions and modules: importing the module must not hide the function
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
if "torch" in sys.modules:  # nothing is left to save
    _load()
