"""A client as Flower's own examples have it. It does not know of fastagg, but for what some methods ask of clients."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fastagg_digits.task import CLASSES, accuracy, load, make_model, train

app = ClientApp()
torch.set_num_threads(1)  # clients share a machine here


@app.train()
def train_here(message: Message, context: Context) -> Message:
    model, (x, y) = received(message), mine(context)
    config = context.run_config
    loss = train(model, x, y, int(config["local-epochs"]), float(config["learning-rate"]))
    metrics = {"num-examples": len(y), "loss": loss}
    if config["method"] == "cwfedavg":
        metrics["class_dist"] = torch.bincount(y, minlength=CLASSES).tolist()
    if config["method"] == "feddisco":
        metrics["label_dist"] = torch.bincount(y, minlength=CLASSES).tolist()
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate_here(message: Message, context: Context) -> Message:
    x, y = mine(context)
    metrics = {"num-examples": len(y), "accuracy": accuracy(received(message), x, y)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


def received(message: Message) -> torch.nn.Module:
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


def mine(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    return load(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
