"""A round's aggregation inside Flower and NVFlare: theirs against fastagg's, with the real packages.

make bench-integrations                                                 # both, each in its own environment
.venv-flower/bin/python -m benchmarks.integrations --clients 10 50      # the frameworks that this environment has

Replies are what a server has received: bytes. "Whole" is all that happens from there to the model that is sent out
next: decoding, aggregation, and in Flower encoding of the result. "Arithmetic" is the aggregation of models that are
decoded already. In NVFlare models are accepted one by one, as they arrive there; "kept" keeps all of them, which is the
default, and "memory=" bounds what they may take: FedAvg is then a running sum, as NVFlare's own is. Neither
framework has FedAWA (here the released variant): theirs is then the usual PyTorch code (benchmarks/torch_code.py)
between their own decoding and encoding. Contestants take turns; results are compared before any time is taken.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import fastagg
from benchmarks import measure, models
from benchmarks.torch_code import CONTESTANTS

Job = Callable[[], object]
MEMORY = "500MB"  # for the clients of a round, where it is bounded
OPTIONS = {"fedavg": {}, "fedawa": {"variant": "released"}}  # one read each, so what is compared is the framework


@dataclass
class Contest:
    where: str
    method: str
    what: str  # "whole" or "arithmetic"
    theirs: Job
    ours: Job
    model: Callable[[object], dict]  # a state dict of what a job returns


def flower(global_sd: dict, client_sds: list[dict]) -> Iterator[Contest]:
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore.task_identity import TaskIdentity

    from fastagg.integrations.flower import FastAgg, view

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # what messages say of their sender

    class Nodes(Grid):
        """Knows the nodes; strategies ask for no more here"""

        def get_node_ids(self):
            return range(1, len(client_sds) + 1)

        set_run = run = create_message = push_messages = pull_messages = send_and_receive = None

    def asked(strategy) -> list[Message]:
        return list(strategy.configure_train(1, ArrayRecord(global_sd), ConfigRecord(), Nodes()))

    ours = {name: FastAgg(name, **OPTIONS[name]) for name in OPTIONS}
    for strategy in ours.values():
        questions = asked(strategy)  # which tells it the global model
    replies = [
        Message(RecordDict({"arrays": ArrayRecord(sd), "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)
        for message, sd in zip(questions, client_sds, strict=True)
    ]

    def their_fedawa():
        decoded = [message.content["arrays"].to_torch_state_dict() for message in replies]
        return ArrayRecord(CONTESTANTS["fedawa_released"].usual(global_sd, decoded)[0]), None

    def model(result) -> dict:
        return view(result[0])

    theirs = {"fedavg": lambda: FedAvg().aggregate_train(1, replies), "fedawa": their_fedawa}
    for name, strategy in ours.items():
        # a new server each time: FedAWA's logits would be other ones in its next round
        def whole(strategy=strategy, name=name):
            strategy._server.aggregator = fastagg.aggregator(name, **OPTIONS[name])
            return strategy.aggregate_train(1, replies)

        yield Contest("Flower, messages", name, "whole", theirs[name], whole, model)


def flower_legacy(global_sd: dict, client_sds: list[dict]) -> Iterator[Contest]:
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.server.client_manager import SimpleClientManager
    from flwr.server.client_proxy import ClientProxy
    from flwr.server.strategy import FedAvg
    from flwr.server.strategy.aggregate import aggregate

    from fastagg.integrations.flower import FastAggLegacy

    class Client(ClientProxy):
        get_properties = get_parameters = fit = evaluate = reconnect = None

    def parameters(sd):
        return ndarrays_to_parameters([value.numpy() for value in sd.values()])

    def named(arrays) -> dict:
        return {key: torch.as_tensor(array) for key, array in zip(global_sd, arrays, strict=True)}

    fine = Status(Code.OK, "")
    results = [(Client(str(k)), FitRes(fine, parameters(sd), 1, {})) for k, sd in enumerate(client_sds)]
    manager = SimpleClientManager()
    for client, _ in results:
        manager.register(client)

    def their_fedawa():
        decoded = [named(parameters_to_ndarrays(reply.parameters)) for _, reply in results]
        return parameters(CONTESTANTS["fedawa_released"].usual(global_sd, decoded)[0]), None

    theirs = {
        "fedavg": lambda: FedAvg(fit_metrics_aggregation_fn=lambda _: {}).aggregate_fit(1, results, []),
        "fedawa": their_fedawa,
    }
    for name in theirs:
        strategy = FastAggLegacy(name, keys=list(global_sd), fit_metrics_aggregation_fn=lambda _: {}, **OPTIONS[name])
        strategy.configure_fit(1, parameters(global_sd), manager)

        def whole(strategy=strategy, name=name):
            strategy._server.aggregator = fastagg.aggregator(name, **OPTIONS[name])
            return strategy.aggregate_fit(1, results, [])

        yield Contest(
            "Flower, legacy", name, "whole", theirs[name], whole, lambda r: named(parameters_to_ndarrays(r[0]))
        )
    arrays = [[value.numpy() for value in sd.values()] for sd in client_sds]
    yield Contest(
        "Flower", "fedavg", "arithmetic", lambda: aggregate([(a, 1) for a in arrays]),
        lambda: fastagg.fedavg(global_sd, client_sds), lambda r: r if isinstance(r, dict) else named(r),
    )  # fmt: skip


def nvflare(global_sd: dict, client_sds: list[dict]) -> Iterator[Contest]:
    from nvflare.app_common.abstract.fl_model import FLModel
    from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper
    from nvflare.app_opt.pt.decomposers import TensorDecomposer
    from nvflare.fuel.utils import fobs

    from fastagg.integrations.nvflare import FastAggAggregator

    fobs.register(TensorDecomposer)
    names = [f"site-{k}" for k in range(len(client_sds))]
    received = [fobs.dumps(sd) for sd in client_sds]

    def theirs(sds) -> dict:
        helper = WeightedAggregationHelper()
        for name, sd in zip(names, sds, strict=True):
            helper.add(sd, 1.0, name, 0)
        return helper.get_result()

    def ours(method: str, sds, memory: str | None = None) -> dict:
        aggregator = FastAggAggregator(method, OPTIONS[method], **{} if memory is None else {"memory": memory})
        aggregator._global = global_sd
        for name, sd in zip(names, sds, strict=True):
            meta = {"client_name": name, "NUM_STEPS_CURRENT_ROUND": 1}
            aggregator.accept_model(FLModel(params=sd, params_type="FULL", meta=meta))
        return aggregator.aggregate_model().params

    def their_fedawa(sds) -> dict:
        return CONTESTANTS["fedawa_released"].usual(global_sd, list(sds))[0]

    for name, their in {"fedavg": theirs, "fedawa": their_fedawa}.items():
        for memory in (None, MEMORY):
            yield Contest(
                "NVFlare, kept" if memory is None else f"NVFlare, memory={memory}", name, "whole",
                lambda their=their: their(fobs.loads(data) for data in received),
                lambda name=name, memory=memory: ours(name, (fobs.loads(data) for data in received), memory),
                lambda r: r,
            )  # fmt: skip
        yield Contest(
            "NVFlare", name, "arithmetic", lambda their=their: their(client_sds),
            lambda name=name: ours(name, client_sds), lambda r: r,
        )  # fmt: skip


def fedawa_alone(global_sd: dict, client_sds: list[dict]) -> Iterator[Contest]:
    usual = CONTESTANTS["fedawa_released"].usual
    yield Contest(
        "Flower", "fedawa", "arithmetic", lambda: usual(global_sd, client_sds)[0],
        lambda: fastagg.FedAWA(**OPTIONS["fedawa"]).aggregate(global_sd, client_sds), lambda r: r,
    )  # fmt: skip


def same(ours: dict, theirs: dict, method: str) -> None:
    """To float32: theirs are sums of rounded products, and their FedAWA steps on rounded distances"""
    for key, value in ours.items():
        if not value.is_floating_point():  # theirs are means of counters, ours the largest
            continue
        torch.testing.assert_close(value, torch.as_tensor(theirs[key]).to(value.dtype), rtol=1e-4, atol=1e-5, msg=
                                   lambda m, key=key: f"{method}: {key}: {m}")  # fmt: skip


def installed() -> list[Callable]:
    found = []
    for name, sections in {"flwr": [flower, flower_legacy, fedawa_alone], "nvflare": [nvflare]}.items():
        try:
            __import__(name)
        except ModuleNotFoundError:
            continue
        found += sections
    return found


def measure_all(model: str, K: int, rounds: int) -> Iterator[str]:
    torch.manual_seed(0)
    global_sd = models.MODELS[model]()
    client_sds = list(models.clients(global_sd, K))
    floor = measure.interleaved({"read": measure.read_once(client_sds)}, range(rounds))["read"].best
    for section in installed():
        for contest in section(global_sd, client_sds):
            same(contest.model(contest.ours()), contest.model(contest.theirs()), contest.method)
            memory = [measure.peak_extra_memory(job) for job in (contest.theirs, contest.ours)]
            jobs = {"theirs": contest.theirs, "ours": contest.ours}
            times = measure.interleaved(jobs, range(rounds))
            theirs, ours = times["theirs"].median, times["ours"].median
            yield (
                f"| {contest.where} | {contest.method} | {K} | {contest.what} | {theirs * 1e3:.0f} ms | "
                f"{ours * 1e3:.0f} ms | {theirs / ours:.1f} | {ours / floor:.1f} | "
                + " / ".join("?" if m is None else f"{m / 1e6:.0f} MB" for m in memory) + " |"
            )  # fmt: skip
            gc.collect()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--model", choices=models.MODELS, default="resnet18")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    if not installed():
        print("neither flwr nor nvflare is installed here", file=sys.stderr)
        return 1
    logging.disable(logging.INFO)
    print("| inside | method | clients | what | theirs | fastagg | times faster | reads of memory | extra memory |")
    print("|---|---|---:|---|---:|---:|---:|---:|---|")
    try:
        for K in args.clients:
            for line in measure_all(args.model, K, args.rounds):
                print(line, flush=True)
    finally:
        logging.disable(logging.NOTSET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
