# Written by `make stubs`
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch

from fastagg import lora as lora

from fastagg._engine.aggregator import Aggregator as Aggregator
from fastagg._engine.arrivals.round import Round as Round
from fastagg._engine.backends import set_backend as set_backend
from fastagg._engine.checks import BadClientError as BadClientError
from fastagg._engine.checks import InputError as InputError
from fastagg._engine.diagnostics import diagnostics as diagnostics
from fastagg._engine.distributed.redistribute import distribute as distribute
from fastagg._engine.files.job import aggregate_files as aggregate_files
from fastagg._engine.functions import client_vectors as client_vectors
from fastagg._engine.functions import gram as gram
from fastagg._engine.functions import gram_mix as gram_mix
from fastagg._engine.functions import gram_times as gram_times
from fastagg._engine.functions import mix as mix
from fastagg._engine.gram import Gram as Gram
from fastagg._engine.info import info as info
from fastagg._engine.nonfinite import NonFiniteError as NonFiniteError
from fastagg._engine.registry import list_methods as list_methods
from fastagg._engine.registry import register as register
from fastagg._engine.result import Result as Result
from fastagg._engine.result import Results as Results
from fastagg._engine.unformed import UnformedGram as UnformedGram
from fastagg.methods.bulyan import Bulyan as Bulyan
from fastagg.methods.caf import CAF as CAF
from fastagg.methods.centred_clipping import CentredClipping as CentredClipping
from fastagg.methods.cfl import CFL as CFL
from fastagg.methods.cwfedavg import CwFedAvg as CwFedAvg
from fastagg.methods.cwfedavg import cwfedavg_class_models as cwfedavg_class_models
from fastagg.methods.cwfedavg import wdr_penalty as wdr_penalty
from fastagg.methods.dnc import DnC as DnC
from fastagg.methods.fedadp import FedAdp as FedAdp
from fastagg.methods.fedamp import FedAMP as FedAMP
from fastagg.methods.fedasync import FedAsync as FedAsync
from fastagg.methods.fedavg import FedAvg as FedAvg
from fastagg.methods.fedawa import FedAWA as FedAWA
from fastagg.methods.fedawa import fedawa_objective as fedawa_objective
from fastagg.methods.fedbe import FedBE as FedBE
from fastagg.methods.fedbuff import FedBuff as FedBuff
from fastagg.methods.feddf import FedDF as FedDF
from fastagg.methods.feddisco import FedDisco as FedDisco
from fastagg.methods.fedexp import FedExP as FedExP
from fastagg.methods.fedfomo import FedFomo as FedFomo
from fastagg.methods.fedlaw import FedLAW as FedLAW
from fastagg.methods.fednova import FedNova as FedNova
from fastagg.methods.fedopt import FedAdagrad as FedAdagrad
from fastagg.methods.fedopt import FedAdam as FedAdam
from fastagg.methods.fedopt import FedAvgM as FedAvgM
from fastagg.methods.fedopt import FedYogi as FedYogi
from fastagg.methods.flame import FLAME as FLAME
from fastagg.methods.fltrust import FLTrust as FLTrust
from fastagg.methods.foolsgold import FoolsGold as FoolsGold
from fastagg.methods.geometric_median import GeometricMedian as GeometricMedian
from fastagg.methods.ifca import IFCA as IFCA
from fastagg.methods.krum import Krum as Krum
from fastagg.methods.krum import MultiKrum as MultiKrum
from fastagg.methods.ldawa import LDAWA as LDAWA
from fastagg.methods.mda import MDA as MDA
from fastagg.methods.median import MeaMed as MeaMed
from fastagg.methods.median import Median as Median
from fastagg.methods.median import Phocas as Phocas
from fastagg.methods.median import TrimmedMean as TrimmedMean
from fastagg.methods.monna import MoNNA as MoNNA
from fastagg.methods.qfedavg import QFedAvg as QFedAvg
from fastagg.methods.server_ft import ServerFT as ServerFT
from fastagg.methods.simagg import SimAgg as SimAgg
from fastagg.methods.simprox import SimProx as SimProx
from fastagg.methods.smea import SMEA as SMEA
from fastagg.methods.uniform import Uniform as Uniform
from fastagg.methods.weiavg import WeiAvg as WeiAvg

ClientId = str | int
StateDict = Mapping[str, Any]
Sizes = Sequence[float] | Mapping[ClientId, float] | torch.Tensor | np.ndarray | None
PerClient = Sequence[Any] | Mapping[ClientId, Any] | torch.Tensor | np.ndarray | None

__version__: str

