"""The reference simulator: real federated training on one machine, with any method of the registry.

data.py        data sets from files, never downloaded
partition.py   who has which samples
models.py      small networks of the papers
local.py       what clients do besides SGD: FedProx, FedDyn, SCAFFOLD, MOON, the user's own
train.py       clients' training, one by one (alone.py) or all at once (together.py)
outcomes.py    losses, metrics, evaluation
config.py      every option of a run
simulation.py  the rounds: choose, train, aggregate, evaluate
run.py         a whole run: records, checkpoints, resuming
report.py      pictures of runs
compare.py     several methods and seeds, and the table of them
"""
