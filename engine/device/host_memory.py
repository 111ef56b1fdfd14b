"""Host memory that was freed: the C library keeps it for the thread that had it, until it is told to give it back."""

import ctypes


def give_back_freed_memory() -> None:
    """Returns the free pages of every thread's heap to the system; nothing where the C library is not glibc.

    Weights are read by threads that end, so what is freed of them would be used by nobody again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
