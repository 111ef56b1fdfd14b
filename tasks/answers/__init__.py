"""The kinds of answer that a workload can ask for, one in each module; `kind` defines their interface."""
