"""One file per aggregation method. Every module in this folder is loaded when methods are first asked for, so a method
is there once its file is: CONTRIBUTING.md has the recipe."""