def bulyan(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Krum's choice of K - 2 f clients, then the mean of the K - 4 f values of each element nearest to their median.

    f           number of clients that may be faulty or malicious; requires K >= 4 f + 3

    .weights are 1 / (K - 2 f) for the clients chosen and 0 for the others; sizes are not used. Tensors that are not
    parameters (buffers, integers) become the coordinate-wise median over all clients.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def caf(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """A mean of the clients whose largest variance, over all directions, is small: outliers in it lose their weight.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 1

    .weights are not negative and sum to 1; sizes are not used. With f=0 they are equal.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of the client updates, each clipped to length tau: the model moves at most that far per iteration.

    tau          updates are clipped to this length; choose it close to the length of an honest update
    iterations   number of iterations; each clips again around the model found so far
    weighted     True: weight clients by their data shares. False, as in the paper: all clients count equally, whatever
                 data size they claim
    center       what updates are clipped around: "global", no update at all; "previous", as in the paper, the update of
                 the previous round, which an aggregator remembers (in memory; not available for models in files)

    The model is g + sum_k weights_k (w_k - g); with center="previous", previous_weight times the previous update is
    added. .weights (and .previous_weight) are never negative and sum to at most 1, less if updates were clipped.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: Sequence[StateDict] | None = ...,
) -> Results:
    """Clusters of clients, one model per cluster; a cluster is split when the updates of its clients diverge.

    eps1        a cluster is split if its mean update is shorter than this,
    eps2        its longest update is longer than this,
    min_size    and it has more clients than this
    linkage     "complete": the distance of two clusters is that of their least similar clients, as in the authors'
                code;
                "single": that of their most similar clients, which gives the bipartition the paper calls optimal
    weighted    True: means are weighted by data shares, both of updates in the first condition and of models in a
                cluster; False: plain means, as in the authors' code

    Returns Results: one model for each cluster that has clients in this round, the mean of their models. .clusters
    lists the client ids of each, .mixing [M, K] the weights. The aggregator remembers the cluster of each client id;
    its .clusters lists all clusters, including absent clients. An unknown client joins the cluster of the known client
    whose update is most similar to its own. Clients that are absent while their cluster is split are forgotten; they
    join by similarity when they return. Once there are several models, the update of a client must be taken from the
    model it started from: call aggregate() once per cluster, with its model and only its clients. The other clusters do
    not change.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    by: Literal["norms", "labels"] = "norms",
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    class_dist: PerClient = ...,
    client_ids: Sequence[ClientId] | None = ...,
    out: Sequence[StateDict] | None = ...,
) -> Results:
    """One model per client: FedAvg of each class, blended by the class distribution of the client.

    head         key of the output layer's weight, one row per class
    scope        which tensors are personalised; the others are plain FedAvg. "all"; "output": the layer of head, best
                 in the paper's tables; or a regular expression that is searched for in the keys
    by           where class distributions come from: "norms" of the rows of head (Eq. 4); "labels": every round then
                 needs class_dist
    class_dist   per round: [K, C], one row of shares or sample counts per client (each row is divided by its sum, so
                 counts do not replace sizes), which replaces the estimate from head

    The model of a class that no client has is FedAvg. A client whose row is all zero is treated as having the classes
    of the whole cohort, and gets FedAvg. The global model may be None.

    The result is a list of K state dicts in the order of the clients, with .mixing ([K, K], rows sum to 1; used for
    tensors in scope) and .class_dist ([K, C], the shares used).

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns fastagg.Results: a Result for each client, with .mixing, .gram and .dropped.
    """

def dnc(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    f: int = 1,
    c: float = 1.0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The plain mean of all but the c f client models that are furthest from the mean in the direction of most spread.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 1
    c           filter fraction: c f clients are left out, rounded down; fewer than K

    .weights are equal for the clients that remain and 0 for the others; the first of equal scores remain. Sizes are
    not used.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Adagrad on the server: steps shrink with the sum of all squared updates so far.

    lr          server learning rate; the paper tunes it, and so should you
    beta1       decay of the mean update m; 0, as in the paper's experiments, means no momentum
    tau         adaptivity: added to sqrt(v), which starts at tau; a small tau makes the steps of all elements similar
    weights     the method that computes the clients' weights: its name, {"method": name, option: value}, or an
                aggregator; the step is then taken from its aggregate. Default: the data shares

    Only parameters take such steps; buffers become what the method of the weights makes of them, by default their mean.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Adam on the server, with the mean client update as its gradient.

    lr          server learning rate; the paper tunes it, and so should you
    beta1       decay of the mean update m
    beta2       decay of its mean square v
    tau         adaptivity: added to sqrt(v), which starts at tau; a small tau makes the steps of all elements similar
    weights     the method that computes the clients' weights: its name, {"method": name, option: value}, or an
                aggregator; the step is then taken from its aggregate. Default: the data shares

    Only parameters take such steps; buffers become what the method of the weights makes of them, by default their mean.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Weights from data shares and from the angle of each client update to the global update, averaged over rounds.

    alpha   steepness: how much more than its data share a client can count (exp(alpha) times), and how suddenly

    An update of zero has no direction; its angle is pi / 2. The result has .weights, .gram and .angles, the averages
    used. The aggregator remembers, for each client id, the average and its number of rounds; state_dict() and
    load_state_dict() let a server resume after a crash. A round that raises does not change this memory.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: Sequence[StateDict] | None = ...,
) -> Results:
    """One model per client: its own model mixed with the others, the closer the more (attentive message passing).

    alpha   step length; default sigma / K, so that identical clients are averaged evenly and no client keeps less than
            1 / K of itself
    sigma   squared distance at which attention falls to 1 / e; default: the mean squared distance between two clients
            of the round, so that attention does not depend on the scale of the models

    If alpha is so large that the others would get more than everything, their attention is scaled down to a sum of 1:
    xi stays convex and no model is extrapolated. Sizes are checked but not used.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns fastagg.Results: a Result for each client, with .mixing, .gram and .dropped.
    """

def fedasync(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    decay: Literal["polynomial", "hinge", "constant"] = "polynomial",
    a: float | None = None,
    b: float = 4.0,
    alpha: float = 0.6,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    version: PerClient,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Asynchronous: each client's model is mixed into the global one as it comes; the staler, the less of it.

    alpha     how much of a client's model the new one has, if it is not stale
    decay     how that falls with the staleness t, the number of versions made since the client got its model:
              "polynomial", (1 + t)^-a; "hinge", 1 up to t = b, then 1 / (a (t - b) + 1); "constant", 1
    a, b      of decay; a is 0.5 (polynomial) or 10 (hinge) by default
    version   per round, required: [K], the number of the version that each client started from. The first one is 0,
              each round makes the next, and the aggregator's .version is the current one

    With weights alpha s(t), times the data shares of several clients, the new model is g + sum_k weights_k (w_k - g);
    .staleness has t. Buffers are mixed likewise. A client that started from an older version has to send its model, not
    an update.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def fedavg(
    global_sd: StateDict | None,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    server_lr: float = 1.0,
    gamma: float = 1.0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of the client models, weighted by data size (sizes; default: equal). One read.

    server_lr   how far the model moves from the global model towards the mean; 1: all the way. Other values need the
                global model
    gamma       scales the new parameters (FedLAW's global weight shrinking)

    The new model is gamma (g + server_lr (sum_k weights_k w_k - g)). Buffers are the mean, whatever the options.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    nesterov: bool = False,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """FedAvg with momentum on the server: m = momentum m + sum_k n_k d_k, the new model is g + lr m.

    lr          server learning rate; lr=1 with momentum=0 is FedAvg
    momentum    the fraction of m that is kept from one round to the next
    nesterov    Nesterov's momentum, as torch.optim.SGD has it: the new model is g + lr (sum_k n_k d_k + momentum m).
                DiLoCo's outer optimiser (Douillard et al., 2023), with lr=0.7 and momentum=0.9
    weights     the method that computes the clients' weights: its name, {"method": name, option: value}, or an
                aggregator; the step is then taken from its aggregate. Default: the data shares

    Only parameters take such steps; buffers become what the method of the weights makes of them, by default their mean.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    start: Literal["shares", "feddisco"] = "shares",
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    logits: PerClient = ...,
    label_dist: PerClient = ...,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Client weights learned in every round: clients whose updates agree with the weighted mean update gain weight.

    variant     "paper": Algorithm 1. Every round starts from the data shares, takes a few optimiser steps on Eq. 3 and
                aggregates with the optimised weights. Two reads of the clients; nothing is carried over rounds.
                "released": what the authors' code does and their tables show, for reproduction. The regulariser is
                sum_k lam_k (1 - cos(g, w_k)); the logits start at the raw data shares and are carried from round to
                round; a round uses the weights from before its last step. With one step, these are known in advance, so
                the round is a single read, and its weights do not depend on what the clients sent in it.
                "cos": FedAWA-COS (Table 4), weights proportional to max(0, cos(d_k, sum_j n_j d_j)); no optimiser.
    steps       optimiser steps per round; default: 5 in "paper", 1 in "released"
    lr          learning rate; default for "adam" (betas 0.5, 0.999): 0.05 in "paper", 1e-3 in "released"; for "sgd"
                (momentum 0.9, weight decay 5e-4): 1e-2
    optimizer   "adam" or "sgd"
    reg         "cos", "euc" (the distance to g; in "released", its square per element) or None
    gamma       scales the aggregated parameters (not the buffers)
    layerwise   FedAWA-L: separate weights for every layer
    logits_by   "released" carries one logit per client id ("id"), or per position in client_sds ("position"), as the
                authors' code does when only some of the clients take part
    start       the weights to start from: "shares" of the data; "feddisco": those of FedDisco with its defaults (Figure
                6): every round then needs label_dist. "released" starts at these as logits, as it does at shares
    label_dist  per round: each client's label distribution, [K, classes], as counts or shares; the start is FedDisco's
    logits      per round: the starting point, [K] or [L, K], for example .logits of a former result. Passing them on in
                "paper" makes the weights collapse onto one client within a few rounds.

    The result has .weights ([K], or [L, K] with .layers), .gram and .logits. With variant="released", use an
    aggregator, which carries the logits (state_dict() and load_state_dict() let a server resume after a crash), or pass
    logits=.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def fedbe(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    model: torch.nn.Module | None = None,
    progress: bool | None = None,
    epochs: int = 100,
    lr: float = 0.001,
    samples: int = 10,
    distribution: Literal["gaussian", "dirichlet"] = "gaussian",
    alpha: float = 1.0,
    swa: bool = True,
    seed: int = 0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    proxy: Any,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of the clients, trained to predict on proxy data what an ensemble of models around them predicts.

    model          the nn.Module whose state dicts are aggregated; required, and never modified. Its output must be
                   logits, [N, classes]
    samples        models that are drawn, besides the clients and their mean
    distribution   what they are drawn from: "gaussian", with the clients' mean and variance in every coordinate, or
                   "dirichlet", random weights of the clients
    alpha          of the Dirichlet distribution: small for models near single clients, large for models near the mean
    swa            average the parameters over the second half of the epochs; False: those after the last one
    seed           of what is drawn; every round of an aggregator draws anew
    epochs         passes over the proxy data
    lr             learning rate of Adam (betas 0.5, 0.999)
    progress       show a progress bar (if tqdm is installed); default: only if stderr is a terminal
    proxy          per round: inputs, or (input, target) batches, whose targets are not looked at, in any iterable that
                   can be read again every epoch. What the ensemble predicts on the batches of a list is computed once,
                   otherwise in every epoch

    Drawn models have the clients' mean as their buffers. All models of the ensemble predict in evaluation mode. The
    model trains in training mode: its running statistics, which start at the mean of the clients', follow. Integers are
    the maximum over the clients.

    The result has .weights (the data shares, of the mean that is trained) and .losses (of each epoch, the mean over
    its batches).

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def fedbuff(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    decay: Literal["polynomial", "hinge", "constant"] = "polynomial",
    a: float | None = None,
    b: float = 4.0,
    buffer_size: int = 10,
    server_lr: float = 1.0,
    keep_versions: int = 5,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    version: PerClient,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Asynchronous: updates of clients that do not wait for each other; the staler, the less they count.

    buffer_size     how many clients make a round: in a session, round.is_ready says that they are there
    server_lr       how far the model moves
    decay           how the weight falls with the staleness t, the number of versions made since the client got its
                    model: "polynomial", (1 + t)^-a; "hinge", 1 up to t = b, then 1 / (a (t - b) + 1); "constant", 1
    a, b            of decay; a is 0.5 (polynomial) or 10 (hinge) by default
    keep_versions   how many former versions of the global model to remember, for clients that send models. Clients that
                    send updates need none
    version         per round, required: [K], the number of the version that each client started from. The first one is
                    0, each round makes the next, and the aggregator's .version is the current one

    The new model is g + sum_k weights_k (w_k - g_v): .weights are server_lr times the data shares times s(t), and
    .staleness has t. Buffers are the mean by data shares. A client that started from a version that is not remembered
    is a bad client, unless it sends its update.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def feddf(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    model: torch.nn.Module | None = None,
    progress: bool | None = None,
    epochs: int = 100,
    lr: float = 0.001,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    proxy: Any,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of the clients, trained to predict on proxy data what the clients predict together.

    model      the nn.Module whose state dicts are aggregated; required, and never modified. Its output must be logits,
               [N, classes]
    epochs     passes over the proxy data
    lr         learning rate of Adam (betas 0.5, 0.999), which falls to 0 along a cosine
    progress   show a progress bar (if tqdm is installed); default: only if stderr is a terminal
    proxy      per round: inputs, or (input, target) batches, whose targets are not looked at, in any iterable that can
               be read again every epoch. What the clients predict on the batches of a list is computed once, otherwise
               in every epoch

    Clients predict in evaluation mode, each counts alike, and logits are averaged. The model trains in training mode:
    its running statistics, which start at the mean of the clients', follow. Integers are the maximum over the clients.

    The result has .weights (the data shares, of the mean that is trained) and .losses (of each epoch, the mean over
    its batches).

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    label_dist: PerClient,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Weights from data shares and from the discrepancy between each client's labels and the global label distribution.

    a            how much a discrepancy counts
    b            what is added for every client before negative weights are set to 0
    metric       "kl": KL divergence of the client from the target, in nats; "l2": Euclidean distance
    target       "uniform", or "global": the mean of the clients' distributions, weighted by data shares
    normalize    divide the discrepancies by their sum over the cohort, so that they are comparable with data shares;
                 default: as in the authors' code, only with "kl"
    label_dist   per round, required: each client's label distribution, [K, classes], as counts or shares

    If all weights are set to 0, clients get their data shares. The result has .weights and .discrepancy, [K].

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def fedexp(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    eps: float = 0.001,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """FedAvg with a longer server step: how much longer follows from the lengths of the updates and of their mean.

    eps   added to the squared length of the mean update: keeps steps short where updates nearly cancel, or have become
          small. It is in the units of squared updates, so tune it

    The new model is g + server_lr sum_k weights_k (w_k - g): .weights are the data shares, .server_lr is the step, at
    least 1. Buffers are the mean. Updates that cancel have no direction to go further in: their step is 1.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def fedfomo(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    losses: PerClient,
    start_losses: PerClient,
    distances: PerClient = ...,
    client_ids: Sequence[ClientId] | None = ...,
    out: Sequence[StateDict] | None = ...,
) -> Results:
    """One model per client: the models that do better on its data than the one it started from, by how much better.

    losses         per round, required: [K, K], the loss of client n's model on data of client i in row i, column n; NaN
                   or infinite where the model has none
    start_losses   per round, required: [K], the loss on its data of the model that each client started from
    distances      per round: [K, K], how far client n's model is from the one that client i started from; default: from
                   the global model, which is right where all clients started from it

    A model whose loss is not finite is taken by nobody; a client for which no model does better keeps the one it has
    trained. Sizes are checked but not used.

    The result is a list of K state dicts in the order of the clients, with .mixing ([K, K], rows sum to 1).

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns fastagg.Results: a Result for each client, with .mixing, .gram and .dropped.
    """

def fedlaw(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    model: torch.nn.Module | None = None,
    progress: bool | None = None,
    mode: Literal["both", "gws", "law"] = "both",
    base: Literal["exp", "quad"] = "exp",
    swa: bool = False,
    epochs: int = 100,
    lr: float = 0.01,
    swa_lr: float = 0.05,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    stop_after: int | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    proxy: Any,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Client weights and a shrinking factor, learned by gradient descent on proxy data of the server.

    model        the nn.Module whose state dicts are aggregated; required, and never modified
    mode         "both"; "gws", adaptive global weight shrinking: gamma only; "law", attentive weights: l only
    base         how weights are computed from the learned variables: "exp" (softmax, exp) or "quad" (squares)
    swa          two stages of half the epochs each: first l, averaged over the epochs of its stage (stochastic weight
                 averaging), then gamma; with mode="law", the first stage only
    epochs       passes over the proxy data
    lr           learning rate of Adam (betas 0.5, 0.999), halved every 20 epochs; the authors use 0.005 except for
                 CIFAR-10
    swa_lr       what the learning rate rises to while l is averaged
    loss         function of (output, target) that returns a scalar tensor; default: cross-entropy
    stop_after   learn in this many rounds, and take the data shares and gamma = 1 from then on (early-stopped LAW,
                 Figure 5); default: never stop
    progress     show a progress bar (if tqdm is installed); default: only if stderr is a terminal
    proxy        per round: (input, target) batches in any iterable that can be read again every epoch (a DataLoader, a
                 list); an iterator is read once and its batches are kept

    Learning starts at gamma = 1 and the data shares. The model runs in training mode, so normalisation layers use the
    statistics of the proxy batch. What they accumulate is discarded: buffers of the result are the mean of the clients'
    buffers with the learned l, and gamma scales only the parameters.

    The result has .weights (l, [K], sum 1), .gamma, .losses (for each epoch, the mean over its batches) and .gram.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    local_steps: PerClient,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of the client updates, each divided by its number of local steps. One read, no Gram.

    momentum      of the clients' SGD; 0 for plain SGD
    local_steps   per round, required: the number of steps that each client took, [K], positive. For another local
                  solver, pass the paper's ||a_k||_1, with momentum 0.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Yogi on the server: Adam whose second moment moves by at most a fraction of the new square.

    lr          server learning rate; the paper tunes it, and so should you
    beta1       decay of the mean update m
    beta2       1 - beta2 of the squared update is added to v, or subtracted if v is larger than that square
    tau         adaptivity: added to sqrt(v), which starts at tau; a small tau makes the steps of all elements similar
    weights     the method that computes the clients' weights: its name, {"method": name, option: value}, or an
                aggregator; the step is then taken from its aggregate. Default: the data shares

    Only parameters take such steps; buffers become what the method of the weights makes of them, by default their mean.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def flame(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    of: Literal["updates", "models"] = "updates",
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of the updates of a majority of clients that point the same way, clipped to the median length.

    of          what is compared by its cosine: "updates", or "models"

    The model is g + sum_k weights_k (w_k - g). .weights are 1 / L for the L > K / 2 clients of the cluster, less if the
    update was clipped, and 0 for the others. Sizes are not used. An update of zero has no direction: its cosine with
    any other is 0. The paper's last step adds noise to every coordinate; it is left out, and the result is not
    differentially private.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def fltrust(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    server_model: Any,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of the client updates, weighted by their cosine with an update of the server, and all as long as it.

    server_model   per round: a state dict, the model that the server has trained on a small clean data set of its own,
                   from the global model and for as long as clients do

    The model is g + sum_k weights_k (w_k - g). The result has .weights, 0 for clients whose cosine is not positive, and
    .trust, these cosines from 0 to 1. If nobody is trusted the parameters do not change. The server's model itself is
    not part of the mean. An update is lengthened 1000 times at most: one that is shorter than a thousandth of the
    server's is mostly rounding. Sizes are not used.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def foolsgold(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    kappa: float = 1.0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of the client updates, in which updates that point in the same direction as others count little.

    kappa       confidence: larger values make the difference between clients that count and clients that do not sharper

    The model is g + sum_k weights_k (w_k - g), with weights alpha_k / K: at most 1 / K, less for clients that are like
    others. It is for clients with different data, one of whom appears as many. Honest clients with the same data are
    alike too and lose their weight; attackers that differ from each other keep it. If all updates are the same (to
    1e-6 of their cosine), the parameters do not change.
    Only the updates of this round are compared: the paper's sums of each client's updates are not kept. Sizes are not
    used. An update of zero has no direction, and is like no other.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The model with the least sum of distances to the clients; bad clients of less than half the data move it little.

    iterations   of Weiszfeld's algorithm, at most
    tolerance    stop when no weight changes by more than this fraction of itself
    nu           lower bound of a distance; default: a millionth of the smallest distance between two clients
    weighted     True, as in the paper: weight clients by their data shares. False: all clients count equally, whatever
                 data size they claim; choose this if clients may be hostile

    .weights are positive (0 for a client without data, if weighted) and sum to 1. If the median comes to lie on a
    client, as it does on one with nearly half of the data, it converges slowly, which does no harm. Tensors that are
    not parameters (buffers, integers) become the coordinate-wise median over all clients.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def ifca(
    global_sd: StateDict | None,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    models: int = 2,
    weighted: bool = True,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    choices: PerClient,
    client_ids: Sequence[ClientId] | None = ...,
    out: Sequence[StateDict] | None = ...,
) -> Results:
    """The mean of the clients that chose the same of several models, for each of these models.

    models     how many models there are
    weighted   True: means are weighted by data shares; False: plain means
    choices    per round, required: the number of the model that each client chose and trained, [K], from 0 to
               models - 1

    Returns Results: one model for each choice that was made in this round. .clusters lists the client ids of each,
    .numbers which of the models each is, .mixing [M, K] the weights. The aggregator remembers the last choice of each
    client id; its .clusters lists all clients. The models themselves are kept by the caller, who makes the first ones,
    different from each other. The global model may be None.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns fastagg.Results: a Result for each cluster, with .clusters, .mixing, .gram and .dropped.
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The one client model that is closest to its neighbours, so that f clients may be arbitrary.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 3

    .weights are 1 for that client (the first of several with the same score) and 0 for the others; sizes are not used.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Layer by layer, clients are scaled by the cosine of their weights with those of the global model.

    normalize   divide by the sum of the cosines instead of K, so that weights sum to 1; a layer whose cosines do not
                have a positive sum gets equal weights
    layerwise   False: one cosine for the whole model (DAWA)

    A layer whose global weights are all zero has no direction to diverge from: its clients count fully, 1/K each.
    Statistics (buffers) get weights proportional to max(0, cosine), or equal weights if no cosine is positive.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def mda(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The plain mean of the K - f client models that have the smallest diameter.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 1

    .weights are 1 / (K - f) for those clients and 0 for the others; sizes are not used. Of several sets with the
    smallest diameter it is the one with the first clients. .exact says whether it was found; if the search takes more
    than 20,000 steps, as with f=40 of 100 clients that are random points, the mean is of the K - f clients nearest to
    the one that these are nearest to. Their diameter is at most twice the smallest.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def meamed(
    global_sd: StateDict | None,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of the K - f values of each element that are nearest to its median.

    f       number of clients that may be faulty or malicious; requires K > 2 f

    .weights are equal: every client is ranked. sizes are not used. Tensors that are not parameters (buffers, integers)
    become the coordinate-wise median.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def median(
    global_sd: StateDict | None,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The coordinate-wise median: fewer than half of the clients cannot move an element out of the others' range.

    .weights are equal: every client is ranked. sizes are not used. Tensors that are not parameters become the
    coordinate-wise median as well, integers its lower one.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def monna(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    f: int = 1,
    pivot: str | int | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The plain mean of the K - f client models that are nearest to the model of one client, which is among them.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 1
    pivot       id of that client, best one that is trusted; it must take part in the round. Default: the client with
                the smallest ball around it that holds K - f clients, the first of several; a choice that needs no trust

    .weights are 1 / (K - f) for those clients and 0 for the others; of clients at the same distance the first are
    taken. .pivot is the client's id. Sizes are not used.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The plain mean of the m client models that are closest to their neighbours.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 3
    m           number of clients to average, at most K - f, which is the default

    .weights are 1 / m for those clients and 0 for the others; sizes are not used.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def phocas(
    global_sd: StateDict | None,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of the K - f values of each element that are nearest to its trimmed mean.

    f       number of clients that may be faulty or malicious; requires K > 2 f

    .weights are equal: every client is ranked. sizes are not used. Tensors that are not parameters (buffers, integers)
    become the coordinate-wise median.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def qfedavg(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    q: float = 0.2,
    lr: float = 0.1,
    weighted: bool = True,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    start_losses: PerClient,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Weights that grow with a power of each client's loss, and a server step that follows from them.

    q              how much fairness counts: the power of the loss. 0 is FedAvg; large values approach the minimax of
                   the clients' losses
    lr             1 / L of the paper: the learning rate of the clients, as tuned for q = 0. The simulator sets it
    weighted       True: by data shares, the p_k of Eq. 2. False: as in Algorithm 2, where p_k is the probability that a
                   client is drawn
    start_losses   per round, required: [K], the loss of the global model on the data that each client trains on, >= 0

    .weights are p_k F_k^q L / sum_j p_j h_j, which sum to 1 at most: the model is g + sum_k weights_k (w_k - g).
    Buffers are averaged by the data shares, or equally.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def server_ft(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    model: torch.nn.Module | None = None,
    progress: bool | None = None,
    epochs: int = 2,
    lr: float = 0.001,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    proxy: Any,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """FedAvg's model, fine-tuned by the server on proxy data.

    model      the nn.Module whose state dicts are aggregated; required, and never modified
    epochs     passes over the proxy data; many of them make the model forget what the clients know
    lr         learning rate of Adam (betas 0.5, 0.999)
    loss       function of (output, target) that returns a scalar tensor; default: cross-entropy
    progress   show a progress bar (if tqdm is installed); default: only if stderr is a terminal
    proxy      per round: (input, target) batches in any iterable that can be read again every epoch (a DataLoader, a
               list); an iterator is read once and its batches are kept

    The model trains in training mode: normalisation layers use the statistics of the proxy batch, and their running
    statistics, which start at the mean of the clients', follow. Integers are the maximum over the clients.

    The result has .weights (the data shares) and .losses (for each epoch, the mean over its batches).

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Layer by layer, weights from data shares and from the closeness of each client to the mean of the clients.

    eps         added to a distance before dividing by it: clients closer to the mean than this count equally
    layerwise   False: one distance for the whole model

    The paper treats every tensor separately; layers=lambda key: key does the same.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    lengths: PerClient = ...,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Weights from the similarity of the client models and the length of their updates.

    lam         share of the cosine in the similarity; the rest is Gaussian
    tau         heterogeneity threshold: lam is multiplied by mean cos(w_k, g) / tau while that mean is below tau, down
                to 0 if it is negative. The paper gives no value.
    lengths     per round: ||w_k - previous model of client k||, [K]; default: the length of the client update

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def smea(
    global_sd: StateDict,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The plain mean of the K - f client models whose covariance has the smallest largest eigenvalue.

    f           number of clients that may be faulty or malicious; requires K >= 2 f + 1

    .weights are 1 / (K - f) for those clients and 0 for the others; sizes are not used. Of several such sets it is the
    one with the first clients. .exact says whether all sets were compared. They are while C(K, f) K^2 is at most 20
    million: any f of 18 clients, up to f=6 of 20, f=4 of 25, f=2 of 50, f=1 of 250. Beyond it clients are removed one
    by one, each time the one without whom the largest eigenvalue is the smallest.
    Tensors that are not parameters (buffers, integers) become the coordinate-wise median over all clients.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def trimmed_mean(
    global_sd: StateDict | None,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    f: int | None = None,
    beta: float | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of each element without its f lowest and f highest values.

    f       number of clients that may be faulty or malicious; requires K > 2 f
    beta    or the share of the clients to leave out at each end, below 0.5: f is floor(beta K), then

    .weights are equal: every client is ranked. sizes are not used. Tensors that are not parameters (buffers, integers)
    become the coordinate-wise median.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

def uniform(
    global_sd: StateDict | None,
    client_sds: Iterable[StateDict],
    sizes: Sizes = ...,
    *,
    server_lr: float = 1.0,
    gamma: float = 1.0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """The mean of the client models, all with equal weights, whatever their data sizes. One read.

    server_lr   how far the model moves from the global model towards the mean; 1: all the way. Other values need the
                global model
    gamma       scales the new parameters (FedLAW's global weight shrinking)

    The new model is gamma (g + server_lr (1/K sum_k w_k - g)). Buffers are the mean, whatever the options. Sizes are
    checked but not used.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
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
    by: Literal["projection", "entropy"] = "projection",
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
    entropies: PerClient = ...,
    client_ids: Sequence[ClientId] | None = ...,
    out: StateDict | None = ...,
) -> Result:
    """Weights from the diversity of the clients' data, estimated by how far each update goes along the mean update.

    lam         emphasis on diverse clients, the exponent of their diversity: 0 is the plain mean, 10 is strong
    by          what diversity is measured by: "projection" of the updates (Algorithm 2); "entropy" of the labels
                (Algorithm 1): every round then needs entropies
    entropies   per round: the entropy of each client's labels, [K], which replaces the projection; the round is then a
                single read of the clients

    Sizes are not used: the paper's clients have equal data sizes, and its u is their plain mean.

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
    gram            "auto": with many clients, a method that compares no pairs of clients does not form their Gram if
                    that is cheaper; .gram of the result then has norms and projections, but no similarities of clients.
                    "full": always form it
    pre             stages that mix the clients before the method sees them: "nnm", "bucketing", "clipping", "arc", or a
                    list of them, each a name or a table of its options: {"stage": "nnm", "f": 2}. As text, for
                    commands: "bucketing s=3 + nnm". f is the method's, if it has one. docs/methods.md explains them
    partial         True: a client may hold only some of the tensors. Each tensor becomes the mean of the clients that
                    have it, or stays the global model's, and clients are compared by what they share; docs/partial.md
                    explains it. .contributions of the result says who contributed to what
    group           the models are spread over the ranks of this torch.distributed process group (True: the default
                    group): each rank passes its part of every model, as DTensors or as its own tensors, and gets its
                    part of the result

    Returns a fastagg.Result: the new state dict, with .weights, .gram and .dropped.
    """

@overload
def aggregator(
    name: Literal["bulyan"],
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> Bulyan: ...
@overload
def aggregator(
    name: Literal["caf"],
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> CAF: ...
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> CFL: ...
@overload
def aggregator(
    name: Literal["cwfedavg"],
    *,
    head: str = "fc.weight",
    scope: str = "all",
    by: Literal["norms", "labels"] = "norms",
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> CwFedAvg: ...
@overload
def aggregator(
    name: Literal["dnc"],
    *,
    f: int = 1,
    c: float = 1.0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> DnC: ...
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> FedAMP: ...
@overload
def aggregator(
    name: Literal["fedasync"],
    *,
    decay: Literal["polynomial", "hinge", "constant"] = "polynomial",
    a: float | None = None,
    b: float = 4.0,
    alpha: float = 0.6,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> FedAsync: ...
@overload
def aggregator(
    name: Literal["fedavg"],
    *,
    server_lr: float = 1.0,
    gamma: float = 1.0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> FedAvg: ...
@overload
def aggregator(
    name: Literal["fedavgm"],
    *,
    weights: str | Mapping[str, Any] | Aggregator[Any] | None = None,
    lr: float = 1.0,
    momentum: float = 0.9,
    nesterov: bool = False,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
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
    start: Literal["shares", "feddisco"] = "shares",
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> FedAWA: ...
@overload
def aggregator(
    name: Literal["fedbe"],
    *,
    model: torch.nn.Module | None = None,
    progress: bool | None = None,
    epochs: int = 100,
    lr: float = 0.001,
    samples: int = 10,
    distribution: Literal["gaussian", "dirichlet"] = "gaussian",
    alpha: float = 1.0,
    swa: bool = True,
    seed: int = 0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> FedBE: ...
@overload
def aggregator(
    name: Literal["fedbuff"],
    *,
    decay: Literal["polynomial", "hinge", "constant"] = "polynomial",
    a: float | None = None,
    b: float = 4.0,
    buffer_size: int = 10,
    server_lr: float = 1.0,
    keep_versions: int = 5,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> FedBuff: ...
@overload
def aggregator(
    name: Literal["feddf"],
    *,
    model: torch.nn.Module | None = None,
    progress: bool | None = None,
    epochs: int = 100,
    lr: float = 0.001,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> FedDF: ...
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> FedDisco: ...
@overload
def aggregator(
    name: Literal["fedexp"],
    *,
    eps: float = 0.001,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> FedExP: ...
@overload
def aggregator(
    name: Literal["fedfomo"],
    *,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> FedFomo: ...
@overload
def aggregator(
    name: Literal["fedlaw"],
    *,
    model: torch.nn.Module | None = None,
    progress: bool | None = None,
    mode: Literal["both", "gws", "law"] = "both",
    base: Literal["exp", "quad"] = "exp",
    swa: bool = False,
    epochs: int = 100,
    lr: float = 0.01,
    swa_lr: float = 0.05,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    stop_after: int | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> FedYogi: ...
@overload
def aggregator(
    name: Literal["flame"],
    *,
    of: Literal["updates", "models"] = "updates",
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> FLAME: ...
@overload
def aggregator(
    name: Literal["fltrust"],
    *,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> FLTrust: ...
@overload
def aggregator(
    name: Literal["foolsgold"],
    *,
    kappa: float = 1.0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> FoolsGold: ...
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> GeometricMedian: ...
@overload
def aggregator(
    name: Literal["ifca"],
    *,
    models: int = 2,
    weighted: bool = True,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> IFCA: ...
@overload
def aggregator(
    name: Literal["krum"],
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> LDAWA: ...
@overload
def aggregator(
    name: Literal["mda"],
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> MDA: ...
@overload
def aggregator(
    name: Literal["meamed"],
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> MeaMed: ...
@overload
def aggregator(
    name: Literal["median"],
    *,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> Median: ...
@overload
def aggregator(
    name: Literal["monna"],
    *,
    f: int = 1,
    pivot: str | int | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> MoNNA: ...
@overload
def aggregator(
    name: Literal["multi_krum"],
    *,
    f: int = 1,
    m: int | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> MultiKrum: ...
@overload
def aggregator(
    name: Literal["phocas"],
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> Phocas: ...
@overload
def aggregator(
    name: Literal["qfedavg"],
    *,
    q: float = 0.2,
    lr: float = 0.1,
    weighted: bool = True,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> QFedAvg: ...
@overload
def aggregator(
    name: Literal["server_ft"],
    *,
    model: torch.nn.Module | None = None,
    progress: bool | None = None,
    epochs: int = 2,
    lr: float = 0.001,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> ServerFT: ...
@overload
def aggregator(
    name: Literal["simagg"],
    *,
    eps: float = 1e-05,
    layerwise: bool = True,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
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
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> SimProx: ...
@overload
def aggregator(
    name: Literal["smea"],
    *,
    f: int = 1,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> SMEA: ...
@overload
def aggregator(
    name: Literal["trimmed_mean"],
    *,
    f: int | None = None,
    beta: float | None = None,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> TrimmedMean: ...
@overload
def aggregator(
    name: Literal["uniform"],
    *,
    server_lr: float = 1.0,
    gamma: float = 1.0,
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> Uniform: ...
@overload
def aggregator(
    name: Literal["weiavg"],
    *,
    lam: float = 1.0,
    by: Literal["projection", "entropy"] = "projection",
    params: Iterable[str] | torch.nn.Module | None = None,
    layers: Callable[[str], str] | None = None,
    on_bad_client: Literal["raise", "drop"] = "raise",
    gram: Literal["auto", "full"] = "auto",
    pre: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    partial: bool = False,
    group: Any = None,
) -> WeiAvg: ...
@overload
def aggregator(name: str, **options: Any) -> Aggregator[Any]: ...
