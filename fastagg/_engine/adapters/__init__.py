"""Rounds of low-rank adapters (LoRA), aggregated by what they mean: their updates B A."""
