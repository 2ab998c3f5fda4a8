"""The reference simulator: real federated training on one machine, with any method of the registry.

data.py        data sets from files, never downloaded; datasets/ has a reader for each format
own.py         data of the user's own as a data set; gathering.py reads them
partition.py   who has which samples; domains.py: where each client has samples of one domain
models.py      the networks of the papers, and the user's own; networks/ has their layers
imports.py     objects by name: package.module:attribute
train.py       what a client does, one by one or all at once
config.py      every option of a run
simulation.py  the rounds: choose, train, aggregate, evaluate
run.py         a whole run: records, checkpoints, resuming
report.py      pictures of runs
compare.py     several methods and seeds, and the table of them
"""
