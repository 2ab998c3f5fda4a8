"""The server: sends an adapter, receives adapters of other ranks, and aggregates their updates"""

from __future__ import annotations

import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

from fastagg_lora.training import Server, learned_before

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    server = Server(learned_before(int(config["base-steps"])), str(config["adapters"]))
    numbers = [{"bits": server.bits()}]
    while len(nodes := sorted(grid.get_node_ids())) < int(config["min-nodes"]):
        time.sleep(1)
    for server_round in range(1, int(config["num-server-rounds"]) + 1):
        content = RecordDict({
            "base": ArrayRecord(server.base), "adapter": ArrayRecord(server.adapter),
            "config": ConfigRecord({"server-round": server_round}),
        })  # fmt: skip
        asked = [Message(content, dst_node_id=node, message_type=MessageType.TRAIN) for node in nodes]
        replies = [reply.content for reply in grid.send_and_receive(asked) if reply.has_content()]
        new = server.finish_round(
            [reply["adapter"].to_torch_state_dict() for reply in replies],
            [reply["metrics"]["num-examples"] for reply in replies],
        )
        numbers.append({"bits": server.bits(), "weights": new.weights.tolist(), "left": max(new.truncation.values())})
        print(f"round {server_round}: {numbers[-1]['bits']:.3f} bits per letter, weights {new.weights.tolist()}")
    if config["report"]:
        Path(str(config["report"])).write_text(json.dumps(numbers, indent=1))
