"""Compiles the Triton kernels for any architecture, without a device, as their launchers do."""

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton import draw_kernel, fused, merge, triton_attention
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


def compile_kernel(
    kernel: Any,
    architecture: str,
    *,
    dtypes: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int,
    num_stages: int,
    options: Mapping[str, Any],
) -> Any:
    """Compile a jit function as its launcher does: pointers, strides and offsets are multiples of 16.

    A launch finds it in Triton's cache, so a search compiles each candidate once.

    Args:
        dtypes: of the arguments that are neither strides nor constants, "*bf16" for a pointer.
    """
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            if _CONSTANTS_ARE_LISTED:
                attributes[(index,)] = []
            continue
        is_step = name.startswith("stride") or name.endswith("_at") or name == "window"
        signature[name] = "i32" if is_step else dtypes[name]
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
    tensors = dict.fromkeys(("out", "query"), f"*{element}")
    tensors |= dict.fromkeys(("key_cache", "value_cache"), f"*{kv or element}")
    others = {"work": "*i32", "partial_out": "*fp32", "partial_lse": "*fp32", "counters": "*i32", "sinks": "*fp32"}
    return compile_kernel(
        fused._attention_kernel,
        architecture,
        dtypes=tensors | others | {"scale": "fp32", "cap": "fp32", "window": "i32"},
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
        options=launch.options,
    )


def compile_merge(architecture: str) -> Any:
    """Relay's merge kernel."""
    pointers = {"out": "*bf16", "partial_out": "*fp32", "partial_lse": "*fp32", "rows": "*i32", "sinks": "*fp32"}
    constants = {"NUM_Q_HEADS": 32, "HEAD_DIM": 128, "M": 16, "HAS_SINKS": True}
    return compile_kernel(
        merge._merge_kernel, architecture, dtypes=pointers | {"num_pairs": "i32"}, constants=constants,
        num_warps=4, num_stages=2, options={},
    )  # fmt: skip


def compile_write_kv(architecture: str) -> Any:
    """The kernel that writes keys and values."""
    pointers = dict.fromkeys(("key", "value", "key_cache", "value_cache"), "*bf16")
    constants = {
        "NUM_KV_HEADS": 8, "NUM_KV_HEADS_PADDED": 8, "HEAD_DIM": 128, "HEAD_DIM_PADDED": 128, "BLOCK_SIZE": 16,
    }  # fmt: skip
    return compile_kernel(
        triton_attention._write_kv_kernel, architecture, dtypes=pointers | {"slots": "*i64"}, constants=constants,
        num_warps=4, num_stages=2, options={},
    )  # fmt: skip


def compile_add_rms_norm(
    architecture: str, *, size: int = 4096, has_rows: bool = False, element: str = "bf16", is_fp8: bool = False
) -> Any:
    """The kernel that adds to the residual stream and norms it, for rows of this size; quantises it where is_fp8."""
    size_padded = triton.next_power_of_2(size)
    written, largest = FP8[architecture] if is_fp8 else (element, 0.0)
    pointers = dict.fromkeys(("residual", "addend", "weight", "total"), f"*{element}")
    others = {"normed": f"*{written}", "scales": "*fp32", "rows": "*i64", "epsilon": "fp32"}
    constants = {"HAS_ADDEND": True, "HAS_ROWS": has_rows, "SIZE": size, "SIZE_PADDED": size_padded}
    return compile_kernel(
        layer_kernels._add_rms_norm_kernel, architecture, dtypes=pointers | others,
        constants=constants | {"LARGEST": largest, "ROUNDS_FIRST": False},
        num_warps=layer_kernels.norm_warps(size_padded), num_stages=2, options={},
    )  # fmt: skip


