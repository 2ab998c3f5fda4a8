"""The checks of tests/distributed, and the processes that make them."""
