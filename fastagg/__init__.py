"""fastagg: fast aggregation of federated-learning client models.

A round takes the global model and the client models, as state dicts, and returns the new global model:

    import fastagg

    new_sd = fastagg.fedawa(global_sd, client_sds, sizes=[600, 250, 410])
    model.load_state_dict(new_sd)       # a dict of tensors, like the inputs
    new_sd.weights                      # the weight of each client: [K]
    new_sd.gram                         # inner products of the client updates: norms, cosines, distances

All methods are functions of this form. Options are keyword arguments; help(fastagg.fedawa) explains them.

    fastagg.list_methods()              # all methods: name, description, paper, options. Also: `fastagg methods`
    fastagg.krum(global_sd, client_sds, f=2)
    fastagg.feddisco(global_sd, client_sds, sizes, label_dist=counts)       # some methods take further round inputs

A server keeps an aggregator. It remembers from round to round what its method needs (momentum, logits, clusters), by
client id, and can be saved:

    server = fastagg.aggregator("fedadam", lr=0.01, on_bad_client="drop")
    for round in range(100):
        global_sd = server.aggregate(global_sd, client_sds, sizes, client_ids)
        global_sd.dropped               # clients left out, with the reason: a NaN, a wrong shape, ...
    server.save("fedadam.state")        # resume with server.load("fedadam.state")

Models stay where they are: in CPU or GPU tensors, in NumPy arrays, in files (aggregate_files), or spread over processes
(group=, distribute). fastagg does not flatten or stack them, and never modifies its inputs. If an input is wrong, an
InputError names the client and the key.

LoRA adapters are aggregated by their updates B A: fastagg.lora.aggregate (see help(fastagg.lora)).

To write your own method, or to inspect a round:

    gram = fastagg.gram(global_sd, client_sds)              # one read of the clients; layerwise=True: per layer
    gram.norms(), gram.cosine(), gram.distances()           # of the client updates, in float64
    new_sd = fastagg.mix(client_sds, weights)               # sum_k weights_k w_k; differentiable in weights
    fastagg.diagnostics(gram, weights).coherence            # how well the clients agree

Other names: gram_mix (Gram and mix in one read), client_vectors, set_backend, info (what this installation supports),
Result (what methods return), Round (clients that arrive one by one), register (adds a method) and the class of each
method (fastagg.FedAWA). The command `fastagg` aggregates files and simulates federated training: see `fastagg --help`.
"""

import sys
from importlib import import_module
from importlib.metadata import version as _version
from typing import Any

# Loaded together when the first of them is used: importing torch takes seconds, and `fastagg --help` needs none of it.
# Every registered method adds its function and its class. `make stubs` writes __init__.pyi anew from both.
_EXPORTS = {
    "fastagg._engine.aggregator": "Aggregator",
    "fastagg._engine.arrivals.round": "Round",
    "fastagg._engine.backends": "set_backend",
    "fastagg._engine.checks": "BadClientError InputError",
    "fastagg._engine.diagnostics": "diagnostics",
    "fastagg._engine.distributed.redistribute": "distribute",
    "fastagg._engine.files.job": "aggregate_files",
    "fastagg._engine.functions": "client_vectors gram gram_mix gram_times mix",
    "fastagg._engine.gram": "Gram",
    "fastagg._engine.info": "info",
    "fastagg._engine.nonfinite": "NonFiniteError",
    "fastagg._engine.registry": "aggregator list_methods register",
    "fastagg._engine.result": "Result Results",
    "fastagg._engine.unformed": "UnformedGram",
    "fastagg.methods.cwfedavg": "cwfedavg_class_models wdr_penalty",
    "fastagg.methods.fedawa": "fedawa_objective",
}
__version__ = _version("fastagg")


def _load() -> None:
    """Puts every public name into this module"""
    import_module("fastagg.ops")  # registers torch.ops.fastagg
    found = {name: getattr(import_module(part), name) for part, names in _EXPORTS.items() for name in names.split()}
    registry = import_module("fastagg._engine.registry")
    for name, cls in registry.registry().items():
        found |= {name: registry.function_of(cls), cls.__name__: cls}
    globals().update({name: value for name, value in found.items() if name not in globals()}, __all__=sorted(found))


def __getattr__(name: str) -> Any:
    if name in ("sim", "lora"):
        return import_module(f"fastagg.{name}")
    if name == "__all__" or not name.startswith("_"):
        _load()  # also when it was before: a method may have been registered since
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'fastagg' has no attribute {name!r}")


def __dir__() -> list[str]:
    _load()
    return sorted(globals())


if "torch" in sys.modules:  # nothing is left to save
    _load()
