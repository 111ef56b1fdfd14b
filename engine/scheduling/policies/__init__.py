"""Policies of a run: small rules that can be exchanged one by one. None of them changes an answer.

Each module is one question that an engine has to decide, with a field of `EngineConfig` for it.
"""
