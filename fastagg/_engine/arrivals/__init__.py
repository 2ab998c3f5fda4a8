"""Rounds whose clients arrive one by one. round.py has what a server calls, the rest is what it needs."""
