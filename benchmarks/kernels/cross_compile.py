"""Compiles the Triton kernels for any architecture, without a device, as their launchers do."""

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton import draw_kernel, fused, merge
from engine.kernels.triton.layers import fp8, kv_copy, layer_kernels
from engine.kernels.triton.tuned import Launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_CONSTANTS_ARE_LISTED = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
"""Whether a launch lists constants beside the arguments whose alignment it knows: its cache's keys contain the list."""

FP8 = {"sm_90": ("fp8e4nv", 448.0), "gfx942": ("fp8e4b8", 240.0)}
"""Triton's name and the largest number of the 8-bit format of the architectures that multiply one."""

VOCAB_SIZE = 128_256


ELEMENTS = (
    "query", "key", "value", "key_cache", "value_cache", "keys", "values", "qkv", "q_norm", "k_norm",
    "residual", "addend", "weight", "total", "normed", "gate_up", "x", "out",
)  # fmt: skip
"""Arguments that point to numbers of the model's format."""

DTYPES = {
    **dict.fromkeys(("partial_out", "partial_lse", "sinks", "scales", "cos", "sin", "logits", "scratch"), "*fp32"),
    **dict.fromkeys(("scale", "cap", "epsilon"), "fp32"),
    **dict.fromkeys(("work", "counters", "row_parts", "block_ids"), "*i32"),
    **dict.fromkeys(("num_pairs", "vocab_size"), "i32"),
    **dict.fromkeys(("slots", "rows"), "*i64"),
    "settings": "*fp64",
}
"""Triton's types of other arguments, but for strides and offsets."""


def compile_kernel(
    kernel: Any,
    architecture: str,
    *,
    element: str,
    dtypes: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int = 2,
    **options: Any,
) -> Any:
    """Compile a jit function as its launcher does: pointers, strides and offsets are multiples of 16.

    A launch finds it in Triton's cache, so a search compiles each candidate once.

    Args:
        element: Triton's name of the model's format.
        dtypes: of arguments with another type than `ELEMENTS` and `DTYPES` say.
    """
    known = dict.fromkeys(ELEMENTS, f"*{element}") | DTYPES | dtypes
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            if _CONSTANTS_ARE_LISTED:
                attributes[(index,)] = []
            continue
        is_step = name.startswith("stride") or name.endswith("_at") or name == "window"
        signature[name] = "i32" if is_step else known[name]
        if is_step or signature[name].startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, dict(constants), attributes)
    chosen = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True, **options}
    return triton.compile(source, target=TARGETS[architecture], options=chosen)


def compile_attention(
    architecture: str,
    launch: Launch,
    *,
    element: str = "bf16",
    head_dim: int,
    group_size: int = 4,
    block_size: int = 16,
    has_window: bool = False,
    has_cap: bool = False,
    has_sinks: bool = False,
    is_merging: bool = True,
    kv: str = "",
) -> Any:
    """The attention kernel of one launch, as Triton's compiled object; kv: an 8-bit format of the KV cache."""
    return compile_kernel(
        fused._attention_kernel,
        architecture,
        element=element,
        dtypes=dict.fromkeys(("key_cache", "value_cache"), f"*{kv or element}"),
        constants={
            "NUM_KV_HEADS": 8,
            "GROUP_SIZE": group_size,
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PADDED": triton.next_power_of_2(head_dim),
            "BLOCK_SIZE": block_size,
            "NARROW_M": launch.narrow.rows,
            "NARROW_N": launch.narrow.tokens,
            "WIDE_M": launch.wide.rows if launch.wide else 0,
            "WIDE_N": launch.wide.tokens if launch.wide else 0,
            "HAS_WINDOW": has_window,
            "HAS_CAP": has_cap,
            "HAS_SINKS": has_sinks,
            "HAS_SCALES": bool(kv),
            "WIDENS_DOT": False,
            "IS_MERGING": is_merging,
            "IS_AMD": TARGETS[architecture].backend == "hip",
        },
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **launch.options,
    )


def compile_named(
    name: str,
    architecture: str,
    *,
    element: str = "bf16",
    is_fp8: bool = False,
    size: int = 4096,
    inner_size: int = 14336,
    head_dim: int = 128,
    has_rows: bool = False,
    has_norms: bool = True,
) -> Any:
    """A kernel beside attention, as Triton's compiled object.

    Args:
        name: "merge" (relay's), "add_rms_norm", "rotate_and_write_kv", "swiglu" or "draw"; with is_fp8
            also "quantize_rows" (attention's result), "quantized_swiglu" or "copy_kv" (from 8 to 16 bits).
        is_fp8: the kernel writes, or copies, the architecture's 8-bit format.
        size, inner_size: numbers in a row of the residual stream, and between the products of an MLP.
        has_rows, has_norms: variants of "add_rms_norm" and of "rotate_and_write_kv".
    """
    written, largest = FP8[architecture] if is_fp8 else (element, 0.0)
    caches = dict.fromkeys(("key_cache", "value_cache"), f"*{written}")
    size_padded, head_dim_padded = triton.next_power_of_2(size), triton.next_power_of_2(head_dim)
    row = {"SIZE": size, "SIZE_PADDED": size_padded}
    inner_row = {"SIZE": inner_size, "SIZE_PADDED": triton.next_power_of_2(inner_size)}
    rounding = {"LARGEST": largest, "ROUNDS_FIRST": False}
    heads = {"NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "HEAD_DIM_PADDED": head_dim_padded, "BLOCK_SIZE": 16}
    halves = {"HALF": head_dim // 2, "HALF_PADDED": triton.next_power_of_2(head_dim // 2)}
    num_draw_blocks = triton.next_power_of_2(triton.cdiv(VOCAB_SIZE, draw_kernel.BLOCK))
    kernel, num_warps, dtypes, constants = {
        "merge": (
            merge._merge_kernel, 4, {"rows": "*i32"},
            {"NUM_Q_HEADS": 32, "HEAD_DIM": head_dim, "M": 16, "HAS_SINKS": True},
        ),
        "add_rms_norm": (
            layer_kernels._add_rms_norm_kernel, layer_kernels.norm_warps(size_padded), {"normed": f"*{written}"},
            {"HAS_ADDEND": True, "HAS_ROWS": has_rows} | row | rounding,
        ),
        "rotate_and_write_kv": (
            layer_kernels._rotate_and_write_kv_kernel, 4, caches,
            {"HAS_NORMS": has_norms, "NUM_Q_HEADS": 32, "NUM_KV_HEADS": 8, "BLOCK_SIZE": 16}
            | {"M": layer_kernels.HEADS_A_PROGRAM} | halves | rounding,
        ),
        "swiglu": (layer_kernels._swiglu_kernel, 4, {}, {"SIZE": inner_size, "N": layer_kernels.SWIGLU_COLUMNS}),
        "draw": (
            draw_kernel._draw_kernel, 8, {"out": "*i64"}, {"BLOCK": draw_kernel.BLOCK, "NUM_BLOCKS": num_draw_blocks}
        ),
        "quantize_rows": (fp8._quantize_rows_kernel, 8, {"out": f"*{written}"}, {"HAS_ROWS": True} | row | rounding),
        "quantized_swiglu": (fp8._quantized_swiglu_kernel, 8, {"out": f"*{written}"}, inner_row | rounding),
        "copy_kv": (
            kv_copy._copy_kv_kernel, 4, caches, heads | {"M": kv_copy.ELEMENTS_A_PROGRAM // head_dim_padded}
        ),
    }[name]  # fmt: skip
    return compile_kernel(
        kernel, architecture, element=element, dtypes=dtypes, constants=constants, num_warps=num_warps
    )
