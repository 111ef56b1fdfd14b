"""Rows without their long values, which lie in a store, and the same rows with them again."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.storage.bytes_store import BytesStore

SHORT_BYTES = 128
"""A longer value lies in the store."""


class NarrowRows:
    """Makes the rows of a schema narrow, and wide again: their texts, bytes and lists of numbers, or some of these.

    A narrow row has them as bytes, where they are short, and the places and sizes of the long ones in columns of their
    own. The rows may be put in another order meanwhile.
    """

    def __init__(self, schema: pa.Schema, keep: str, store: BytesStore) -> None:
        """keep: a column that stays as it is."""
        self._schema, self._store = schema, store
        self._names = [field.name for field in schema if field.name != keep and not pa.types.is_primitive(field.type)]
        self.size_columns = [f"{name} size" for name in self._names]

    def narrow(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Raises `ArtifactError` where the disk is full."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name in self._names:
            values = _as_bytes(columns[name])
            sizes = pc.binary_length(values)
            is_long = pc.fill_null(pc.greater(sizes, SHORT_BYTES), False)
            columns[name] = pc.if_else(is_long, None, values)
            columns[f"{name} place"] = self._store.append(pc.if_else(is_long, values, None))
            columns[f"{name} size"] = pc.if_else(is_long, sizes, None)
        return pa.RecordBatch.from_pydict(columns)

    def widen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The inverse of `narrow`."""
        columns = []
        for field in self._schema:
            values = batch.column(field.name)
            if field.name in self._names:
                long = self._store.fetch(batch.column(f"{field.name} place"), batch.column(f"{field.name} size"))
                values = _from_bytes(pc.coalesce(values, long), field.type)
            columns.append(values.cast(field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _as_bytes(values: pa.Array) -> pa.LargeBinaryArray:
    """Texts or bytes, or lists of numbers without a null, as bytes; without a copy of the values."""
    if not pa.types.is_list(values.type):
        return values.cast(pa.large_binary())
    numbers, num_bytes = values.values, values.type.value_type.byte_width
    offsets = (values.offsets.to_numpy().astype(np.int64) + numbers.offset) * num_bytes
    return pa.Array.from_buffers(pa.large_binary(), len(values), [None, pa.py_buffer(offsets), numbers.buffers()[1]])


def _from_bytes(values: pa.LargeBinaryArray, kind: pa.DataType) -> pa.Array:
    """The inverse of `_as_bytes`; `values` begin at the beginning of their buffers."""
    if not pa.types.is_list(kind):
        return values
    num_bytes = kind.value_type.byte_width
    _, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1] // num_bytes
    numbers = pa.Array.from_buffers(kind.value_type, int(bounds[-1]), [None, data])
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), numbers, kind)
