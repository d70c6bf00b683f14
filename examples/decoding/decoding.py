"""Decodes messages on Spark's executors: `decode` for mapInArrow, with the parser of another module.

Ship both with `--py-files` or in the image: what Python workers keep from task to task must be in a module that they
import. docs/spark-reference.md says how to use it.
"""

import pyarrow as pa


class Malformed(Exception):
    """This message can never be decoded."""


ORDER = pa.struct([("id", pa.int64()), ("amount", pa.float64())])
COLUMNS = (
    "topic STRING, partition INT, offset BIGINT, order STRUCT<id: BIGINT, amount: DOUBLE>, error STRING, value BINARY"
)


def decode(batches, parse):
    """For mapInArrow: the order, or the error with the bytes it is about."""
    for batch in batches:
        rows = [decoded(value, parse) for value in batch.column("value").to_pylist()]
        orders, errors, values = zip(*rows, strict=True) if rows else ((), (), ())
        places = [batch.column(name) for name in ("topic", "partition", "offset")]
        yield pa.RecordBatch.from_arrays(
            [*places, pa.array(orders, ORDER), pa.array(errors, pa.string()), pa.array(values, pa.binary())],
            ["topic", "partition", "offset", "order", "error", "value"],
        )


def decoded(value, parse):
    try:
        order = parse(value) if value is not None else None
        pa.scalar(order, ORDER)  # a field of another type is malformed, too
        return order, None, None
    except (Malformed, pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        return None, repr(error), value
