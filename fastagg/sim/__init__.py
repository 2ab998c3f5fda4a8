"""The reference simulator: real federated training on one machine, with any method of the registry.

data.py        data sets from files, never downloaded
partition.py   who has which samples
models.py      small networks of the papers
train.py       what a client does, one by one or all at once
config.py      every option of a run
simulation.py  the rounds: choose, train, aggregate, evaluate
run.py         a whole run: records, checkpoints, resuming
report         runs read back, and the tables of them
statistics.py  differences over the same seeds, with confidence intervals
plots          the figures
page.py        report.html
archive.py     runs in one small file, for documents
compare.py     several methods and seeds, and the table of them
"""
