"""fastagg as a Flower strategy.

    from fastagg.integrations.flower import FastAgg

    strategy = FastAgg(method="fedawa", fraction_train=0.5)     # where there was FedAvg(fraction_train=0.5)

Clients stay as they are. With bfloat16 models they use `pack` and `unpack` from here, for Flower's own conversion goes
through NumPy, which has no such dtype. For Flower's former API (flwr.server.strategy) there is FastAggLegacy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fastagg import Aggregator, InputError
from fastagg.integrations.flower_arrays import blank, pack, unpack, view
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
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

if TYPE_CHECKING:
    from fastagg.integrations.flower_legacy import FastAgg as FastAggLegacy

__all__ = ["FastAgg", "FastAggLegacy", "pack", "unpack", "view"]


class FastAgg(HasAggregator, FedAvg):
    """Flower's FedAvg with another aggregation: every method of fastagg, by its name and with its options.

    method         a name that fastagg.list_methods() lists, or an aggregator made by fastagg.aggregator()
    round_inputs   further arguments of the method in each round (fedlaw: {"proxy": loader}): a dict, or a function that
                   returns one for the number of the round
    options        FedAvg's own arguments (fraction_train, weighted_by_key, ...), and the method's

    Nodes are told apart by their ids, so what a method remembers of a client follows it over rounds. Round inputs that
    clients report themselves (class_dist, label_dist, local_steps, entropies, lengths) are read from the MetricRecord
    of the reply, by that name, and are not averaged with the other metrics.

    Methods that give a model per client or per cluster send each node its own, for training and for evaluation; a
    node that has none yet gets the global model, which is then the plain average of the round's clients.

    A reply that cannot be used (another form, NaN, no num-examples, metrics unlike those of most others) raises an
    InputError that names the node. With on_bad_client="drop" it is left out with a warning, and a round that leaves
    nothing to aggregate keeps the former model: no client can end the server.

    A metric that is NaN or infinite is left out of the round's averages, together with its client's weight, and logged.

    Added to the metrics of a round: "fastagg-clients", the nodes used, and "fastagg-weights", their weights in that
    order (by layers: the mean over parameters); "fastagg-dropped", the nodes left out; "fastagg-coherence", where the
    method computes a Gram. A MetricRecord holds only numbers, so the reasons are in the log and in result.dropped.

    aggregator   the method; its save() and load() keep what it remembers
    result       of the last round, with full weights, Gram and more. Its tensors look into what is sent to clients and
                 must not be written.
    """

    def __init__(
        self,
        method: str | Aggregator = "fedavg",
        *,
        round_inputs: dict[str, Any] | Callable[[int], dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        theirs, ours = split_options(FedAvg, options)
        self._server = RoundServer(method, ours, round_inputs, blank, view)
        super().__init__(**theirs)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._server.center = view(arrays, "the global model")
        return self._personal(super().configure_train(server_round, arrays, config, grid))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._personal(super().configure_evaluate(server_round, arrays, config, grid))

    def _personal(self, messages: Iterable[Message]) -> list[Message]:
        messages = list(messages)
        for message in messages:
            own = self._server.start_of(message.metadata.dst_node_id)
            if own is not None:
                message.content = RecordDict({**message.content, self.arrayrecord_key: own})
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        valid, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        if not valid:
            return None, None
        arrays, used, about = self._server.aggregate(server_round, self._server.read(_by_node(valid), self._read_model))
        metrics = self._averaged(used, self.train_metrics_aggr_fn) or MetricRecord()
        about["dropped"] = list(about["dropped"])  # a MetricRecord holds no text
        metrics.update({f"fastagg-{name}": value for name, value in about.items()})
        return arrays, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        valid, _ = self._check_and_log_replies(replies, is_train=False, validate=False)
        good = self._server.usable(self._server.read(_by_node(valid), self._read_metrics))
        return self._averaged(good, self.evaluate_metrics_aggr_fn)

    def _averaged(self, replies: list[Reply], average: Callable) -> MetricRecord | None:
        """Metrics are averaged over those clients whose own are finite. A function of the user's own gets the replies
        of clients with finite metrics only."""
        told = set(self._server.client_inputs) - {self.weighted_by_key}
        kept, parts = [], {}  # of each client: metrics; names of metrics that the same clients have finite
        for reply in replies:
            [metrics] = reply.origin.metric_records.values()
            kept.append({key: v for key, v in metrics.items() if key not in told and not key.startswith("fastagg-")})
        odd = [not_finite(reply.node, metrics) for reply, metrics in zip(replies, kept, strict=True)]
        if average is not aggregate_metricrecords:
            odd = [set(metrics) if names else names for names, metrics in zip(odd, kept, strict=True)]
        for name in kept[0] if kept else ():
            parts.setdefault(tuple(k for k, names in enumerate(odd) if name not in names), []).append(name)
        averaged = None
        for members, names in parts.items():
            if any(replies[k].size for k in members):
                contents = [_with_metrics(replies[k], kept[k], {*names, self.weighted_by_key}) for k in members]
                averaged = MetricRecord() if averaged is None else averaged
                averaged.update(average(contents, self.weighted_by_key))
        return averaged

    def _read_metrics(self, node: int, content: RecordDict) -> Reply:
        if len(content.metric_records) != 1:
            raise InputError(f"its reply has {len(content.metric_records)} MetricRecords, expected one")
        [metrics] = content.metric_records.values()
        if self.weighted_by_key not in metrics:
            raise InputError(f"its metrics have no {self.weighted_by_key!r}")
        size = check_size(self.weighted_by_key, metrics[self.weighted_by_key])
        form = tuple(sorted((key, len(v) if isinstance(v, list) else -1) for key, v in metrics.items()))
        inputs = {name: metrics[name] for name in self._server.client_inputs if name in metrics}
        return Reply(node, content, {}, size, form, inputs)

    def _read_model(self, node: int, content: RecordDict) -> Reply:
        reply = self._read_metrics(node, content)
        if len(content.array_records) != 1:
            raise InputError(f"its reply has {len(content.array_records)} ArrayRecords, expected one")
        [arrays] = content.array_records.values()
        reply.model = check_booleans(view(arrays, f"node {node}"))
        return reply


def _with_metrics(reply: Reply, metrics: dict, names: set[str]) -> RecordDict:
    [record] = reply.origin.metric_records
    return RecordDict({**reply.origin, record: MetricRecord({key: v for key, v in metrics.items() if key in names})})


def _by_node(replies: list[Message]) -> list[tuple[int, RecordDict]]:
    return [(reply.metadata.src_node_id, reply.content) for reply in replies]


def __getattr__(name: str) -> Any:
    if name == "FastAggLegacy":
        from fastagg.integrations.flower_legacy import FastAgg as legacy

        return legacy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
