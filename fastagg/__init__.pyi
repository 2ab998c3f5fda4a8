# Written by `make stubs`
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch

from fastagg._engine.aggregator import Aggregator as Aggregator
from fastagg._engine.backends import set_backend as set_backend
from fastagg._engine.checks import BadClientError as BadClientError
from fastagg._engine.checks import InputError as InputError
from fastagg._engine.diagnostics import diagnostics as diagnostics
from fastagg._engine.distributed.redistribute import distribute as distribute
from fastagg._engine.files.job import aggregate_files as aggregate_files
from fastagg._engine.functions import client_vectors as client_vectors
from fastagg._engine.functions import gram as gram
from fastagg._engine.functions import gram_mix as gram_mix
from fastagg._engine.functions import mix as mix
from fastagg._engine.gram import Gram as Gram
from fastagg._engine.info import info as info
from fastagg._engine.nonfinite import NonFiniteError as NonFiniteError
from fastagg._engine.registry import list_methods as list_methods
from fastagg._engine.registry import register as register
from fastagg._engine.result import Result as Result
from fastagg._engine.result import Results as Results
from fastagg.methods.centred_clipping import CentredClipping as CentredClipping
from fastagg.methods.cfl import CFL as CFL
from fastagg.methods.cwfedavg import CwFedAvg as CwFedAvg
from fastagg.methods.cwfedavg import cwfedavg_class_models as cwfedavg_class_models
from fastagg.methods.cwfedavg import wdr_penalty as wdr_penalty
from fastagg.methods.fedadp import FedAdp as FedAdp
from fastagg.methods.fedamp import FedAMP as FedAMP
from fastagg.methods.fedavg import FedAvg as FedAvg
from fastagg.methods.fedawa import FedAWA as FedAWA
from fastagg.methods.fedawa import fedawa_objective as fedawa_objective
from fastagg.methods.feddisco import FedDisco as FedDisco
from fastagg.methods.fedlaw import FedLAW as FedLAW
from fastagg.methods.fednova import FedNova as FedNova
from fastagg.methods.fedopt import FedAdagrad as FedAdagrad
from fastagg.methods.fedopt import FedAdam as FedAdam
from fastagg.methods.fedopt import FedAvgM as FedAvgM
from fastagg.methods.fedopt import FedYogi as FedYogi
from fastagg.methods.geometric_median import GeometricMedian as GeometricMedian
from fastagg.methods.krum import Krum as Krum
from fastagg.methods.krum import MultiKrum as MultiKrum
from fastagg.methods.ldawa import LDAWA as LDAWA
from fastagg.methods.simagg import SimAgg as SimAgg
from fastagg.methods.simprox import SimProx as SimProx
from fastagg.methods.weiavg import WeiAvg as WeiAvg

ClientId = str | int
StateDict = Mapping[str, Any]
Sizes = Sequence[float] | Mapping[ClientId, float] | torch.Tensor | np.ndarray | None
PerClient = Sequence[Any] | Mapping[ClientId, Any] | torch.Tensor | np.ndarray | None

__version__: str

