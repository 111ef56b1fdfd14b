"""On the path of a Python process that interprets kernels: it takes half of the time.

Triton's interpreter replaces the language's functions by its own at each launch and at each device function that a
kernel calls, by looking through all of them. Here it does so once for each function and leaves them replaced.
"""

import functools
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter

patch_lang = interpreter._patch_lang


@functools.cache
def patch_for_good(function: Callable[..., Any]) -> Any:
    patch_lang(function)
    return interpreter._LangPatchScope()  # in which nothing is to be restored


interpreter._patch_lang = patch_for_good
