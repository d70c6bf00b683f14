"""`python -m marshal_sim`: runs, mutants, exhaustive searches and audits. It needs the extra `cli`."""

from marshal_sim.commands.simulate import app

app(prog_name="python -m marshal_sim")
