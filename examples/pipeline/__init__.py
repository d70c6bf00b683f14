"""A whole pipeline: a Spark query and a Python service in one group handle orders from Kafka.

make pipeline                                   (python -m examples.pipeline --help for its options)

orders.py    makes orders up, with late and malformed ones, and parses them; everything uses the same code
service.py   a Python service: stores good orders, sends malformed ones to the dead-letter topic
job.py       does the same as a Spark query in the same group; a second query counts orders per hour
__main__.py  starts everything, kills and restarts it if asked, and compares the output with the input
"""
