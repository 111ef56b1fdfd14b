"""The engines that are compared: each a process of its own, in its own environment, behind one protocol.

Modules named ``*_engine``, and what they import of this folder, run in an engine's environment: they may import nothing
but the standard library and that engine's packages. `catalog` and `process` belong to the program that measures.
"""
