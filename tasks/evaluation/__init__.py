"""How good answers are: gold rows, metrics with intervals, what is asked of them."""
