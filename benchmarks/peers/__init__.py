"""The compared engines: each runs in its own process and environment, behind one protocol.

Modules named ``*_engine``, and the modules of this folder that they import, run in an engine's environment: they may
import only the standard library and that engine's packages. `catalog` and `process` belong to the measuring program.
"""
