"""The engines that are compared: each a process of its own, in its own environment, behind one protocol.

Modules named ``*_engine`` run in an engine's environment and may import only the standard library, that engine's
packages and `benchmarks.peers.protocol`; the others belong to the program that measures.
"""
