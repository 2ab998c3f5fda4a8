"""Federated training without a framework: ten clients with unequal digits, FedAvg next to FedAWA."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import fastagg


def split(x, y, clients, random):
    """To each client about as many images, but mostly of a few digits"""
    owner = np.stack([random.choice(clients, len(y), p=random.dirichlet([0.3] * clients)) for _ in range(10)])
    return [(x[mine], y[mine]) for k in range(clients) if len(mine := np.flatnonzero(owner[y, np.arange(len(y))] == k))]


def train(model, x, y, epochs=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return {key: value.clone() for key, value in model.state_dict().items()}


torch.set_num_threads(1)  # the model is too small for more
x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
x = x.float() / 16
clients = split(x[:1400], y[:1400], 10, np.random.default_rng(0))

for method in "fedavg", "fedawa":
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    server = fastagg.aggregator(method)
    global_sd = {key: value.clone() for key, value in model.state_dict().items()}
    for number in range(1, 16):
        returned = []
        for data in clients:  # each starts from the global model and sends back its own
            model.load_state_dict(global_sd)
            returned.append(train(model, *data))
        global_sd = server.aggregate(global_sd, returned, sizes=[len(data[1]) for data in clients])
        model.load_state_dict(global_sd)
        accuracy = (model(x[1400:]).argmax(1) == y[1400:]).float().mean()
        print(f"{method} round {number}: accuracy {accuracy:.3f}, weights {np.round(global_sd.weights.numpy(), 2)}")
