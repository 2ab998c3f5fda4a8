"""A client: trains an adapter of the rank that its machine can train"""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fastagg_lora import text
from fastagg_lora.training import client_round

app = ClientApp()
torch.set_num_threads(1)  # clients share a machine here


@app.train()
def train_here(message: Message, context: Context) -> Message:
    base, adapter = (message.content[name].to_torch_state_dict() for name in ("base", "adapter"))
    client = int(context.node_config["partition-id"]) % len(text.CLIENTS)
    server_round = int(message.content["config"]["server-round"])
    new, letters = client_round(base, adapter, client, server_round, int(context.run_config["local-steps"]))
    content = {"adapter": ArrayRecord(new), "metrics": MetricRecord({"num-examples": letters})}
    return Message(RecordDict(content), reply_to=message)
