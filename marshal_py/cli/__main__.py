"""`python -m marshal_py.cli`: the command line where the script is not installed."""

from marshal_py.cli import main

main()
