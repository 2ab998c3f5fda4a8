"""fastagg as a strategy of Flower's former API, flwr.server.strategy. For the present one see flower.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from fastagg import Aggregator, InputError
from fastagg.integrations.flower_arrays import NUMPY, blank_npy, view_npy
from fastagg.integrations.flower_round import (
    HasAggregator,
    Reply,
    RoundServer,
    check_booleans,
    check_size,
    not_finite,
    split_options,
)

# after ours, which say what to install where there is no Flower
# isort: split
from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters, Scalar
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg


class FastAgg(HasAggregator, FedAvg):
    """flwr.server.strategy.FedAvg with another aggregation: every method of fastagg, by its name and with its options.

    method         a name that fastagg.list_methods() lists, or an aggregator made by fastagg.aggregator()
    keys           names of the arrays that clients send, in their order, or the nn.Module whose state dict they are.
                   Clients of this API send no names. Without them arrays are called "0", "1", ...: BatchNorm's
                   statistics then count as parameters, and methods that weigh by layer see a single layer.
    round_inputs   what the method takes in each round besides models: a dict, or a function from the round's number
    options        FedAvg's own arguments (fraction_fit, ...), and the method's

    Clients are told apart by their cid. Round inputs that clients report are read from their metrics; a list, which
    this API cannot send, as JSON ("[3, 0, 7]"). Metrics that are lists are reported as JSON too; "fastagg-dropped" is a
    JSON object, {"cid": "reason"}. The functions that average metrics get no client with a loss or metric that is NaN
    or infinite. All else is as in fastagg.integrations.flower.FastAgg, but for bfloat16: these clients send NumPy
    arrays, which have no such dtype.
    """

    def __init__(
        self,
        method: str | Aggregator = "fedavg",
        *,
        keys: Iterable[str] | nn.Module | None = None,
        round_inputs: dict[str, Any] | Callable[[int], dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        theirs, ours = split_options(FedAvg, options)
        self._keys = keys if keys is None else tuple(keys.state_dict() if isinstance(keys, nn.Module) else keys)
        self._server = RoundServer(method, ours, round_inputs, _blank, self._view)
        super().__init__(**theirs)

    def __repr__(self) -> str:
        return f"FastAgg({self.aggregator!r}, accept_failures={self.accept_failures})"

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        self._server.center = self._view(parameters, "the global model")
        instructions = super().configure_fit(server_round, parameters, client_manager)
        return [(c, FitIns(self._server.start_of(c.cid) or ins.parameters, ins.config)) for c, ins in instructions]

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        instructions = super().configure_evaluate(server_round, parameters, client_manager)
        return [(c, EvaluateIns(self._server.start_of(c.cid) or ins.parameters, ins.config)) for c, ins in instructions]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        if not results or (failures and not self.accept_failures):
            return None, {}
        replies = self._server.read([(client.cid, reply) for client, reply in results], self._read)
        parameters, used, about = self._server.aggregate(server_round, replies)
        metrics: dict[str, Scalar] = {}
        if used and self.fit_metrics_aggregation_fn:
            whole = [r.origin for r in used if not not_finite(r.node, r.origin.metrics)]
            metrics = self.fit_metrics_aggregation_fn([(r.num_examples, r.metrics) for r in whole]) if whole else {}
        told = {f"fastagg-{name}": json.dumps(v) if isinstance(v, list | dict) else v for name, v in about.items()}
        return parameters, {**metrics, **told}

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        read = self._server.read(
            [(client.cid, (client, reply)) for client, reply in results],
            lambda cid, pair: Reply(cid, pair, {}, check_size("num_examples", pair[1].num_examples)),
        )
        good = self._server.usable(read)
        told = [(reply, reply.origin[1]) for reply in good]
        good = [r for r, given in told if not not_finite(r.node, {**given.metrics, "EvaluateRes.loss": given.loss})]
        if not any(reply.size for reply in good):
            return None, {}
        return super().aggregate_evaluate(server_round, [reply.origin for reply in good], failures)

    def _read(self, cid: str, reply: FitRes) -> Reply:
        size = check_size("num_examples", reply.num_examples)
        instructions = [name for name in self._server.client_inputs if name in reply.metrics]
        inputs = {name: _number_or_list(name, reply.metrics[name]) for name in instructions}
        form = tuple((name, len(value) if isinstance(value, list) else -1) for name, value in inputs.items())
        return Reply(cid, reply, check_booleans(self._view(reply.parameters, f"node {cid}")), size, form, inputs)

    def _view(self, parameters: Parameters, who: str = "a model") -> dict[str, Any]:
        if parameters.tensor_type != NUMPY:
            raise InputError(f"{who}: its arrays are of type {parameters.tensor_type!r}, expected {NUMPY!r}")
        keys = self._keys or [str(i) for i in range(len(parameters.tensors))]
        if len(keys) != len(parameters.tensors):
            raise InputError(f"{who}: {len(parameters.tensors)} arrays came, expected {len(keys)}: as many as keys")
        return {key: view_npy(data, who, key) for key, data in zip(keys, parameters.tensors, strict=True)}


def _blank(like: Mapping[str, Tensor]) -> Parameters:
    return Parameters([blank_npy(tensor.dtype, tuple(tensor.shape)) for tensor in like.values()], NUMPY)


def _number_or_list(name: str, value: Scalar) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is neither a number nor JSON: {error}") from None
