"""`kbit bench workload`: what measured kernel times mean for real traffic, one user or many.

A token distribution (`distributions`) is served by a simulated engine (`scheduler`). Every iteration of it
runs each linear layer of a model (`model_layers`) once on M tokens, whose time comes from a table measured on
the machine in question (`times`). The sums are `scenarios`, printed by `tables` and drawn by `plot`.
"""