def centred_clipping(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    tau: float = 10.0,
    iterations: int = 1,
    weighted: bool = False,
    center: Literal["global", "previous"] = "global",
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of the clients' updates, none longer than tau: the model moves at most that far per iteration.

    tau          updates are clipped to this length; choose it near the length of an honest one
    iterations   clip again around the model found so far, this often in all
    weighted     by the data shares. False, as in the paper: every client counts alike, whatever size it claims
    center       what updates are clipped around: "global", no update at all; "previous", as in the paper, the update of
                 the round before, which an aggregator remembers (in memory, not for models in files)

    The model is g + sum_k weights_k (w_k - g), and with center="previous" + previous_weight times the update before:
    .weights (and .previous_weight) are never negative and sum to at most 1, less when updates were clipped. Whatever is
    not a parameter (buffers, integers) is the coordinate-wise median over all clients.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def cfl(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    eps1: float = 0.4,
    eps2: float = 1.6,
    min_size: int = 2,
    linkage: Literal["complete", "single"] = "complete",
    weighted: bool = True,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: Sequence[StateDict] | None = ...,
) -> Results:
    """Clusters of clients, split over the rounds where their updates point apart, and a model for each.

    eps1        a cluster is split when its mean update is shorter than this
    eps2        and its longest update is longer than this
    min_size    and it has more clients than this
    linkage     "complete": clusters are as far apart as their least similar clients, as in the authors' code;
                "single": as their most similar ones, which is the bipartition the paper calls optimal
    weighted    means by data shares, of updates in the first condition and of models in a cluster; False: plain means,
                as in the authors' code

    Returns Results: a model per cluster with clients in this round, the mean of their models. .clusters are
    the client ids of each, .mixing [M, K] the weights. The aggregator remembers each client id's cluster; its .clusters
    are all of them, absent clients included. A client it does not know joins the cluster of the known client whose
    update is most similar to its own. Clients absent while their cluster is split are forgotten: they join by
    similarity when they come back. Once there are several models, updates have to be taken from the model each client
    started from: call aggregate() for each cluster, with its model and its clients only. The other clusters wait.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns fastagg.Results: a Result for each cluster, with .clusters, .mixing, .gram and .dropped.
    """

def cwfedavg(
    global_sd: StateDict | None,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    head: str = "fc.weight",
    scope: str = "all",
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    class_dist: PerClient = ...,
    client_ids: Sequence[ClientId] | None = ...,
    out: Sequence[StateDict] | None = ...,
) -> Results:
    """A model per client: FedAvg of each class, blended by the client's class distribution.

    head         key of the output layer's weight, one row per class
    scope        which tensors are personal, the rest is plain FedAvg: "all"; "output", the layer of head, best in the
                 paper's tables; or a regular expression that is searched for in the keys
    class_dist   of one round: [K, C], a row per client of shares or sample counts (each row is divided by its sum, so
                 counts do not stand in for sizes); default: estimated from the row norms of head (Eq. 4)

    A class nobody holds has FedAvg as its model. A client whose row is all zero is taken to have the classes of the
    whole cohort, and gets FedAvg. The global model may be None.

    The result is a list of K state dicts in the order of the clients, with .mixing ([K, K], rows sum to 1: what tensors
    in scope take) and .class_dist ([K, C], the shares used).

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns fastagg.Results: a Result for each client, with .mixing, .gram and .dropped.
    """

def fedadagrad(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    weights: str | Mapping[str, Any] | Aggregator[Any] | None = None,
    lr: float = 0.1,
    beta1: float = 0.0,
    tau: float = 0.001,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Adagrad on the server: steps shrink with the sum of all squared updates so far.

    lr          server learning rate; the paper tunes it, so should you
    beta1       decay of the mean update m; 0 as in the paper's experiments, which is no momentum
    tau         adaptivity: added to sqrt(v), and where that starts; a small tau makes the steps of all elements alike
    weights     the method that gives the clients' weights, by name, as {"method": name, option: value}, or made by
                fastagg.aggregator(); the step then starts from its aggregate. Default: the data shares

    Only parameters take such steps, buffers are averaged. .weights are those of the method.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def fedadam(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    weights: str | Mapping[str, Any] | Aggregator[Any] | None = None,
    lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 0.001,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Adam on the server, with the clients' mean update as its gradient.

    lr          server learning rate; the paper tunes it, so should you
    beta1       decay of the mean update m
    beta2       decay of its mean square v
    tau         adaptivity: added to sqrt(v), and where that starts; a small tau makes the steps of all elements alike
    weights     the method that gives the clients' weights, by name, as {"method": name, option: value}, or made by
                fastagg.aggregator(); the step then starts from its aggregate. Default: the data shares

    Only parameters take such steps, buffers are averaged. .weights are those of the method.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def fedadp(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    alpha: float = 5.0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Weights from data shares and from the angle of each client's update to the global one, averaged over rounds.

    alpha   steepness: how much more than by its data a client can count (exp(alpha) times), and how suddenly

    An update of zero has no direction: its angle is pi / 2. The result has .weights, .gram and .angles, the averages
    used. The aggregator remembers the average and its number of rounds for each client id; state_dict() and
    load_state_dict() let a server resume after a crash. A round that raises leaves the memory as it was.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def fedamp(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    alpha: float | None = None,
    sigma: float | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: Sequence[StateDict] | None = ...,
) -> Results:
    """A model per client: itself and the others, the nearer the more (attentive message passing).

    alpha   step length; default sigma / K, so that clients at one point are averaged evenly and none ever keeps less
            of itself than 1 / K
    sigma   squared distance over which attention falls to 1 / e; default: the mean squared distance of two clients of
            the round, so that the attention does not change with the scale of the models

    Where alpha is so long that the others would get more than everything, their attention is scaled down to 1 in all:
    xi stays convex and no model is extrapolated. Sizes are checked but do not enter.

    The result is a list of K state dicts in the order of the clients, with .mixing ([K, K], rows sum to 1) and .gram.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns fastagg.Results: a Result for each client, with .mixing, .gram and .dropped.
    """

def fedavg(
    global_sd: StateDict | None,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of the client models, weighted by their data sizes (sizes; default: equal). One read.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def fedavgm(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    weights: str | Mapping[str, Any] | Aggregator[Any] | None = None,
    lr: float = 1.0,
    momentum: float = 0.9,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """FedAvg with momentum on the server: m = momentum m + sum_k n_k d_k, the new model g + lr m.

    lr          server learning rate; 1 with momentum 0 is FedAvg
    momentum    what is left of m from one round to the next
    weights     the method that gives the clients' weights, by name, as {"method": name, option: value}, or made by
                fastagg.aggregator(); the step then starts from its aggregate. Default: the data shares

    Only parameters take such steps, buffers are averaged. .weights are those of the method.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def fedawa(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    variant: Literal["paper", "released", "cos"] = "paper",
    steps: int | None = None,
    lr: float | None = None,
    optimizer: Literal["adam", "sgd"] = "adam",
    reg: Literal["cos", "euc"] | None = "cos",
    gamma: float = 1.0,
    layerwise: bool = False,
    logits_by: Literal["id", "position"] = "id",
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    logits: PerClient = ...,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Client weights learned in every round: clients whose updates agree with the weighted mean update gain weight.

    variant     "paper": Algorithm 1. Every round starts at the data shares, takes a few optimiser steps on Eq. 3 and
                aggregates with the optimised weights. Two reads of the clients; nothing is carried over rounds.
                "released": what the authors' code does and their tables show, for reproduction. The regulariser is
                sum_k lam_k (1 - cos(g, w_k)), the logits start at the raw data shares and are carried from round to
                round, and a round uses the weights from before its last step. With one step they are known up front,
                so the round is a single read, and its weights do not depend on what the clients sent in it.
                "cos": FedAWA-COS (Table 4), weights proportional to max(0, cos(d_k, sum_j n_j d_j)); no optimiser.
    steps       optimiser steps per round; default 5 in "paper", 1 in "released"
    lr          default for "adam" (betas 0.5, 0.999) 0.05 in "paper", 1e-3 in "released"; for "sgd" (momentum 0.9,
                weight decay 5e-4) 1e-2
    optimizer   "adam" or "sgd"
    reg         "cos", "euc" (the distance to g; in "released" its square per element) or None
    gamma       scales the aggregated parameters (not the buffers)
    layerwise   FedAWA-L: separate weights for every layer
    logits_by   "released" carries a logit per client id ("id"), or per position in client_sds ("position") as the
                authors' code does when only some of the clients take part
    logits      of one round: where to start, [K] or [L, K], for example a former result's .logits. Passing them on
                in "paper" makes the weights collapse onto one client within a few rounds.

    The result has .weights ([K], or [L, K] with .layers), .gram and .logits. With variant="released" use an aggregator,
    which carries the logits (state_dict() and load_state_dict() let a server resume after a crash), or pass logits=.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def feddisco(
    global_sd: StateDict | None,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    a: float = 0.5,
    b: float = 0.1,
    metric: Literal["l2", "kl"] = "kl",
    target: Literal["uniform", "global"] = "uniform",
    normalize: bool | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    label_dist: PerClient,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Weights from data shares and from how far each client's labels are from the global label distribution.

    a            how much a discrepancy counts
    b            what every client is given before negative weights are cut off
    metric       "kl": KL divergence of the client from the target, in nats; "l2": Euclidean distance
    target       "uniform", or "global": the clients' distributions averaged by their data shares
    normalize    divide the discrepancies by their sum over the cohort, so that they compare with data shares; default:
                 as in the authors' code, with "kl" only
    label_dist   of one round, required: each client's label distribution, [K, classes], as counts or shares

    Where every weight is cut off, clients get their data shares. The result has .weights and .discrepancy, [K].

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def fedlaw(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    model: torch.nn.Module | None = None,
    mode: Literal["both", "gws", "law"] = "both",
    base: Literal["exp", "quad"] = "exp",
    swa: bool = False,
    epochs: int = 100,
    lr: float = 0.01,
    swa_lr: float = 0.05,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    progress: bool | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    proxy: Any,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Client weights and a shrinking factor, learned by gradient descent on proxy data of the server.

    model      the nn.Module whose state dicts are aggregated; required, and never modified
    mode       "both"; "gws", adaptive global weight shrinking: gamma only; "law", attentive weights: l only
    base       how weights are made of what is learned: "exp" (softmax, exp) or "quad" (squares)
    swa        two stages of half the epochs each: first l, averaged over the epochs of its stage (stochastic weight
               averaging), then gamma; with mode="law" the first stage only
    epochs     passes over the proxy data
    lr         of Adam (betas 0.5, 0.999), halved every 20 epochs; the authors take 0.005 but for CIFAR-10
    swa_lr     what the learning rate rises to while l is averaged
    loss       function of (output, target) to a scalar tensor; default: cross-entropy
    progress   a progress bar (if tqdm is installed); default: only when stderr is a terminal
    proxy      of one round: (input, target) batches in any iterable, read again every epoch (a DataLoader, a list); an
               iterator, which cannot be, is read once and its batches are kept

    Learning starts at gamma = 1 and the data shares. The model runs in training mode, so normalisation layers use the
    statistics of the proxy batch; what they accumulate meanwhile is dropped: buffers of the result are the mean of the
    clients' with the learned l, and gamma scales parameters only.

    The result has .weights (l, [K], sum 1), .gamma, .losses (of each epoch, the mean over its batches) and .gram.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def fednova(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    momentum: float = 0.0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    local_steps: PerClient,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of the clients' updates, each divided by its number of local steps. One read, no Gram.

    momentum      of the clients' SGD; 0 for plain SGD
    local_steps   of one round, required: how many steps each client took, [K], positive. For another local solver
                  give the paper's ||a_k||_1, with momentum 0.

    .weights are tau_eff n_k / a_k, which need not sum to 1: the model is g + sum_k weights_k (w_k - g). Buffers are
    averaged by the data shares.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def fedyogi(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    weights: str | Mapping[str, Any] | Aggregator[Any] | None = None,
    lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 0.001,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Yogi on the server: Adam whose second moment moves by at most a fraction of the new square.

    lr          server learning rate; the paper tunes it, so should you
    beta1       decay of the mean update m
    beta2       1 - beta2 of the squared update is added to v, or taken off it when v is larger than that square
    tau         adaptivity: added to sqrt(v), and where that starts; a small tau makes the steps of all elements alike
    weights     the method that gives the clients' weights, by name, as {"method": name, option: value}, or made by
                fastagg.aggregator(); the step then starts from its aggregate. Default: the data shares

    Only parameters take such steps, buffers are averaged. .weights are those of the method.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def geometric_median(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    iterations: int = 100,
    tolerance: float = 1e-06,
    nu: float | None = None,
    weighted: bool = True,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The model with the least sum of distances to the clients: bad clients of less than half the data move it little.

    iterations   of Weiszfeld's algorithm, at most
    tolerance    it stops once no weight changes by more than this fraction of itself
    nu           a distance shorter than this counts as this; default: a millionth of the shortest between two clients
    weighted     by the data shares, as in the paper. False: every client counts alike, whatever size it claims; choose
                 that where clients may be hostile

    .weights are positive (0 for a client without data, if weighted) and sum to 1. It converges slowly, but to no harm,
    where the median comes to lie on a client, as it does on one with near half of the data. Whatever is not a parameter
    (buffers, integers) is the coordinate-wise median over all clients.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def krum(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The one client model that is closest to its neighbours, so that f clients may be anything.

    f           how many clients may be faulty or malicious; K >= 2 f + 3 is needed

    .weights are 1 for that client (the first of several with the same score) and 0 for the others; sizes are not used.
    Whatever is not a parameter (buffers, integers) is the coordinate-wise median over all clients.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def ldawa(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    normalize: bool = False,
    layerwise: bool = True,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Layer by layer, clients scaled by the cosine of their weights with the global model's.

    normalize   divide by the sum of the cosines instead of K, so that weights sum to 1; a layer whose cosines do not
                have a positive sum gets equal weights
    layerwise   False: one cosine for the whole model (DAWA)

    A layer whose global weights are all zero has no direction to diverge from: its clients count fully, 1/K each.
    Statistics (buffers) get weights proportional to max(0, cosine), equal ones where no cosine is positive.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def multi_krum(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    f: int = 1,
    m: int | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The plain mean of the m client models that are closest to their neighbours.

    f           how many clients may be faulty or malicious; K >= 2 f + 3 is needed
    m           how many clients are averaged, at most K - f, which is the default

    .weights are 1 / m for those clients and 0 for the others; sizes are not used. Whatever is not a parameter (buffers,
    integers) is the coordinate-wise median over all clients.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def simagg(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    eps: float = 1e-05,
    layerwise: bool = True,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Layer by layer, weights from data shares and from each client's nearness to the mean of the clients.

    eps         what is added to a distance before dividing by it: clients nearer to the mean than that count alike
    layerwise   False: one distance for the whole model

    The paper takes every tensor on its own: layers=lambda key: key does.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def simprox(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    lam: float = 0.7,
    tau: float = 0.5,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    lengths: PerClient = ...,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Weights from the similarity of client models and the length of their updates.

    lam         share of the cosine in the similarity, the rest is Gaussian
    tau         heterogeneity threshold: lam shrinks by mean cos(w_k, g) / tau while that mean is below it, down to 0
                when it is negative. The paper names no value.
    lengths     of one round: ||w_k - previous model of client k||, [K]; default: the length of its update

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def weiavg(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    lam: float = 1.0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
    entropies: PerClient = ...,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Weights from the diversity of the clients' data, seen in how far each update goes along the mean update.

    lam         emphasis on diverse clients, the power of their diversity: 0 is the plain mean, 10 is much
    entropies   of one round: the entropy of each client's labels, [K], instead of the projection; the round is then a
                single read of the clients

    Sizes have no part in it: the paper's clients have equal data sizes, and its u is their plain mean.

    Arguments of every method:

    global_sd      the model that the clients started from, a state dict of tensors or NumPy arrays. Methods that do
                   not need it accept None.
    client_sds     the K client models: state dicts with the same keys, shapes and dtypes, on the same device. They
                   are read in place and never modified.
    sizes          data sizes of the clients, K numbers >= 0, in a list or by client id; default: equal
    client_ids     K strings or integers that identify the clients across rounds and in messages; default: 0, 1, ...
                   With the same ids, the same clients in another order give the same bits.
    out            a former result, or any state dict of the same form, to write in place instead of allocating
                   tensors; a list of them if the method returns several models. It must not share memory with an
                   input.
    params          names of the parameters, or the nn.Module; default: all tensors except BatchNorm's running
                    statistics. Methods compare models by their parameters; other tensors are averaged (robust methods:
                    medians).
    layers          function from the name of a tensor to the name of its layer; default: the module that contains it
    on_bad_client   what to do with a client that cannot be aggregated: its model has other keys, shapes or dtypes, a
                    NaN or infinity, or values too large to compute with, or its data size or another entry for it is
                    invalid.
                    "raise": an InputError names the client and the key. "drop": the client is left out, as if it had
                    not been given, logged, and listed with the reason in .dropped of the result
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

@overload
def aggregator(
    name: Literal["centred_clipping"],
    *,
    tau: float = 10.0,
    iterations: int = 1,
    weighted: bool = False,
    center: Literal["global", "previous"] = "global",
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> CentredClipping: ...
@overload
def aggregator(
    name: Literal["cfl"],
    *,
    eps1: float = 0.4,
    eps2: float = 1.6,
    min_size: int = 2,
    linkage: Literal["complete", "single"] = "complete",
    weighted: bool = True,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> CFL: ...
@overload
def aggregator(
    name: Literal["cwfedavg"],
    *,
    head: str = "fc.weight",
    scope: str = "all",
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> CwFedAvg: ...
@overload
def aggregator(
    name: Literal["fedadagrad"],
    *,
    weights: str | Mapping[str, Any] | Aggregator[Any] | None = None,
    lr: float = 0.1,
    beta1: float = 0.0,
    tau: float = 0.001,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> FedAdagrad: ...
@overload
def aggregator(
    name: Literal["fedadam"],
    *,
    weights: str | Mapping[str, Any] | Aggregator[Any] | None = None,
    lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 0.001,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> FedAdam: ...
@overload
def aggregator(
    name: Literal["fedadp"],
    *,
    alpha: float = 5.0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> FedAdp: ...
@overload
def aggregator(
    name: Literal["fedamp"],
    *,
    alpha: float | None = None,
    sigma: float | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> FedAMP: ...
@overload
def aggregator(
    name: Literal["fedavg"],
    *,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> FedAvg: ...
@overload
def aggregator(
    name: Literal["fedavgm"],
    *,
    weights: str | Mapping[str, Any] | Aggregator[Any] | None = None,
    lr: float = 1.0,
    momentum: float = 0.9,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> FedAvgM: ...
@overload
def aggregator(
    name: Literal["fedawa"],
    *,
    variant: Literal["paper", "released", "cos"] = "paper",
    steps: int | None = None,
    lr: float | None = None,
    optimizer: Literal["adam", "sgd"] = "adam",
    reg: Literal["cos", "euc"] | None = "cos",
    gamma: float = 1.0,
    layerwise: bool = False,
    logits_by: Literal["id", "position"] = "id",
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> FedAWA: ...
@overload
def aggregator(
    name: Literal["feddisco"],
    *,
    a: float = 0.5,
    b: float = 0.1,
    metric: Literal["l2", "kl"] = "kl",
    target: Literal["uniform", "global"] = "uniform",
    normalize: bool | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> FedDisco: ...
@overload
def aggregator(
    name: Literal["fedlaw"],
    *,
    model: torch.nn.Module | None = None,
    mode: Literal["both", "gws", "law"] = "both",
    base: Literal["exp", "quad"] = "exp",
    swa: bool = False,
    epochs: int = 100,
    lr: float = 0.01,
    swa_lr: float = 0.05,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    progress: bool | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> FedLAW: ...
@overload
def aggregator(
    name: Literal["fednova"],
    *,
    momentum: float = 0.0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> FedNova: ...
@overload
def aggregator(
    name: Literal["fedyogi"],
    *,
    weights: str | Mapping[str, Any] | Aggregator[Any] | None = None,
    lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 0.001,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> FedYogi: ...
@overload
def aggregator(
    name: Literal["geometric_median"],
    *,
    iterations: int = 100,
    tolerance: float = 1e-06,
    nu: float | None = None,
    weighted: bool = True,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> GeometricMedian: ...
@overload
def aggregator(
    name: Literal["krum"],
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> Krum: ...
@overload
def aggregator(
    name: Literal["ldawa"],
    *,
    normalize: bool = False,
    layerwise: bool = True,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> LDAWA: ...
@overload
def aggregator(
    name: Literal["multi_krum"],
    *,
    f: int = 1,
    m: int | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> MultiKrum: ...
@overload
def aggregator(
    name: Literal["simagg"],
    *,
    eps: float = 1e-05,
    layerwise: bool = True,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> SimAgg: ...
@overload
def aggregator(
    name: Literal["simprox"],
    *,
    lam: float = 0.7,
    tau: float = 0.5,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> SimProx: ...
@overload
def aggregator(
    name: Literal["weiavg"],
    *,
    lam: float = 1.0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    group: Any = None,
) -> WeiAvg: ...
@overload
def aggregator(name: str, **options: Any) -> Aggregator[Any]: ...