def compile_rotate_and_write_kv(
    architecture: str, *, head_dim: int = 128, has_norms: bool = True, element: str = "bf16", is_fp8: bool = False
) -> Any:
    """The kernel that norms and rotates heads and writes keys and values, in 8 bits where is_fp8."""
    kv, largest = FP8[architecture] if is_fp8 else (element, 0.0)
    pointers = dict.fromkeys(("qkv", "q_norm", "k_norm", "query"), f"*{element}")
    pointers |= dict.fromkeys(("key_cache", "value_cache"), f"*{kv}")
    others = {"cos": "*fp32", "sin": "*fp32", "slots": "*i64", "epsilon": "fp32"}
    constants = {
        "HAS_NORMS": has_norms, "NUM_Q_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": head_dim // 2,
        "HALF_PADDED": triton.next_power_of_2(head_dim // 2), "BLOCK_SIZE": 16, "M": layer_kernels.HEADS_A_PROGRAM,
        "LARGEST": largest, "ROUNDS_FIRST": False,
    }  # fmt: skip
    return compile_kernel(
        layer_kernels._rotate_and_write_kv_kernel, architecture, dtypes=pointers | others, constants=constants,
        num_warps=4, num_stages=2, options={},
    )  # fmt: skip


def compile_swiglu(architecture: str, *, size: int = 14336, element: str = "bf16") -> Any:
    """The kernel between the two products of an MLP."""
    return compile_kernel(
        layer_kernels._swiglu_kernel, architecture, dtypes={"gate_up": f"*{element}", "out": f"*{element}"},
        constants={"SIZE": size, "N": layer_kernels.SWIGLU_COLUMNS}, num_warps=4, num_stages=2, options={},
    )  # fmt: skip


def compile_draw(architecture: str, *, vocab_size: int = 128_256) -> Any:
    """The kernel that draws a token from a row of logits."""
    num_blocks = triton.next_power_of_2(triton.cdiv(vocab_size, draw_kernel.BLOCK))
    return compile_kernel(
        draw_kernel._draw_kernel, architecture,
        dtypes={"logits": "*fp32", "settings": "*fp64", "scratch": "*fp32", "out": "*i64", "vocab_size": "i32"},
        constants={"BLOCK": draw_kernel.BLOCK, "NUM_BLOCKS": num_blocks}, num_warps=8, num_stages=2, options={},
    )  # fmt: skip


def compile_quantize_rows(architecture: str, *, size: int = 4096) -> Any:
    """The kernel that quantises attention's result."""
    fp8_name, largest = FP8[architecture]
    pointers = {"x": "*bf16", "rows": "*i64", "row_parts": "*i32", "out": f"*{fp8_name}", "scales": "*fp32"}
    constants = {"HAS_ROWS": True, "SIZE": size, "SIZE_PADDED": size, "LARGEST": largest, "ROUNDS_FIRST": False}
    return compile_kernel(
        fp8._quantize_rows_kernel, architecture, dtypes=pointers, constants=constants, num_warps=8, num_stages=2,
        options={},
    )  # fmt: skip


def compile_quantized_swiglu(architecture: str, *, size: int = 14336) -> Any:
    """The kernel between the two products of an MLP in 8 bits."""
    fp8_name, largest = FP8[architecture]
    constants = {
        "SIZE": size, "SIZE_PADDED": triton.next_power_of_2(size), "LARGEST": largest, "ROUNDS_FIRST": False,
    }  # fmt: skip
    return compile_kernel(
        fp8._quantized_swiglu_kernel, architecture,
        dtypes={"gate_up": "*bf16", "out": f"*{fp8_name}", "scales": "*fp32"}, constants=constants,
        num_warps=8, num_stages=2, options={},
    )  # fmt: skip


def compile_copy_kv(architecture: str, *, head_dim: int = 128) -> Any:
    """The kernel that copies KV from 8 to 16 bits."""
    fp8_name, _ = FP8[architecture]
    head_dim_padded = triton.next_power_of_2(head_dim)
    pointers = dict.fromkeys(("key_cache", "value_cache"), f"*{fp8_name}")
    pointers |= {"block_ids": "*i32", "keys": "*bf16", "values": "*bf16"}
    constants = {
        "NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "HEAD_DIM_PADDED": head_dim_padded, "BLOCK_SIZE": 16,
        "M": kv_copy.ELEMENTS_A_PROGRAM // head_dim_padded,
    }  # fmt: skip
    return compile_kernel(
        kv_copy._copy_kv_kernel, architecture, dtypes=pointers, constants=constants, num_warps=4, num_stages=2,
        options={},
    )  # fmt: skip
