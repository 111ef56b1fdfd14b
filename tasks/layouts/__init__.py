"""Layouts: the orders of a prompt's parts that a template allows, what each costs, and which one is kept."""
