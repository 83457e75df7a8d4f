"""Memory planned by arithmetic, without torch: what the engine allocates is what `oneloop serve --plan` prints.

`ledger` names the items, `sizes` has what all devices share, `cpu` and `gpu` their own formulas, `plan` puts them
together, `free` asks the machine, `check` compares a measurement with the plan.
"""
