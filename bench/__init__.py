"""Benchmarks against a real Apache Kafka, each beside its contestants in one run: `python -m bench [NAME...]`.

Each benchmark is one file with `run(stand: Stand, tiny: bool) -> Result`; its docstring says the question, the
contestants, what is measured and how. `tiny` is the same path in a few seconds: tests/kafka/test_bench.py runs it, so
that no benchmark rots. Only full runs on an otherwise idle machine give figures that mean something.
"""
