"""Turns a log into what people and programs want to know: explanations, tables, advisories, rates.

Pure: nothing here reads a clock or a cluster. Everything is derived from a log's records and their verdicts.
explain.py alone touches a file: the state that a consumer keeps when it ends with Diverged.
"""
