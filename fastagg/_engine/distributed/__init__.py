"""Models spread over the ranks of a torch.distributed process group: sharded.py has the round of such models."""
