"""Model families that are not plain but whose layers the C++ kernels compute: how their weights are read."""
