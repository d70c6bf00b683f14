"""Parses Protobuf in Confluent's wire format, with the classes that `protoc` generates. See decoding.py."""

from decoding import Malformed
from google.protobuf.message import DecodeError
from orders_pb2 import Order


def parse(value):
    if len(value) < 6 or value[0] or value[5]:  # 0, the schema's id, 0 for the file's first type
        raise Malformed("not an Order in Confluent's wire format")
    try:
        order = Order.FromString(value[6:])
    except DecodeError as error:
        raise Malformed(str(error)) from error
    return {"id": order.id, "amount": order.amount}
