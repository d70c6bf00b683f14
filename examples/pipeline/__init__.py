"""A whole pipeline: orders through Kafka, handled under claims by a Spark query and a Python service in one group.

make pipeline                                   (python -m examples.pipeline --help for its options)

orders.py    what an order is: made up, with late and malformed ones; parsed, by everybody with the same code
service.py   a Python service: stores what is good, sends what is malformed to the dead-letter topic
job.py       the same as a Spark query in the same group; and a second query that counts orders per hour
__main__.py  starts all of it, kills and restarts if asked, and compares the output with what was produced
"""
