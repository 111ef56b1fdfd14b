"""On the path of a Python process that interprets kernels: it takes a third of the time.

Triton's interpreter replaces the language's functions by its own at each launch and at each device function that a
kernel calls, by looking through all of them. Here it does so once for each function and leaves them replaced. And it
makes the types and shapes of each value anew; here those that are equal are made once.
"""

import functools
from collections.abc import Callable
from typing import Any

from triton.language import core
from triton.runtime import interpreter

patch_lang = interpreter._patch_lang


@functools.cache
def patch_for_good(function: Callable[..., Any]) -> Any:
    patch_lang(function)
    return interpreter._LangPatchScope()  # in which nothing is to be restored


interpreter._patch_lang = patch_for_good

get_np_dtype = interpreter._get_np_dtype
np_dtypes: dict[str, Any] = {}


def get_np_dtype_once(dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in np_dtypes:
        np_dtypes[name] = get_np_dtype(dtype)
    return np_dtypes[name]


interpreter._get_np_dtype = get_np_dtype_once

unwrap = core._unwrap_if_constexpr


def unwrap_quickly(value: Any) -> Any:
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind is int or kind is core.tensor or kind is core.dtype else unwrap(value)


core._unwrap_if_constexpr = unwrap_quickly

init_block_type = core.block_type.__init__
block_types: dict[tuple[Any, ...], dict[str, Any]] = {}


@functools.cache
def make_shape(sizes: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """The attribute `shape` of a type, `shape` and `numel` of a tensor."""
    numel = core.constexpr(core.math.prod(sizes))
    return core.tuple(sizes), core.tuple([core.constexpr(size) for size in sizes]), numel


def init_block_type_once(block_type: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple(map(unwrap_quickly, shape))
    key = (element_ty.name, sizes)
    if key not in block_types:
        init_block_type(block_type, element_ty, shape)
        shape, *tensor_shape = make_shape(sizes)
        block_types[key] = vars(block_type) | {"shape": shape, "tensor_shape": tensor_shape}
    vars(block_type).update(block_types[key])


core.block_type.__init__ = init_block_type_once


def init_tensor(tensor: Any, handle: Any, dtype: Any) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, dtype, dtype.scalar
    tensor.shape, tensor.numel = dtype.tensor_shape if dtype.is_block() else make_shape(())[1:]


core.tensor.__init__ = init_tensor

is_equal = core.tuple.__eq__
core.tuple.__eq__ = lambda one, other: core.constexpr(True) if one is other else is_equal(one, other)
