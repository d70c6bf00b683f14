"""`python -m marshal_command`: the command line where the script is not installed."""

from marshal_command import main

main()
