import typer
EXAMPLE=""
def consume() -> None: pass
