"""What proves marshal_py: tools that fold, generate and judge logs without a broker. Nothing here runs in production.

Rooms, each built on those before it: oracle, judge, cluster, mutants, tools, exhaustive, commands.
"""
