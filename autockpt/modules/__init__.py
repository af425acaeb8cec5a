"""Regions that are calls of modules: the model's own Python runs, chosen submodules run again."""
