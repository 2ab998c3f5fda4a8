"""fastagg inside the frameworks that people run. Nothing here is imported until asked for."""
