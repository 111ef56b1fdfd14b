"""On the path of a Python process that interprets kernels: it takes a fifth of the time.

Triton's interpreter replaces the language's functions by its own at each launch and at each device function that a
kernel calls, by looking through all of them. Here it does so once for each function and leaves them replaced. And it
makes the types and shapes of each value anew; here those that are equal are made once. What it computes of overflows
it looks at in debug mode only; here it does not compute it.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)

patch_lang = interpreter._patch_lang


@functools.cache
def patch_for_good(function: Callable[..., Any]) -> Any:
    patch_lang(function)
    return interpreter._LangPatchScope()  # in which nothing is to be restored


interpreter._patch_lang = patch_for_good


def patch_attribute(owner: Any, name: str, function: Callable[..., Any], builder: Any, scope: Any) -> None:
    def interpreted(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return function(*arguments, **options)

    scope.set_attr(owner, name, interpreted)


interpreter._patch_attr = patch_attribute

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

semantic.numbers = SimpleNamespace(Number=(int, float, np.number))  # any number else is looked up in a registry

INTEGERS = {*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES}
core.dtype.is_int = lambda dtype: dtype.name in INTEGERS

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
        block_types[key] = vars(block_type) | {"shape": shape, "tensor_shape": tensor_shape, "of": {}}
    vars(block_type).update(block_types[key])


core.block_type.__init__ = init_block_type_once


def with_element_type(block_type: Any, element_ty: Any) -> Any:
    """The same type each time: `of` is what types of this element and shape share."""
    of = block_type.of
    if element_ty.name not in of:
        of[element_ty.name] = core.block_type(element_ty, block_type.shape)
    return of[element_ty.name]


core.block_type.with_element_ty = with_element_type


def init_tensor(tensor: Any, handle: Any, dtype: Any) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, dtype, dtype.scalar
    tensor.shape, tensor.numel = dtype.tensor_shape if dtype.is_block() else make_shape(())[1:]


core.tensor.__init__ = init_tensor

is_equal = core.tuple.__eq__


def is_equal_quickly(one: Any, other: Any) -> Any:
    if type(other) is list:  # of plain sizes
        return core.constexpr(one.values == other)
    return core.constexpr(True) if one is other else is_equal(one, other)


core.tuple.__eq__ = is_equal_quickly

Semantic = semantic.TritonSemantic
broadcast, cast = Semantic.broadcast_impl_value, Semantic.cast


def broadcast_quickly(self: Any, one: Any, other: Any) -> Any:
    is_same = one.shape is other.shape  # scalars have one shape, too
    return (one, other) if is_same else broadcast(self, one, other)


def cast_quickly(self: Any, value: Any, dtype: Any, *rounding: Any, **named: Any) -> Any:
    return value if value.dtype is dtype.scalar else cast(self, value, dtype, *rounding, **named)


Semantic.broadcast_impl_value, Semantic.cast = broadcast_quickly, cast_quickly
