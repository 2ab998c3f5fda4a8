"""Flower clients in this process, for tests: real records, messages and replies, and no network."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fastagg.integrations.flower import pack

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # messages have a sender, here this process
NODES = [2**64 - 5, 11, 2**63 + 7, 40, 5, 2**62, 99]  # Flower draws them from all 64-bit numbers


class Nodes(Grid):
    """Clients in this process: `train` maps a Message to a reply's content, or raises."""

    def __init__(self, ids, train, evaluate=None):
        self.ids, self.clients = ids, {MessageType.TRAIN: train, MessageType.EVALUATE: evaluate}

    def get_node_ids(self):
        return self.ids

    def send_and_receive(self, messages, *, timeout=None):
        return [self.answer(message) for message in messages]

    def answer(self, message):
        try:
            content = self.clients[message.metadata.message_type](message)
        except ArithmeticError as error:
            return Message(Error(0, str(error)), reply_to=message)
        return Message(content, reply_to=message)

    set_run = run = create_message = get_nodes = push_messages = pull_messages = None


Nodes.__abstractmethods__ = frozenset()


def content(model, n=10, record=pack, **metrics):
    return RecordDict({"arrays": record(model), "metrics": MetricRecord({"num-examples": n, **metrics})})


def replies(nodes, contents):
    asked = [Message(RecordDict(), dst_node_id=node, message_type=MessageType.TRAIN) for node in nodes]
    return [Message(c, reply_to=message) for c, message in zip(contents, asked, strict=True)]


def started(strategy, g, nodes=NODES, server_round=1):
    """The strategy after configure_train"""
    arrays = g if isinstance(g, ArrayRecord) else pack(g)
    strategy.configure_train(server_round, arrays, ConfigRecord(), Nodes(nodes, None))
    return strategy


def same(a, b):
    assert list(a) == list(b)
    assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in b)
