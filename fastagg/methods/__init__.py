"""One file per aggregation method. All modules of this folder are loaded when a method is first looked up, so a new
file is a new method: CONTRIBUTING.md has the recipe."""
