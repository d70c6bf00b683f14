import typer
EXAMPLE=""
def produce() -> None: pass
