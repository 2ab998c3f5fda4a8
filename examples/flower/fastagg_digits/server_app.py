"""The server: Flower's own, with FastAgg where FedAvg was."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fastagg.integrations.flower import FastAgg
from fastagg_digits.task import accuracy, load, make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes = int(config["min-nodes"])
    torch.manual_seed(0)
    model, (x, y) = make_model(), load()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": accuracy(model, x, y)})

    strategy = FastAgg(
        method=config["method"],
        on_bad_client="drop",  # a client that sends NaN, or anything else that cannot be used, does not end the run
        **({"head": "2.weight"} if config["method"] == "cwfedavg" else {}),
        fraction_evaluate=float(config["fraction-evaluate"]),
        min_train_nodes=nodes,
        min_evaluate_nodes=nodes,
        min_available_nodes=nodes,
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        timeout=float(config["timeout"]),
        evaluate_fn=evaluate,
    )
    if config["report"]:
        rounds = {r: {**metrics} for r, metrics in result.evaluate_metrics_serverapp.items()}
        for r, metrics in result.train_metrics_clientapp.items():
            rounds[r].update(metrics)
        for r, metrics in result.evaluate_metrics_clientapp.items():
            rounds[r]["accuracy-at-clients"] = metrics["accuracy"]
        Path(str(config["report"])).write_text(json.dumps(rounds, indent=1))
