"""Benchmarks against a real Apache Kafka, each compared with its contestants in one run: `python -m bench [NAME...]`.

Each benchmark is one file with `run(environment: BenchEnvironment, tiny: bool) -> Result`. Its docstring states the
question, the contestants, and what is measured and how. `tiny` runs the same code in a few seconds:
tests/kafka/test_bench.py does so, so that no benchmark rots. Only full runs on an otherwise idle machine give figures
that mean something.
"""
