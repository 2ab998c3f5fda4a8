"""Models in files, aggregated piece by piece: what no memory holds. job.py has the round, the rest is what it needs."""
